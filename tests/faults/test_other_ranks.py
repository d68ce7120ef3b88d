"""A run resumes on more or fewer ranks: the global mini-batches stay the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from faulty_runs import toy
from runs import finish, launcher, options, records, spawn

from lavis_mafa.training.checkpoint import _check_same_settings
from lavis_mafa.training.state import _redistribute

SCRIPT = Path(__file__).parents[1] / "training" / "recording_run.py"
LAST = "checkpoint_last.pth"
# 4 steps per epoch with 8 pairs each, 2 left over.
RUN = toy("albef", run__accum_grad_iters=3)


def train_on_ranks(folder, ranks, **changes):
    """Train on a number of ranks; return the ``(steps, 8)`` indices of every global mini-batch."""
    folder.mkdir(exist_ok=True)
    changes = {**RUN, **changes, "run__batch_size_train": 8 // ranks}
    config = changes.pop("config")
    run_options = options(folder, **changes)
    start = launcher(ranks if ranks > 1 else None)
    finish(spawn(folder, [*start, SCRIPT, folder, config, *run_options]))
    by_rank = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return [sum((one["index"] for one in step), []) for step in zip(*by_rank, strict=True)]


def orders_of(content):
    schedule = content["run"]["ranks"][0]["schedule"]
    return [schedule[name]["order"].tolist() for name in ("plan", "next_plan") if schedule[name]]


@pytest.mark.parametrize(
    "before, after, stop",
    [
        (2, 1, 6),
        *[
            pytest.param(*case, marks=pytest.mark.faults)
            for case in [
                (2, 1, 1),
                (2, 1, 4),
                (2, 1, 11),
                (1, 2, 3),
                (1, 2, 7),
                (1, 2, 8),
                (2, 4, 6),
                (4, 1, 5),
            ]
        ],
    ],
)
def test_global_mini_batches_stay_the_same(tmp_path, before, after, stop):
    first = train_on_ranks(tmp_path / "run", before, run__max_steps=stop)
    content = torch.load(tmp_path / "run" / "job" / LAST, weights_only=True)
    epoch, step = content["run"]["epoch"], content["run"]["step"]
    second = train_on_ranks(tmp_path / "run", after, run__resume_ckpt_path="auto")
    ended = torch.load(tmp_path / "run" / "job" / LAST, weights_only=True)
    assert ended["run"]["global_step"] == 12 and len(first) + len(second) == 12
    # The rest of the epoch follows the order in the checkpoint.
    (order,) = orders_of(content)
    expected = [order[8 * k : 8 * k + 8] for k in range(step, 4)]
    same = second[: len(expected)] == expected
    # Every epoch has every sample once, except the two that come first in the next one.
    lost = 0
    for epoch_number in range(3):
        trained = sum((first + second)[4 * epoch_number : 4 * epoch_number + 4], [])
        lost += 32 - len(set(trained))
        if epoch_number < 2:
            assert set(range(34)) - set(trained) <= set((first + second)[4 * epoch_number + 4])
    assert same and lost == 0 and epoch < 3
    assert len(records(tmp_path / "run", "step")) == 12


@pytest.mark.parametrize(
    "before, after, message",
    [
        ((4, 2), (4, 1), "run.batch_size_train: 4 before, 4 now, on 2 rank.* 1 now: use 8"),
        ((3, 1), (3, 2), "3 pairs cannot be split evenly"),
        ((4, 2), (8, 2), "run.batch_size_train: 4 before, 8 now\n"),
        ((4, 2), (8, 1), None),
        ((4, 2), (2, 4), None),
    ],
)
def test_other_global_batch_sizes_are_rejected(before, after, message):
    def config(size):
        return {"run": {"batch_size_train": size}, "model": {}}

    def check_settings():
        _check_same_settings(config(before[0]), config(after[0]), "it", (before[1], after[1]))

    if message is None:
        return check_settings()
    with pytest.raises(ValueError, match=message):
        check_settings()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_redistribution_keeps_sums_and_mean_gradients(count):
    def rank_state(place):
        return {
            "random": {"of": place},
            "schedule": {"plan": "p", "next_plan": None, "collector": None},
            "unreadable": {"seen": 10 + place, "bad": {place: "broken"}},
            "tally": {"steps": 3.0, "found": 2.0 * place},
            "gradients": {
                "w": torch.full((2,), float(place)),
                **({"b": torch.ones(1)} if place else {}),
            },
        }

    shared = _redistribute([rank_state(0), rank_state(1)], count)
    unreadable = [one["unreadable"] for one in shared]
    assert sum(one["seen"] for one in unreadable) == 21
    assert {index for one in unreadable for index in one["bad"]} == {0, 1}
    # Evenly, because a rank stops the run by its own share of bad samples.
    assert max(one["seen"] for one in unreadable) <= -(-21 // count)
    assert max(len(one["bad"]) for one in unreadable) == -(-2 // count)
    tallies = [one["tally"] for one in shared]
    sums = {name: sum(tally[name] for tally in tallies) for name in tallies[0]}
    assert sums == {"steps": 6.0, "found": 2.0}
    for one in shared:
        assert torch.equal(one["gradients"]["w"], torch.full((2,), 0.5))
        assert torch.equal(one["gradients"]["b"], torch.full((1,), 0.5))
    assert [one["random"] for one in shared] == [{"of": 0}, {"of": 1}, None][:count]
