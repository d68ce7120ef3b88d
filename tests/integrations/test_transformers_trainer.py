"""The losses in transformers' Trainer, as docs/with_open_clip.md prints them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from runs import finish, launcher, spawn
from test_pages import script_of
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel, TrainingArguments
from two_forks import answers_of_a_group

from lavis_mafa import GritSchedule, MiningRule, SoftLabels, StepSettings
from lavis_mafa.integrations.cross_encoders import PairJudge
from lavis_mafa.integrations.open_clip import ClipLoss, SigLipLoss
from lavis_mafa.integrations.pair_loss import PairLoss

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

from datasets import Dataset  # noqa: E402

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TEXT = {
    **SIZES,
    "vocab_size": 50,
    "max_position_embeddings": 16,
    "projection_size": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
VISION = {**SIZES, "image_size": 16, "patch_size": 8}
PLAIN = {"detach_other": False, "soft_labels": SoftLabels("one_hot")}
MODELS = {
    "CLIP": lambda: CLIPModel(
        CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)
    ),
    "SigLIP": lambda: SiglipModel(SiglipConfig(text_config=TEXT, vision_config=VISION)),
}


def train(folder, name, settings, resume=False, steps=-1, batch=8, log=500):
    """Run the script of the page with 24 rows for three epochs.

    Returns:
        Its names, and the rows of each mini-batch.
    """
    torch.manual_seed(0)
    model = MODELS[name]()
    ids = torch.randint(2, 50, (24, 6))
    ids[:, -1] = 1
    data = Dataset.from_dict({"pixel_values": torch.randn(24, 3, 16, 16), "input_ids": ids})
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=3,
        max_steps=steps,
        per_device_train_batch_size=batch,
        save_strategy="steps",
        save_steps=4,
        logging_steps=log,
        report_to=[],
        use_cpu=True,
        lr_scheduler_type="constant",
    )
    names = {"model": model, "settings": settings, "ClipLoss": ClipLoss, "SigLipLoss": SigLipLoss}
    names |= {"train": data.with_format("torch"), "arguments": arguments}
    script = script_of("with_open_clip.md", 1).rsplit("trainer.train()", 1)[0]
    assert "grit=grit)" in script
    exec(script.replace("grit=grit)", "grit=grit, settings=settings)"), names)
    seen, collect = [], GritSchedule.collect

    def recording(self, rows, *features):
        seen.append(rows.tolist())
        return collect(self, rows, *features)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GritSchedule, "collect", recording)
        result = names["trainer"].train(resume_from_checkpoint=resume or None)
    assert result.training_loss > 0
    return names, seen


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mines", [False, True])
def test_trainer(tmp_path, name, mines):
    rule = MiningRule(score="similarity", rule="margin", top_k=0, action="drop")
    settings = StepSettings(**PLAIN, **({"connections": rule} if mines else {}))
    names, seen = train(tmp_path, name, settings)
    model, trainer = names["model"].eval(), names["trainer"]
    batch = trainer.data_collator([names["train"][row] for row in range(8)])
    with torch.no_grad():
        found = trainer.compute_loss(model, dict(batch))
        batch.pop("labels")
        expected = model(**batch, return_loss=True).loss
    assert (float(found) == pytest.approx(float(expected), rel=1e-5)) != mines
    epochs = [sum(seen[k : k + 3], []) for k in (0, 3, 6)]
    assert len(seen) == 9 and all(sorted(rows) == list(range(24)) for rows in epochs)
    schedule = names["grit"].schedule
    assert schedule.epoch == 2 and schedule.plan.grouped
    assert [list(rows) for rows in schedule.plan.mini_batches(0)] == seen[6:]


def test_a_resumed_run_has_the_order_of_the_whole_one(tmp_path):
    settings = StepSettings(**PLAIN)
    _, whole = train(tmp_path / "whole", "CLIP", settings)
    train(tmp_path / "parts", "CLIP", settings, steps=4)
    _, rest = train(tmp_path / "parts", "CLIP", settings, resume=True)
    assert rest == whole[4:]


def test_two_ranks_share_the_rows_of_an_epoch(tmp_path):
    finish(spawn(tmp_path, [*launcher(2), Path(__file__), tmp_path]))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for epoch in range(3):  # of three steps of 4 rows
        rows = [sum(one[3 * epoch : 3 * epoch + 3], []) for one in ranks]
        assert sorted(rows[0] + rows[1]) == list(range(24))
    # The log counts all ranks' pairs: 3 steps of 8 rows with 7 candidates, in 2 directions.
    for rank in range(2):
        logged = json.loads((tmp_path / f"log_{rank}.json").read_text())
        assert [row["judged_negatives"] for row in logged if "loss" in row] == [336, 336, 336]


def judges_on_rank(rank):
    """Return whether a mini-batch of evaluation is judged whose rows one rank or both know."""
    dist.all_gather = None  # as NCCL, which has no collectives of tensors on the CPU
    judge = PairJudge.__new__(PairJudge)
    loss = PairLoss(judge=judge, all_ranks=True)
    found = []
    for knowing in ({0}, {0, 1}):
        judge.rows = SimpleNamespace(known=lambda numbers, knowing=knowing: rank in knowing)
        found.append(loss.judges(torch.arange(4), training=False))
    return found


def test_two_ranks_agree_whether_an_evaluation_set_is_judged(tmp_path):
    answers = answers_of_a_group(judges_on_rank, tmp_path)
    assert answers == [(rank, False, True) for rank in range(2)]


if __name__ == "__main__":
    rule = MiningRule(score="similarity", rule="margin", top_k=0, action="drop")
    settings = StepSettings(**PLAIN, connections=rule)
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    names, rows = train(folder / "out", "CLIP", settings, batch=4, log=3)
    (folder / f"{rank}.json").write_text(json.dumps(rows))
    (folder / f"log_{rank}.json").write_text(json.dumps(names["trainer"].state.log_history))
