"""Checks that need a GPU; run by `bash run_scripts/gpu_checks.sh`."""

from __future__ import annotations

import math

import pytest
import torch
from runs import OWN, ROOT, finish, records, run_here, start, weights
from test_global_threshold_runs import GLOFND
from test_groups_runs import QUEUE, changes, write_groups

from lavis_mafa import load_model
from lavis_mafa.algorithm.itc_forms import ITC_LOSSES
from lavis_mafa.algorithm.labels import SOFT_LABELS
from lavis_mafa.algorithm.momentum import GROUP_QUEUE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_GPU = {"run__device": "cuda"}
LEARNED = {
    "run__plugins": f'["{ROOT / "research/falcon.py"}"]',
    "run__grit__schedule": "learned",
    "run__grit__learned__lr": 0.01,
}
BLIP2 = {"config": str(ROOT / "projects/mafa/train/blip2_toy.yaml")}


def losses_of(folder):
    return [r["loss"] for r in records(folder, "step")]


@pytest.mark.parametrize("amp_dtype", ["fp16", "bf16"])
def test_mixed_precision_losses_are_close_to_full_precision(tmp_path, amp_dtype):
    run_here(tmp_path / "exact", **ON_GPU, run__max_epoch=2)
    mixed = {"run__amp": True, "run__amp_dtype": amp_dtype, "run__max_grad_norm": 5.0}
    run_here(tmp_path / "mixed", **ON_GPU, **mixed, run__max_epoch=2)
    exact = losses_of(tmp_path / "exact")
    mixed_losses = losses_of(tmp_path / "mixed")
    assert mixed_losses == pytest.approx(exact, rel=0.1)


def test_resumed_run_on_gpu_equals_uninterrupted_run(tmp_path):
    mixed = {**ON_GPU, "run__amp": True, "run__num_workers": 2}
    run_here(tmp_path / "whole", **mixed)
    run_here(tmp_path / "cut", **mixed, run__max_steps=14)
    run_here(tmp_path / "cut", **mixed, run__resume_ckpt_path="auto")
    # Not the weights: sums in any order move those without a gradient, such as the keys' biases.
    whole, cut = (losses_of(tmp_path / name) for name in ("whole", "cut"))
    assert cut == pytest.approx(whole, rel=5e-3)  # other masks or pairs: 5 % in some step


@pytest.mark.parametrize("amp_dtype", ["fp16", "bf16", None])
def test_blip2_with_frozen_fp16_vit(tmp_path, amp_dtype):
    """With and without mixed precision for the rest; Con-D has the same image encoder."""
    torch.save({"model": load_model("blip2_mafa", "tiny").state_dict()}, tmp_path / "vit.pth")
    frozen = {
        **BLIP2,
        **ON_GPU,
        "model__freeze_vit": True,
        "model__vit_precision": "fp16",
        "model__vit_weights": tmp_path / "vit.pth",
    }
    mixed = {"run__amp": amp_dtype is not None, "run__amp_dtype": amp_dtype or "fp16"}
    run_here(tmp_path / "con_d", **frozen, run__max_epoch=1)
    con_d = {
        "model__mafa__con_d__arch": "blip2_mafa",
        "model__mafa__con_d__model_type": "tiny",
        "model__mafa__con_d__checkpoint": tmp_path / "con_d/job/checkpoint_last.pth",
    }
    runner = run_here(tmp_path / "mafa", **frozen, **mixed, **con_d, run__max_epoch=2)
    assert runner._model.con_d.shares_encoder
    losses = losses_of(tmp_path / "mafa")
    assert losses[-1] < losses[0]
    weight = runner._model.visual_encoder.patch_embed.proj.weight
    assert weight.dtype is torch.float16 and weight.device.type == "cuda"
    images = torch.randn(3, 3, 32, 32, device="cuda")
    assert len(runner._model.eval().generate({"image": images}, max_length=12)) == 3


def test_blip2_on_gpu_equals_cpu(tmp_path):
    run_here(tmp_path / "gpu", **BLIP2, **ON_GPU, run__max_epoch=2)
    run_here(tmp_path / "cpu", **BLIP2, run__max_epoch=2)
    assert equal_to_cpu(tmp_path / "gpu", tmp_path / "cpu", rel=0.05)  # negatives are drawn


def losses(folder, **changes):
    run_here(folder, **ON_GPU, run__max_epoch=1, **changes)
    return losses_of(folder)


@pytest.mark.parametrize("amp_dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("config", [{}, BLIP2])
def test_cached_batch_in_mixed_precision_is_close_to_the_whole_one(tmp_path, amp_dtype, config):
    mixed = {**config, "run__amp": True, "run__amp_dtype": amp_dtype}
    whole = losses(tmp_path / "whole", **mixed)
    # Not closer: every chunk draws its own dropout and masks.
    cached = losses(tmp_path / "cached", **mixed, run__cached_batch=3)
    assert cached == pytest.approx(whole, rel=0.15)


@pytest.mark.parametrize("config", [{}, BLIP2])
def test_compiled_image_encoders_give_equal_losses(tmp_path, config):
    plain, compiled = (
        losses(tmp_path / str(on), **config, run__compile=on) for on in (False, True)
    )
    assert compiled == pytest.approx(plain, rel=0.02)


def equal_to_cpu(gpu, cpu, rel=0.1):
    """Whether the losses of two runs are close in the first epoch, whose order is that of the seed;
    later ones are grouped by features, of which rounding may change the order."""
    of = [
        [record["loss"] for record in records(path, "step") if record["epoch"] == 0]
        for path in (gpu, cpu)
    ]
    return len(of[0]) > 0 and of[0] == pytest.approx(of[1], rel=rel)


METHODS = {
    form: {"model__mafa__itc_loss": form, "model__mafa__learn_temperature": form != "rince"}
    for form in sorted(ITC_LOSSES)
} | {
    label: {
        "model__mafa__soft_labels__type": label,
        "model__mafa__soft_labels__start_epoch": 0,
        "model__queue_size": 16 if label == "momentum" else 0,
    }
    for label in sorted(SOFT_LABELS)
}


@pytest.mark.parametrize("name", METHODS)
def test_method_equals_cpu_and_is_finite_in_mixed_precision(tmp_path, name):
    """Forms of ITC, and soft labels."""
    # RINCE has no lower bound, and the rounding grows with every step.
    given = METHODS[name] | ({"run__max_steps": 2} if name == "rince" else {})
    on_gpu = losses(tmp_path / "gpu", **given)
    run_here(tmp_path / "cpu", **given, run__max_epoch=1)
    assert equal_to_cpu(tmp_path / "gpu", tmp_path / "cpu")
    for amp_dtype in ("fp16", "bf16"):
        mixed = losses(tmp_path / amp_dtype, **given, run__amp=True, run__amp_dtype=amp_dtype)
        assert mixed == pytest.approx(on_gpu, rel=0.1)


@pytest.mark.parametrize("same_group", ["dropped", "positive"])
def test_groups_equal_those_on_a_cpu(tmp_path, same_group):
    """In the mini-batch, in the momentum queue, and kept apart in grouped mini-batches."""
    given = {**changes(write_groups(tmp_path), **QUEUE), "model__mafa__same_group": same_group}
    run_here(tmp_path / "gpu", OWN, **{**given, **ON_GPU})
    run_here(tmp_path / "cpu", OWN, **given)
    assert equal_to_cpu(tmp_path / "gpu", tmp_path / "cpu")
    assert all(math.isfinite(record["loss"]) for record in records(tmp_path / "gpu", "step"))
    assert (weights(tmp_path / "gpu")[GROUP_QUEUE] >= 0).any()


@pytest.mark.parametrize("what", ["choices and rewards", "thresholds", "groups"])
def test_ranks_exchange_by_nccl(tmp_path, what):
    """On two GPUs, or on one: what FALCON and GloFND learn, and groups of all candidates."""
    given = {"choices and rewards": LEARNED, "thresholds": GLOFND}.get(what)
    if given is None:
        given = {**changes(write_groups(tmp_path), model__negative_all_rank=True), "config": OWN}
    small = {"run__batch_size_train": 4, "run__max_epoch": 2}
    ranks = min(2, torch.cuda.device_count())
    finish(start("train.py", tmp_path, **{**given, **ON_GPU, **small, "ranks": ranks}))
    found = [record["loss"] for record in records(tmp_path, "step")]
    assert found and all(math.isfinite(loss) for loss in found)
