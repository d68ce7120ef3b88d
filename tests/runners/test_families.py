"""BLIP and BLIP-2 in the runner: stop and resume, naive GRIT, two processes."""

from __future__ import annotations

import pytest
import torch
from runs import ROOT, finish, records, run_here, same_weights, start, weights

from lavis_mafa import load_model

TRAIN = ROOT / "projects/mafa/train"
BLIP, BLIP2 = str(TRAIN / "blip_toy.yaml"), str(TRAIN / "blip2_toy.yaml")


@pytest.fixture(scope="module")
def vit_weights(tmp_path_factory):
    """Weights for an image encoder that stays frozen."""
    path = tmp_path_factory.mktemp("vit") / "vit.pth"
    torch.manual_seed(4)
    torch.save({"model": load_model("blip2_mafa", "tiny").state_dict()}, path)
    return path


def changes_of(name, vit_weights):
    if name == "blip with momentum":
        momentum = {"model__mafa__soft_labels__type": "momentum", "model__queue_size": 37}
        return {"config": BLIP, "model__mafa__connections__action": "drop", **momentum}
    frozen = {"model__freeze_vit": True, "model__vit_weights": vit_weights}
    return {"config": BLIP2, "model__mafa__connections__use_in": '["itc","itm","lm"]', **frozen}


@pytest.mark.parametrize("name", ["blip with momentum", "blip2 with a frozen ViT"])
def test_resumed_run_equals_uninterrupted_run(tmp_path, vit_weights, name):
    changes = changes_of(name, vit_weights)
    run_here(tmp_path / "whole", run__max_epoch=2, **changes)
    run_here(tmp_path / "cut", run__max_epoch=2, run__max_steps=12, **changes)
    run_here(tmp_path / "cut", run__max_epoch=2, run__resume_ckpt_path="auto", **changes)
    full, resumed = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert same_weights(full, resumed)
    if name == "blip with momentum":
        assert {"image_queue", "text_encoder_m.encoder.layer.0.output.dense.weight"} < full.keys()
        assert int(full["queue_ptr"]) == 18 * 8 % 37
        assert not torch.equal(full["text_proj_m.weight"], full["text_proj.weight"])
    else:
        assert not any(key.startswith("visual_encoder.") for key in full)
    epoch = records(tmp_path / "whole", "epoch")[-1]
    assert epoch["false_negative_rate_i2t"] is not None and epoch["loss_lm"] > 0


def test_naive_grit_works_with_several_queries_per_image(tmp_path):
    naive = {"run__grit__naive": True, "run__grit__start_epoch": 0}
    runner = run_here(tmp_path, config=BLIP2, run__max_epoch=1, **naive)
    assert runner.schedule.plan.grouped
    assert records(tmp_path, "epoch")[0]["loss"] > 0


def test_two_ranks_with_a_zero_loss_weight(tmp_path):
    """Unused parameters, gradient checkpointing and gradient accumulation together."""
    output = finish(
        start(
            "train.py",
            tmp_path,
            config=BLIP2,
            ranks=2,
            run__max_epoch=1,
            run__batch_size_train=4,
            run__accum_grad_iters=2,
            model__use_grad_checkpoint=True,
            model__mafa__loss_weights__lm=0.0,
        )
    )
    steps = records(tmp_path, "step")
    assert len(steps) == 9 and all(step["loss_itm"] > 0 for step in steps), output[-500:]
    assert all("loss_lm" not in step for step in steps)
    saved = weights(tmp_path)
    assert saved["Qformer.cls.predictions.bias"].abs().sum() == 0, "its weights must not change"
