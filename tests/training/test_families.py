"""BLIP and BLIP-2 in the runner: stop and resume, naive GRIT, two processes."""

from __future__ import annotations

from runs import ROOT, finish, records, run_here, start, weights

TRAIN = ROOT / "projects/mafa/train"
BLIP, BLIP2 = str(TRAIN / "blip_toy.yaml"), str(TRAIN / "blip2_toy.yaml")


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
