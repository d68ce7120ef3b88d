"""Orders of epochs: permutations, leftovers, ranks, queues in any proportion, resumption."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lavis_mafa.grit import EpochBatches, GritCollector, GritSchedule, grouped_plan, random_plan
from lavis_mafa.grit.grouping import group
from lavis_mafa.grit.schedule import read_order


def grit(**changes):
    return OmegaConf.create(
        {
            "enabled": True,
            "queue_size": 40,
            "search_space": 16,
            "start_epoch": 1,
            "first_order": None,
            "shuffle": True,
            "shuffle_across_ranks": False,
            "naive": False,
            "same_image": "apart",
            **changes,
        }
    )


def feature_of(indices, dim=6):
    """A fixed feature per sample, so that what is collected depends on the index alone."""
    g = torch.Generator().manual_seed(0)
    table = F.normalize(torch.randn(4096, dim, generator=g), dim=1)
    return table[torch.as_tensor(indices)]


def collect_epoch(schedules, plan, first=0, last=None):
    for rank, schedule in enumerate(schedules):
        for batch in plan.mini_batches(rank)[first:last]:
            index = torch.from_numpy(batch.copy())
            schedule.collect(index, feature_of(index), feature_of(index).flip(1))


def end_together(schedules, epoch, monkeypatch):
    """End an epoch of several simulated ranks: gathering gives all their orders to each."""
    orders = [s.collector.finish() if s.collector else None for s in schedules]
    for schedule, order in zip(schedules, orders, strict=True):
        if schedule.collector is None:
            schedule.end(epoch)
            continue
        monkeypatch.setattr("lavis_mafa.grit.schedule._gather_orders", lambda o, w: orders)
        monkeypatch.setattr(schedule.collector, "finish", lambda order=order: order)
        schedule.end(epoch)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 200),
    batch=st.integers(1, 16),
    world=st.integers(1, 3),
    queue=st.integers(1, 60),
    space=st.integers(1, 60),
    across=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_epoch_is_a_permutation_and_leftovers_come_first(
    size, batch, world, queue, space, across, shuffle, seed
):
    if size < batch * world:
        return
    cfg = grit(
        queue_size=queue,
        search_space=min(space, queue),
        shuffle=shuffle,
        shuffle_across_ranks=across,
    )
    with pytest.MonkeyPatch.context() as patch:
        schedules = [GritSchedule(cfg, size, batch, r, world, seed) for r in range(world)]
        leftover = np.empty(0, np.int64)
        for epoch in range(4):
            plans = [s.begin(epoch) for s in schedules]
            assert all(np.array_equal(p.order, plans[0].order) for p in plans)
            plan = plans[0]
            assert sorted(plan.order.tolist()) == list(range(size))
            assert plan.steps == size // (batch * world)
            assert plan.grouped == (epoch >= 1)
            assert plan.order[: len(leftover)].tolist() == leftover.tolist()
            leftover = plan.leftover
            collect_epoch(schedules, plan)
            end_together(schedules, epoch, patch)


def test_two_ranks_share_out_every_global_batch():
    plan = random_plan(103, 8, 2, np.random.default_rng(0))
    seen = np.concatenate([plan.mini_batches(r).ravel() for r in range(2)])
    assert sorted(seen.tolist()) == sorted(plan.order[:96].tolist())
    assert plan.mini_batches(0)[3].tolist() == plan.order[48:56].tolist()
    assert plan.mini_batches(1)[3].tolist() == plan.order[56:64].tolist()


def test_mini_batches_stay_whole_under_shuffling():
    orders = [np.arange(0, 40), np.arange(40, 80)]
    for across in (False, True):
        plan = grouped_plan(
            orders, np.array([80, 81, 82]), 4, np.random.default_rng(1), True, across
        )
        whole = {tuple(range(b, b + 4)) for b in range(0, 80, 4)}
        cut = [tuple(b) for b in plan.order[:80].reshape(-1, 4).tolist() if tuple(b) not in whole]
        # Only the leftovers' own mini-batch is mixed: they come first, one sample fills it up.
        assert len(cut) == 1 and cut[0][:3] == (80, 81, 82)
    plan = grouped_plan(orders, np.empty(0, np.int64), 4, np.random.default_rng(1))
    assert set(plan.mini_batches(0).ravel()) == set(range(40))
    mixed = grouped_plan(orders, np.empty(0, np.int64), 4, np.random.default_rng(1), True, True)
    assert set(mixed.mini_batches(0).ravel()) != set(range(40))


def test_without_shuffling_the_order_is_the_chain_itself():
    indices = torch.arange(30)
    collector = GritCollector(30, 30, 5, seed=3, shuffle=False)
    for part in indices.split(7):
        collector.collect(part, feature_of(part), feature_of(part).flip(1))
    start = int(np.random.default_rng(3).integers(30))
    expected = group(feature_of(indices), feature_of(indices).flip(1), start)
    order = collector.finish()
    assert order.tolist() == expected.tolist()
    plan = grouped_plan([order], np.empty(0, np.int64), 5, np.random.default_rng(0), shuffle=False)
    assert plan.order.tolist() == order.tolist()


def test_indices_above_2_to_the_24_survive():
    indices = torch.arange(16_777_216, 16_777_216 + 9)
    collector = GritCollector(4, 2, 3, seed=0)
    collector.collect(indices, torch.randn(9, 3), torch.randn(9, 3))
    assert sorted(collector.finish().tolist()) == indices.tolist()


def test_a_queue_that_is_exactly_full_at_the_end_is_fine():
    collector = GritCollector(8, 4, 4, seed=0)
    for part in torch.arange(16).split(4):
        collector.collect(part, feature_of(part), feature_of(part))
    assert sorted(collector.finish().tolist()) == list(range(16))


def test_captions_of_an_image_rarely_meet_across_sub_queues():
    ids = np.repeat(np.arange(60), 2)

    def meetings(image_ids):
        total = 0
        for seed in range(5):
            collector = GritCollector(50, 14, 4, seed=seed, image_ids=image_ids)
            for part in torch.arange(120).split(4):
                collector.collect(part, feature_of(ids[part]), feature_of(ids[part]))
            batches = ids[collector.finish()].reshape(-1, 4).tolist()
            total += sum(len(set(batch)) < 4 for batch in batches)
        return total

    # Only the last pairs of a sub-queue may be left without a choice.
    assert meetings(ids) < meetings(None) / 3


@pytest.mark.parametrize("stop", [0, 1, 5, 11, 12])
def test_a_resumed_schedule_goes_on_as_if_nothing_had_happened(stop, tmp_path):
    cfg = grit(queue_size=20, search_space=8)

    def run(schedule, epochs, begin_at=0):
        orders = []
        for epoch in epochs:
            if begin_at == 0:
                schedule.begin(epoch)
            orders.append(schedule.plan.order.tolist())
            collect_epoch([schedule], schedule.plan, begin_at)
            begin_at = 0
            schedule.end(epoch)
        return orders

    undisturbed = run(GritSchedule(cfg, 100, 8, seed=4), range(4))
    first = GritSchedule(cfg, 100, 8, seed=4)
    first.begin(0)
    collect_epoch([first], first.plan)
    first.end(0)
    first.begin(1)
    collect_epoch([first], first.plan, 0, stop)
    torch.save(first.state_dict(), tmp_path / "state.pth")
    again = GritSchedule(cfg, 100, 8, seed=4)
    again.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True), epoch=1)
    orders = []
    collect_epoch([again], again.plan, stop)
    again.end(1)
    orders.append(again.next_plan.order.tolist())
    orders += run(again, range(2, 4))[1:]
    assert orders == undisturbed[2:]


def test_batches_can_begin_at_any_step():
    plan = random_plan(50, 4, 1, np.random.default_rng(0))
    whole = list(EpochBatches(plan, 0, epoch=7))
    assert list(EpochBatches(plan, 0, 7, first_step=5)) == whole[5:]
    assert len(whole) == 12 and whole[0] == [(int(i), 7) for i in plan.order[:4]]


def test_too_little_data_for_one_batch_is_refused():
    with pytest.raises(ValueError, match="batch_size_train"):
        random_plan(7, 4, 2, np.random.default_rng(0))


def test_a_search_space_above_the_queue_is_refused():
    with pytest.raises(ValueError, match="search_space"):
        GritCollector(4, 5, 2, seed=0)


def test_a_saved_order_must_be_a_permutation(tmp_path):
    np.save(tmp_path / "order.npy", np.array([2, 0, 1]))
    assert read_order(str(tmp_path / "order.npy"), 3).tolist() == [2, 0, 1]
    plan = GritSchedule(grit(first_order=str(tmp_path / "order.npy")), 3, 1).begin(0)
    assert plan.order.tolist() == [2, 0, 1] and plan.grouped
    with pytest.raises(ValueError, match="permutation"):
        read_order(str(tmp_path / "order.npy"), 4)
    np.save(tmp_path / "twice.npy", np.array([0, 0, 1]))
    with pytest.raises(ValueError, match="permutation"):
        read_order(str(tmp_path / "twice.npy"), 3)
