"""Downstream tasks train and are evaluated on a GPU, which is simulated where there is none."""

from __future__ import annotations

import pytest
import test_nlvr
from fine_tuning import checkpoint, train_small  # noqa: F401
from runs import records, run_here
from simulated_gpu import host_waits
from test_grounding_task import SIZES
from test_grounding_task import TRAIN as GROUNDING
from test_stage2 import NO_STEP, world  # noqa: F401

from lavis_mafa.training.session import run

SHORT = ["run.device=cuda", "run.max_epoch=1", "run.num_workers=0", "run.warmup_steps=1"]
OPTIONS = dict(option.split("=") for option in SHORT)


def text_assignment_and_nlvr(folder, checkpoint):  # noqa: F811
    test_nlvr.pretrain_text_assignment(folder / "first", checkpoint, *SHORT)
    begin = folder / "first/job/checkpoint_last.pth"
    test_nlvr.fine_tune_nlvr(folder, begin, *SHORT)


def grounding(folder, checkpoint):  # noqa: F811
    own = [f"run.output_dir={folder}", "run.job_id=job", "run.loggers=[]", "run.log_freq=1"]
    run(str(GROUNDING), [*SIZES, *SHORT, *own, f"model.pretrained={checkpoint}"])


def fine_tuning(name, data):
    def train(folder, checkpoint):  # noqa: F811
        train_small(folder, name, checkpoint, data, **OPTIONS)

    return train


TASKS = {
    "VQA": fine_tuning("vqa_ft_toy", "toy_vqa"),
    "entailment": fine_tuning("ve_ft_toy", "toy_ve"),
    "retrieval": fine_tuning("retrieval_ft_toy", "toy_scenes"),
    "NLVR2": text_assignment_and_nlvr,
    "grounding": grounding,
}


@pytest.mark.parametrize("task", TASKS)
def test_task(tmp_path, checkpoint, task):  # noqa: F811
    with host_waits() as waits:
        TASKS[task](tmp_path, checkpoint)
    assert records(tmp_path, "eval") and waits


def test_stage_2(tmp_path, world):  # noqa: F811
    changes = {key.replace(".", "__"): value for key, value in OPTIONS.items()}
    # The types of mixed precision are not simulated, and Flan-T5 has no other.
    changes |= {"model__vit_precision": "fp32", "model__llm_precision": "fp32"}
    with host_waits() as waits:
        config = world["configs"]["blip2_opt_mafa"]
        runner = run_here(tmp_path, config=config, **{**NO_STEP, **changes})
    assert records(tmp_path, "epoch") and waits
    assert {one.device.type for one in runner.model.parameters()} == {"cuda"}
