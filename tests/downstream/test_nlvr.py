"""Text assignment, then NLVR2: real runs on the toy world and on files."""

from __future__ import annotations

import json
from pathlib import Path

import lavis
import pytest
import torch
from conftest import ROOT
from nlvr_files import nlvr_files
from runs import put_small_lavis, records, same_weights, weights
from toy_tasks import PLUGIN

from lavis_mafa import load_model
from lavis_mafa.training.session import run

TRAIN = ROOT / "projects/mafa/train"
TOYS = ROOT / "tests/downstream/configs/train"
DATA = f"run.plugins=[{PLUGIN}]"  # absolute: some run in other folders
SMALL = ["run.loggers=[]", "run.log_freq=1", "run.job_id=job", "run.warmup_steps=2"]


def size_options(name, train):
    info = f"datasets.{name}.build_info"
    parts = {"train": train, "val": 10, "test": 20}
    return [f"{info}.{part}_size={size}" for part, size in parts.items()]


def train(name, sizes, folder, checkpoint, *options):
    paths = [f"model.pretrained={checkpoint}", f"run.output_dir={folder}", "run.batch_size_train=8"]
    run(str(TOYS / f"{name}.yaml"), [*SMALL, DATA, *sizes, *paths, *options])


def pretrain_text_assignment(folder, checkpoint, *options):
    train("nlvr_pretrain_toy", size_options("toy_scenes", 40), folder, checkpoint, *options)


def fine_tune_nlvr(folder, checkpoint, *options):
    sizes = size_options("toy_nlvr", 30)
    train("nlvr_toy", sizes, folder, checkpoint, "run.max_epoch=1", *options)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return a checkpoint of ``albef_mafa`` with random weights."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("begin") / "albef.pth"
    torch.save({"model": load_model("albef_mafa", "tiny").state_dict()}, path)
    return path


@pytest.fixture(scope="module")
def trained_folders(tmp_path_factory, pretrained):
    """Folders of a text-assignment run and of the NLVR2 fine-tuning that starts from it."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("ta", "nlvr"))
    pretrain_text_assignment(first, pretrained)
    fine_tune_nlvr(second, first / "job/checkpoint_last.pth")
    return first, second


def test_nlvr_training_starts_from_text_assignment(trained_folders, pretrained):
    first, second = trained_folders
    assigned, tuned = weights(first), weights(second)
    assert {k for k in assigned if k not in tuned} == {"ta_head.weight", "ta_head.bias"}
    initial = torch.load(pretrained, weights_only=True)["model"]
    key = "encoder.layer.{}.crossattention.self.query.weight"
    assert not torch.equal(
        assigned["text_encoder." + key.format(2)], initial[f"text_encoder.bert.{key.format(2)}"]
    )
    steps = records(first, "step")
    assert len(steps) == 5 and all(0 <= step["correct"] <= step["judged"] == 8 for step in steps)
    (epoch,) = records(first, "epoch")
    accuracy = sum(step["correct"] for step in steps) / 40
    assert epoch["accuracy"] == pytest.approx(100 * accuracy)
    assert len(records(second, "step")) == 7
    for split, number in (("val", 20), ("test", 40)):
        evaluation = [record for record in records(second, "eval") if record["split"] == split][-1]
        epoch = evaluation["epoch"]
        rows = json.loads((second / f"job/result/{split}_epoch{epoch}.json").read_text())
        correct = sum(row["prediction"] == row["target"] for row in rows)
        assert len(rows) == number
        assert (
            evaluation["acc"] == evaluation["agg_metrics"] == pytest.approx(100 * correct / number)
        )


def test_text_assignment_resumes_bit_for_bit(trained_folders, pretrained, tmp_path):
    first, _ = trained_folders
    pretrain_text_assignment(tmp_path, pretrained, "run.max_steps=2")
    assert not same_weights(weights(tmp_path), weights(first))
    pretrain_text_assignment(tmp_path, pretrained, "run.resume_ckpt_path=auto")
    assert same_weights(weights(tmp_path), weights(first))


@pytest.mark.slow
def test_toy_statements_are_learnt(tmp_path, pretrained):
    """Statements of one kind, random initial weights; chance is 50 %."""
    info = "datasets.toy_nlvr.build_info"
    fine_tune_nlvr(
        tmp_path,
        pretrained,
        f"{info}.statement_types=[same]",
        f"{info}.statements_per_image=4",
        f"{info}.train_size=800",
        f"{info}.test_size=100",
        "run.valid_splits=[]",
        "run.batch_size_train=32",
        "run.init_lr=5e-4",
        "run.warmup_steps=10",
    )
    (figures,) = records(tmp_path, "eval")
    assert figures["split"] == "test" and figures["acc"] > 70


def test_lavis_blip_is_fine_tuned_from_our_checkpoint(tmp_path, monkeypatch):
    """By LAVIS's config of BLIP, with our runner (MAFA, Table 3)."""
    nlvr_files(tmp_path, 8)
    monkeypatch.chdir(tmp_path)
    med = put_small_lavis(tmp_path, monkeypatch, more_words=2)
    torch.manual_seed(0)
    pretrained = load_model("blip_mafa", "tiny").state_dict()
    torch.save({"model": pretrained}, tmp_path / "blip.pth")
    info = "datasets.nlvr.build_info"
    options = [
        *(f"{info}.annotations.{s}.storage={tmp_path}/{s}.json" for s in ("train", "val", "test")),
        *(f"datasets.nlvr.vis_processor.{phase}.image_size=32" for phase in ("train", "eval")),
        f"{info}.images.storage={tmp_path}/images",
        f"model.med_config_path={med}",
        "model.image_size=32",
        "model.pretrained=blip.pth",
        "run.device=cpu",
        "run.num_workers=0",
        "run.max_epoch=1",
        "run.batch_size_train=4",
        "run.output_dir=out",
        "run.init_lr=1e-9",
    ]
    run(str(Path(lavis.__file__).parent / "projects/blip/train/nlvr_ft.yaml"), [*SMALL, *options])
    assert len(records(tmp_path / "out", "step")) == 2
    assert [one["split"] for one in records(tmp_path / "out", "eval")] == ["val", "test", "test"]
    tuned = weights(tmp_path / "out")
    shared = [key for key in pretrained if key in tuned and "pos" not in key]
    assert any("text_encoder" in key for key in shared)
    assert all(torch.allclose(tuned[key], pretrained[key], atol=1e-6) for key in shared)
