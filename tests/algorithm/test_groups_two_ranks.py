"""Groups over two gloo processes with different data equal one process with all data."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from conftest import mini_batch, toy_config
from slow_families import TableConD
from torch.nn.parallel import DistributedDataParallel
from two_ranks import on_two_ranks

from lavis_mafa import load_model
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.algorithm.momentum import GROUP_QUEUE, Momentum
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.datasets import TrainingSet
from lavis_mafa.models.families import backbone_of
from lavis_mafa.toyworld import ToyScenesBuilder

BATCH = 4
# Groups 5 and 6 are on both ranks.
GROUPS = [5, 5, 6, -1, 5, 6, -1, 5]
RULE = MiningRule(low=0.3, high=0.5)
WEIGHTS = {"itc": 1.0, "itm": 1.0, "lm": 0.0}
CASES = {
    **{value: {"same_group": value} for value in ("dropped", "positive", "negative")},
    "queue": {"soft_labels": SoftLabels("momentum")},
}


@functools.cache
def data():
    return TrainingSet(ToyScenesBuilder(toy_config()).build_datasets()["train"], seed=0)


def samples_of(begin, end, first=20):
    samples = mini_batch(data(), range(first + begin, first + end), epoch=1)
    samples["image_id"] = torch.arange(first + begin, first + end)
    return {**samples, "group_id": torch.tensor(GROUPS[begin:end])}


def outputs_of(name, begin, end, wrap):
    """Return hard negatives, losses and a gradient of a step, or of two with a queue."""
    torch.manual_seed(3)
    model = load_model("albef_mafa", "tiny")
    changes = CASES[name]
    settings = StepSettings(all_ranks=True, loss_weights=WEIGHTS, connections=RULE, **changes)
    model.attach_step(model.backbone, settings, TableConD())
    if "soft_labels" in changes:
        model.momentum_encoders = Momentum(model, backbone_of, 64, queue_size=12)
        model.expect_groups()
    called = wrap(model)
    for step in range(1 + ("soft_labels" in changes)):
        model.zero_grad()
        output = called(samples_of(begin, end, 20 + 8 * step))
        output.loss.backward()
    found = {
        "hard": torch.stack([output.i2t.hard, output.t2i.hard]),
        "losses": torch.stack([output.loss_itc, output.loss_itm]).detach(),
        "gradient": model.vision_proj.weight.grad.clone(),
    }
    if "soft_labels" in changes:
        found["queue"] = getattr(model, GROUP_QUEUE).clone()
    return found


def run_rank(rank):

    def wrap(model):
        return DistributedDataParallel(model, find_unused_parameters=True)

    results = {}
    for name in CASES:
        results[name] = outputs_of(name, rank * BATCH, (rank + 1) * BATCH, wrap)
        dist.all_reduce(results[name]["losses"])
        results[name]["losses"] /= 2
    return results


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory):
    return on_two_ranks(run_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process_on_the_joined_batch(rank_results, name):
    joined = outputs_of(name, 0, 2 * BATCH, lambda model: model)
    one, other = (rank[name] for rank in rank_results)
    hard = torch.cat([one["hard"], other["hard"]], dim=1)
    assert torch.equal(hard, joined["hard"])
    groups = torch.tensor(GROUPS)
    within = (groups[hard] == groups) & (groups >= 0)
    assert within.any() == (name == "negative")
    for rank in (one, other):
        assert torch.allclose(rank["losses"], joined["losses"], rtol=1e-5)
        assert torch.allclose(rank["gradient"], joined["gradient"], rtol=1e-3, atol=2e-6)
    if name == "queue":
        assert torch.equal(one["queue"], other["queue"])
        # The second mini-batch has overwritten the first places of a ring of 12.
        assert one["queue"].tolist() == joined["queue"].tolist()
        assert one["queue"].tolist() == [GROUPS[4:] + GROUPS[4:] + GROUPS[:4]]
    losses = [rank_results[0][value]["losses"] for value in ("dropped", "positive", "negative")]
    assert len({round(loss[0].item(), 5) for loss in losses}) == 3
