"""A run resumes on more or fewer ranks: the mini-batches of all ranks together stay the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from faulty_runs import bits_differing, toy
from hypothesis import given
from hypothesis import strategies as st
from runs import finish, launcher, options, records, spawn

from lavis_mafa.algorithm.grit.collector import GritCollector, share_out
from lavis_mafa.runners.checkpoint import check_same_settings
from lavis_mafa.runners.state import redistribute

SCRIPT = Path(__file__).parents[1] / "runners" / "recording_run.py"
LAST = "checkpoint_last.pth"
# 4 steps an epoch of 8 pairs in all, 2 left over.
RUN = toy("albef", run__accum_grad_iters=3)


def go(folder, ranks, **changes):
    """Train on some ranks; return the ``(steps, 8)`` indices of every global mini-batch."""
    folder.mkdir(exist_ok=True)
    changes = {**RUN, **changes, "run__batch_size_train": 8 // ranks}
    config = changes.pop("config")
    listed = options(folder, **changes)
    finish(
        spawn(folder, [*launcher(ranks if ranks > 1 else None), SCRIPT, folder, config, *listed])
    )
    read = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return [sum((one[step]["index"] for one in read), []) for step in range(len(read[0]))]


def orders_of(content):
    schedule = content["run"]["ranks"][0]["schedule"]
    return [schedule[name]["order"].tolist() for name in ("plan", "next_plan") if schedule[name]]


@pytest.mark.parametrize(
    "before, after, stop",
    [
        (2, 1, 6),
        (1, 2, 7),
        *[
            pytest.param(*case, marks=pytest.mark.faults)
            for case in [
                (2, 1, 1),
                (2, 1, 4),
                (2, 1, 11),
                (1, 2, 3),
                (1, 2, 8),
                (2, 4, 6),
                (4, 1, 5),
            ]
        ],
    ],
)
def test_the_same_global_mini_batches(tmp_path, injected, before, after, stop):
    first = go(tmp_path / "run", before, run__max_steps=stop)
    content = torch.load(tmp_path / "run" / "job" / LAST, weights_only=True)
    epoch, step = content["run"]["epoch"], content["run"]["step"]
    then = go(tmp_path / "run", after, run__resume_ckpt_path="auto")
    ended = torch.load(tmp_path / "run" / "job" / LAST, weights_only=True)
    assert ended["run"]["global_step"] == 12 and len(first) + len(then) == 12
    # What was left of the epoch is as the checkpoint has it.
    (order,) = orders_of(content)
    left = [order[8 * k : 8 * k + 8] for k in range(step, 4)]
    same = then[: len(left)] == left
    # Every epoch has every sample once, but for the two that come first in the next.
    lost = 0
    for place in range(3):
        trained = sum((first + then)[4 * place : 4 * place + 4], [])
        lost += 32 - len(set(trained))
        if place < 2:
            assert set(range(34)) - set(trained) <= set((first + then)[4 * place + 4])
    injected(f"{before} ranks stopped, {after} go on", same and not lost, lost)
    assert same and lost == 0 and epoch < 3
    assert len(records(tmp_path / "run", "step")) == 12


@pytest.mark.parametrize(
    "before, now, told",
    [
        ((4, 2), (4, 1), "run.batch_size_train: 4 before, 4 now, on 2 rank.* 1 now: use 8"),
        ((3, 1), (3, 2), "3 pairs cannot be split evenly"),
        ((4, 2), (8, 2), "run.batch_size_train: 4 before, 8 now\n"),
        ((4, 2), (8, 1), None),
        ((4, 2), (2, 4), None),
    ],
)
def test_other_global_batches_are_refused(before, now, told):
    def config(size):
        return {"run": {"batch_size_train": size}, "model": {}}

    def check():
        check_same_settings(config(before[0]), config(now[0]), "it", (before[1], now[1]))

    if told is None:
        return check()
    with pytest.raises(ValueError, match=told):
        check()


def filled(count, queue_size, rank=0):
    """Return a collector with ``count`` pairs."""
    collector = GritCollector(queue_size, 3, 2, (0, rank), expected=count)
    generator = torch.Generator().manual_seed(rank)
    features = torch.randn(2, count, 4, generator=generator)
    collector.collect(torch.arange(count) + 1000 * rank, features[0], features[1])
    return collector


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 8), st.integers(3, 9))
def test_redistributed_collectors_keep_every_pair(ranks, count, each, queue_size):
    each *= count  # as many for every rank
    states = [filled(each, queue_size, rank).state_dict() for rank in range(ranks)]
    shared = share_out(states, count)
    assert len(shared) == count
    for name in ("order", "indices"):
        before, after = (torch.cat([s[name] for s in some]) for some in (states, shared))
        assert torch.equal(before, after)
    assert {len(s["order"]) + len(s["indices"]) for s in shared} == {ranks * each // count}
    ended = []
    for rank, state in enumerate(shared):
        collector = GritCollector(queue_size, 3, 2, (1, rank))
        collector.load_state_dict(state)
        ended += collector.finish().tolist()
    assert sorted(ended) == sorted(i + 1000 * rank for rank in range(ranks) for i in range(each))
    features = {
        int(index): (image, text)
        for state in states
        for index, image, text in zip(
            state["indices"], state["images"], state["texts"], strict=True
        )
    }
    for state in shared:
        for place, index in enumerate(state["indices"].tolist()):
            assert torch.equal(state["images"][place], features[index][0])
            assert torch.equal(state["texts"][place], features[index][1])


def test_empty_collectors_stay_empty():
    assert share_out([None, None], 3) == [None] * 3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_redistribution_keeps_sums_and_mean_gradients(count):
    def rank(place):
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

    shared = redistribute([rank(0), rank(1)], count)
    assert sum(one["unreadable"]["seen"] for one in shared) == 21
    assert {k for one in shared for k in one["unreadable"]["bad"]} == {0, 1}
    # Evenly: a rank stops the run by its own share.
    assert max(one["unreadable"]["seen"] for one in shared) <= -(-21 // count)
    assert max(len(one["unreadable"]["bad"]) for one in shared) == -(-2 // count)
    sums = {name: sum(one["tally"][name] for one in shared) for name in shared[0]["tally"]}
    assert sums == {"steps": 6.0, "found": 2.0}
    for one in shared:
        assert torch.equal(one["gradients"]["w"], torch.full((2,), 0.5))
        assert torch.equal(one["gradients"]["b"], torch.full((1,), 0.5))
    assert [one["random"] for one in shared] == [{"of": 0}, {"of": 1}, None][:count]


@pytest.mark.faults
def test_new_ranks_have_their_own_random_states(tmp_path):
    """Two ranks resumed from one have different random states."""
    go(tmp_path / "run", 1, run__max_steps=2)
    go(tmp_path / "run", 2, run__resume_ckpt_path="auto", run__max_steps=3)
    content = torch.load(tmp_path / "run" / "job" / LAST, weights_only=True)
    states = [rank["random"]["torch"] for rank in content["run"]["ranks"]]
    assert bits_differing(*states) > 100
    assert np.mean([len(rank["gradients"]) > 0 for rank in content["run"]["ranks"]]) == 0
