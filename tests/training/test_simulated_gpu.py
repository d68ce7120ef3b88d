"""Runs on a GPU that is simulated where there is none: devices, and waits of the host for it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from runs import ROOT, records, run_here
from simulated_gpu import host_waits
from test_fne_runs import SMALL as FNE
from test_fne_runs import TOY as FNE_TOY
from test_gpu import METHODS

from lavis_mafa.algorithm.pickers import PICKERS
from lavis_mafa.algorithm.rules import RULES
from lavis_mafa.training import RunnerMafa

MOST_WAITS = 6
FIRST, LAST = 10, 13  # steps between which waits are counted; mini-batches are grouped from step 9
FAMILIES = {
    name: {"config": str(ROOT / f"projects/mafa/train/{name}_toy.yaml")}
    for name in ("albef", "blip", "blip2")
}
SHORT = {"run__device": "cuda", "run__max_epoch": 1, "run__max_steps": 2, "run__num_workers": 0}
simulated = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is real")


@pytest.fixture(scope="module")
def con_d(tmp_path_factory):
    """Return the options of a Con-D of a family, a checkpoint of a run."""
    made = {}

    def options(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            run_here(made[family], **FAMILIES[family], run__max_epoch=1, run__max_steps=1)
        return {
            "model__mafa__con_d__arch": f"{family}_mafa",
            "model__mafa__con_d__model_type": "tiny",
            "model__mafa__con_d__checkpoint": made[family] / "job/checkpoint_last.pth",
        }

    return options


@pytest.mark.parametrize("family", ["albef", pytest.param("blip", marks=pytest.mark.slow), "blip2"])
def test_a_step_waits_at_most_six_times_for_the_gpu(tmp_path, monkeypatch, con_d, family):
    """From one mini-batch's loading to the next one's, with a real Con-D and known truth."""
    given = con_d(family)
    seen = []

    def record(self, *rest, **named):
        record_step(self, *rest, **named)
        seen.append(Counter(waits))

    record_step = RunnerMafa._record_step
    monkeypatch.setattr(RunnerMafa, "_record_step", record)
    on_gpu = {"run__device": "cuda", "run__log_freq": 50, "run__max_steps": LAST}
    with host_waits() as waits:
        run_here(tmp_path, **FAMILIES[family], **given, **on_gpu)
    counted = seen[LAST - 1] - seen[FIRST - 1]
    assert 0 < sum(counted.values()) <= MOST_WAITS * (LAST - FIRST), "\n".join(
        f"{number} x {place}" for place, number in counted.most_common()
    )


def trained(folder, **changes):
    with host_waits():
        runner = run_here(folder, **{**SHORT, **changes})
    assert {one.device.type for one in runner.model.parameters()} == {"cuda"}
    assert len(records(folder, "step")) == 2
    return runner


OF_STEPS = {
    **METHODS,
    **{f"picker {name}": {"model__mafa__negatives": name} for name in sorted(PICKERS)},
    **{
        f"rule {name}": {
            "model__mafa__connections__rule": name,
            "model__mafa__connections__score": "similarity",
            "model__mafa__con_d": "null",
        }
        for name in sorted(RULES)
    },
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.slow if one in METHODS else ()) for one in OF_STEPS],
)
def test_methods_place_all_tensors_on_the_gpu(tmp_path, name):
    trained(tmp_path, **OF_STEPS[name])


@pytest.mark.slow
def test_evaluation_places_all_tensors_on_the_gpu(tmp_path):
    """Retrieval with re-ranking, and the figures of known truth."""
    splits = {"run__test_splits": '["test"]', "run__valid_splits": '["val"]'}
    with host_waits():
        runner = run_here(tmp_path, **{**SHORT, **splits, "run__max_steps": None})
    assert [record["split"] for record in records(tmp_path, "eval")] == ["val", "test"]
    assert runner.progress.best.epoch == 0


@pytest.mark.slow
def test_fne_places_all_tensors_on_the_gpu(tmp_path):
    """Two epochs: plain ones, and negatives of the memory."""
    small = {**FNE, "run__max_epoch": 2, "run__max_steps": 12}
    with host_waits():
        runner = run_here(tmp_path, config=FNE_TOY, **{**SHORT, **small})
    assert {one.device.type for one in runner.model.parameters()} == {"cuda"}
    assert len(records(tmp_path, "step")) == 12
