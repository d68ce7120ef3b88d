"""Frozen weights divided over two real processes: equal to DDP, whatever is saved or resumed."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.distributed as dist
import yaml
from runs import ROOT, TOY, options, records, same_weights, weights
from small_language_models import tiny_opt, tiny_t5
from two_forks import answers_of_two

from lavis_mafa import load_model
from lavis_mafa.settings import ConfigError, load_config
from lavis_mafa.training.sharding import shard_frozen

# The frozen language models are those of BLIP-2's stage 2.
pytestmark = pytest.mark.downstream
TOYS = str(ROOT / "tests/downstream/toys.py")
LANGUAGE_MODELS = {
    "blip2_opt_mafa": ("opt_model", tiny_opt),
    "blip2_t5_mafa": ("t5_model", tiny_t5),
}
RUN = {
    "task": "mafa_captioning",
    "lr_sched": "linear_warmup_cosine_lr",
    "init_lr": 1e-3,
    "min_lr": 1e-4,
    "weight_decay": 0.05,
    "max_grad_norm": 1.0,
    "accum_grad_iters": 2,
    "batch_size_train": 4,
    "batch_size_eval": 2,
    "max_epoch": 1,
    "max_len": 6,
    "min_len": 1,
    "num_beams": 2,
    "report_metric": False,
    "num_workers": 0,
    "device": "cpu",
    "output_dir": "output",
    "train_splits": ["train"],
    "loggers": [],
}
SIZES = {"train_size": 50, "val_size": 5, "test_size": 4}  # 6 steps; rank 0 evaluates more images
UNUSED = (
    *(f"run__grit__{key}" for key in ("queue_size", "search_space", "start_epoch")),
    *("run__k_test", "model__mafa__con_d__arch", "run__max_epoch", "run__batch_size_train"),
    *TOY,
    *("run__warmup_steps", "run__loggers"),
)
# name: changes, and the run that it goes on from
RUNS = {
    "ddp": {"run__valid_splits": '["val"]'},
    "fsdp": {"run__valid_splits": '["val"]', "run__fsdp": "frozen"},
    "ddp_cut": {"run__max_steps": 4},
    "fsdp_cut": {"run__max_steps": 4, "run__fsdp": "frozen"},
    "ddp_then_fsdp": {"resumes": "ddp_cut", "run__fsdp": "frozen"},
    "fsdp_then_ddp": {"resumes": "fsdp_cut"},
    "fsdp_then_fsdp": {"resumes": "fsdp_cut", "run__fsdp": "frozen"},
    "bad_gradient": {"run__max_steps": 4, "run__fsdp": "frozen", "run__skip_bad_steps": 1},
}


def write_config(folder, arch):
    key, make = LANGUAGE_MODELS[arch]
    config = {
        "model": {"arch": arch, "model_type": "tiny", key: str(make(folder / "llm"))},
        "datasets": {"toy_caption": {"type": "default", "build_info": SIZES}},
        "run": {**RUN, "plugins": [TOYS]},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def run_all(rank, folder, config, runs, results):
    """Train runs, such as `RUNS`, as one of two ranks; answer the numbers held of each weight."""
    from lavis.common.registry import registry

    from lavis_mafa.training import RunnerMafa
    from lavis_mafa.training.session import run

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    held = {}

    class Bad(RunnerMafa):
        """One whose first two mini-batches have bad gradients on rank 1."""

        def prepare(self):
            super().prepare()
            weight = self._model.query_tokens
            weight.register_hook(
                lambda g: g * float("nan") if rank and self.progress.global_step < 2 else g
            )

    for name, given in runs.items():
        registry.mapping["runner_name_mapping"]["runner_mafa"] = (
            Bad if name == "bad_gradient" else RunnerMafa
        )
        changes = {
            **dict.fromkeys(UNUSED),
            **given,
            "run__dist_url": f"file://{folder}/{name}.id",
        }
        before = changes.pop("resumes", None)
        if before:
            changes["run__resume_ckpt_path"] = folder / before / "job/checkpoint_last.pth"
        runner = run(config, options(folder / name, **changes))
        held[name] = {
            key: getattr(value, "_local_tensor", value).numel()
            for key, value in runner._model.named_parameters()
            if not value.requires_grad
        }
        dist.destroy_process_group()
    results.put((rank, held))


@pytest.fixture(
    scope="module",
    params=["blip2_opt_mafa", pytest.param("blip2_t5_mafa", marks=pytest.mark.slow)],
)
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    # Resumption does not depend on the language model.
    basic = {name: RUNS[name] for name in ("ddp", "fsdp")}
    runs = RUNS if request.param == "blip2_opt_mafa" else basic
    config = write_config(folder, request.param)
    return folder, answers_of_two(run_all, folder, config, runs, seconds=200)


def losses(folder):
    return [record["loss"] for record in records(folder, "step")]


def assert_close(state, other):
    """Compare weights to a hundredth of AdamW's step, the smallest that it makes of rounding.

    Biases of keys are left out: softmax cancels them, and their gradient is rounding alone.
    """
    shown = [{k: v for k, v in one.items() if not k.endswith("key.bias")} for one in (state, other)]
    torch.testing.assert_close(*shown, atol=RUN["init_lr"] / 100, rtol=0)


def captions(folder):
    (path,) = (folder / "job/result").glob("val_epoch0.json")
    return {one["image_id"]: one["caption"] for one in json.loads(path.read_text())}


def test_training_equals_ddp(trained):
    folder, _ = trained
    assert len(losses(folder / "ddp")) == 6
    # Losses near 12 in single precision: neighbouring numbers are 1e-6 apart.
    assert losses(folder / "fsdp") == pytest.approx(losses(folder / "ddp"), rel=1e-6)
    whole, sharded = weights(folder / "ddp"), weights(folder / "fsdp")
    assert_close(sharded, whole)
    assert {type(value) for value in sharded.values()} == {torch.Tensor}


def test_each_rank_holds_half_of_every_frozen_block(trained):
    _, ((_, first), (_, second)) = trained
    whole, one, other = first["ddp"], first["fsdp"], second["fsdp"]
    blocks = [name for name in whole if any(part.isdigit() for part in name.split("."))]
    assert len(blocks) > 40
    for name in blocks:
        assert one[name] + other[name] == whole[name], name
    sums = [sum(held[name] for name in blocks) for held in (whole, one, other)]
    assert sums[1] == pytest.approx(sums[0] / 2, rel=0.05)
    outside = whole.keys() - set(blocks)
    assert outside and all(one[name] == whole[name] for name in outside)


def test_evaluation_generates_the_same_captions(trained):
    folder, _ = trained
    found = captions(folder / "ddp")
    assert len(found) == 5 and len(set(found.values())) > 1
    assert captions(folder / "fsdp") == found


@pytest.mark.parametrize("name", ["ddp_then_fsdp", "fsdp_then_ddp", "fsdp_then_fsdp"])
def test_resumed_with_and_without_sharding(trained, name):
    folder, _ = trained
    if not (folder / name).exists():
        pytest.skip("resumed with OPT only")
    unbroken = "fsdp" if name == "fsdp_then_fsdp" else "ddp"
    resumed, whole = weights(folder / name), weights(folder / unbroken)
    if name == "fsdp_then_fsdp":
        assert same_weights(resumed, whole)
    assert_close(resumed, whole)
    start = losses(folder / RUNS[name]["resumes"])
    assert len(start) == 4
    assert start + losses(folder / name) == pytest.approx(losses(folder / unbroken), rel=1e-6)


def test_a_model_without_frozen_blocks_is_refused():
    with pytest.raises(ValueError, match=r"run.fsdp: AlbefMafa has no frozen blocks to shard; fre"):
        shard_frozen(load_model("albef_mafa", "tiny"), torch.device("cpu"))


@pytest.mark.parametrize(
    "given, told",
    [
        (["run.fsdp=all"], "run.fsdp: .*all.*frozen"),
        (
            ["run.fsdp=frozen", "run.compile=True"],
            "run.fsdp: is not supported together with run.compile",
        ),
        (["run.fsdp=frozen", "run.cached_batch=2"], "together with run.cached_batch"),
    ],
)
def test_invalid_settings_are_refused(tmp_path, given, told):
    with pytest.raises(ConfigError, match=told) as caught:
        load_config(write_config(tmp_path, "blip2_opt_mafa"), given)
    assert sum("run.fsdp" in problem for problem in caught.value.problems) == 1
