"""Orders of epochs: permutations, leftovers, ranks, queues of any size, resume."""

import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.algorithm.grit import (
    EpochBatches,
    GritCollector,
    GritSchedule,
    GritSettings,
    grouped_plan,
    random_plan,
)
from lavis_mafa.algorithm.grit import collector as collector_module
from lavis_mafa.algorithm.grit import schedule as schedule_module
from lavis_mafa.algorithm.grit.grouping import by_region, group
from lavis_mafa.algorithm.grit.sampler import index_dtype


def grit_settings(**changes):
    return GritSettings(**{"enabled": True, "queue_size": 40, "search_space": 16, **changes})


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


def end_epoch_on_all_ranks(schedules, epoch, monkeypatch):
    """End an epoch of several simulated ranks: each receives the orders of all."""
    orders = [s.collector.finish() if s.collector else None for s in schedules]
    for schedule, order in zip(schedules, orders, strict=True):
        if schedule.collector is None:
            schedule.end(epoch)
            continue
        monkeypatch.setattr(
            "lavis_mafa.algorithm.grit.schedule._gather_orders", lambda o, w: np.array(orders)
        )
        monkeypatch.setattr(schedule.collector, "finish", lambda order=order: order)
        schedule.end(epoch)


SPACES = {"queue": st.integers(1, 60), "space": st.integers(1, 60), "shuffle": st.booleans()}


@settings(max_examples=60)
@given(
    size=st.integers(1, 200),
    batch=st.integers(1, 16),
    world=st.integers(1, 3),
    **SPACES,
    across=st.booleans(),
    hardness=st.sampled_from([1.0, 0.9, 0.3]),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    skip=st.integers(0, 5),
    regions=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_epoch_is_a_permutation_that_starts_with_the_leftover(
    size, batch, world, queue, space, across, shuffle, hardness, schedule, skip, regions, seed
):
    if size < batch * world:
        return
    cfg = grit_settings(
        queue_size=queue,
        search_space=min(space, queue),
        shuffle=shuffle,
        shuffle_across_ranks=across,
        hardness=hardness,
        schedule=schedule,
        skip=skip,
        regions=regions,
    )
    with pytest.MonkeyPatch.context() as patch:
        schedules = [GritSchedule(size, batch, cfg, r, world, seed) for r in range(world)]
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
            end_epoch_on_all_ranks(schedules, epoch, patch)


def test_random_order_depends_on_the_seed_only():
    rest = np.setdiff1d(np.arange(1000), [7, 3, 999])
    plan = random_plan(1000, 8, 1, np.random.default_rng(5), leftover=[7, 3, 999])
    assert plan.order.tolist() == [7, 3, 999, *np.random.default_rng(5).permutation(rest)]
    assert plan.order.dtype == np.int32
    plan = random_plan(1000, 8, 1, np.random.default_rng(5))
    assert plan.order.tolist() == np.random.default_rng(5).permutation(1000).tolist()


@settings(max_examples=80)
@given(
    steps=st.integers(1, 9),
    batch=st.integers(1, 5),
    world=st.integers(1, 4),
    leftover_size=st.integers(0, 19),
    how=st.sampled_from(["kept", "within", "across"]),
    as_array=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_grouped_plan_equals_slow_loop(steps, batch, world, leftover_size, how, as_array, seed):
    leftover_size = min(leftover_size, batch * world - 1, steps * batch * world)
    numbers = np.random.default_rng(seed).permutation(leftover_size + steps * batch * world)
    leftover, rest = numbers[:leftover_size], numbers[leftover_size:].astype(np.int32)
    orders = rest.reshape(world, -1) if as_array else list(rest.reshape(world, -1))
    rng = np.random.default_rng(seed)
    batches = [[order[s * batch :][:batch] for order in orders] for s in range(steps)]
    if how == "across":
        flat = [mini_batch for row in batches for mini_batch in row]
        flat = [flat[position] for position in rng.permutation(len(flat))]
    else:
        columns = [[row[rank] for row in batches] for rank in range(world)]
        if how == "within":
            columns = [[column[s] for s in rng.permutation(steps)] for column in columns]
        flat = [column[s] for s in range(steps) for column in columns]
    full_batches, part = divmod(leftover_size, batch)
    kept = len(flat) - full_batches - (part > 0)
    pushed_out = [n for mini_batch in flat[kept:] for n in mini_batch]
    filler = batch - part if part else 0
    trained = [n for mini_batch in flat[:kept] for n in mini_batch]
    expected = [*leftover, *pushed_out[:filler], *trained, *pushed_out[filler:]]
    second_rng = np.random.default_rng(seed)
    plan = grouped_plan(orders, leftover, batch, second_rng, how != "kept", how == "across")
    assert plan.order.tolist() == expected
    assert plan.order.dtype == np.int32
    assert second_rng.random() == rng.random(), "later draws would differ"


def test_indices_use_four_bytes_if_they_fit():
    assert index_dtype(2**31 - 1) == np.int32 and index_dtype(2**31) == np.int64
    assert np.iinfo(index_dtype(2**31 - 1)).max >= 2**31 - 2


def test_two_ranks_split_every_global_batch():
    plan = random_plan(103, 8, 2, np.random.default_rng(0))
    seen = np.concatenate([plan.mini_batches(r).ravel() for r in range(2)])
    assert sorted(seen.tolist()) == sorted(plan.order[:96].tolist())
    assert plan.mini_batches(0)[3].tolist() == plan.order[48:56].tolist()
    assert plan.mini_batches(1)[3].tolist() == plan.order[56:64].tolist()


@settings(max_examples=40)
@given(
    size=st.integers(1, 150),
    **SPACES,
    batch=st.integers(1, 12),
    step=st.integers(1, 70),
    expected=st.integers(0, 200),
    apart=st.booleans(),
    hardness=st.sampled_from([1.0, 0.8]),
    stop=st.integers(0, 150),
    regions=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_collecting_equals_slow_loop(
    size, queue, space, batch, step, expected, apart, shuffle, hardness, stop, regions, seed
):
    """Queues may end inside a mini-batch; saving and loading in between changes nothing."""
    space = min(space, queue)
    samples = torch.from_numpy(np.random.default_rng(seed).permutation(size))
    ids = np.arange(size) // 3 if apart else None
    rng = np.random.default_rng(seed + 1)
    slow: list[int] = []
    for part in samples.split(queue):
        shuffled = part[torch.from_numpy(rng.permutation(len(part)))] if shuffle else part
        if regions:
            shuffled = part[by_region(feature_of(part) + feature_of(part).flip(1), space)]
        spaces = shuffled.split(space)
        starts = [int(rng.integers(len(sub_queue))) for sub_queue in spaces]
        for sub_queue, start in zip(spaces, starts, strict=True):
            partly_filled = slow[len(slow) - len(slow) % batch :]
            kept_apart = (
                (ids[sub_queue.numpy()], batch, ids[partly_filled] if partly_filled else None)
                if apart
                else ()
            )
            both = feature_of(sub_queue), feature_of(sub_queue).flip(1)
            chain = group(*both, start, *kept_apart, hardness=hardness)
            slow += sub_queue[torch.from_numpy(chain)].tolist()

    def new_collector(seed):
        own = {"queue_size": queue, "search_space": space, "shuffle": shuffle, "regions": regions}
        given = GritSettings(**own, hardness=hardness)
        return GritCollector(given, batch, seed, ids, np.int32, expected)

    collector = new_collector(seed + 1)
    for number, sub_queue in enumerate(samples.split(step)):
        collector.collect(sub_queue, feature_of(sub_queue), feature_of(sub_queue).flip(1))
        if number == stop:
            state = collector.state_dict()
            state["order"] = state["order"].long()  # dtype of older checkpoints
            collector = new_collector(0)
            collector.load_state_dict(state)
    order = collector.finish()
    assert order.tolist() == slow
    assert order.dtype == np.int32


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps", [0, 3])
def test_an_epoch_that_stops_early_groups_what_there_is(ranks, steps, monkeypatch, caplog):
    schedules = [GritSchedule(83, 4, grit_settings(), rank, ranks) for rank in range(ranks)]
    plans = [schedule.begin(0) for schedule in schedules]
    collect_epoch(schedules, plans[0], last=steps)
    orders = [schedule.collector.finish() for schedule in schedules]
    for schedule, order in zip(schedules, orders, strict=True):
        own = plans[0].mini_batches(schedule.rank)
        rest = own[steps:].reshape(-1)
        assert sorted([*order, *rest]) == sorted(own.reshape(-1))
        rows = [[*o, *plans[0].mini_batches(r)[steps:].reshape(-1)] for r, o in enumerate(orders)]
        sent = []
        monkeypatch.setattr(
            schedule_module,
            "_gather_orders",
            lambda o, w, sent=sent, rows=rows: sent.append(o.tolist()) or np.array(rows),
        )
        monkeypatch.setattr(schedule.collector, "finish", lambda order=order: order)
        schedule.end(0)
        assert sent == [[*order, *rest]]
        plan = schedule.begin(1)
        assert plan.grouped and sorted(plan.order) == list(range(83))
    assert f"{4 * steps} of {4 * plans[0].steps} samples were collected" in caplog.text


@pytest.mark.parametrize("wrong", ["twice", "of the other rank"])
def test_samples_that_do_not_belong_to_the_epoch_raise(wrong):
    schedule = GritSchedule(80, 4, grit_settings(), world_size=2)
    plan = schedule.begin(0)
    collect_epoch([schedule], plan, last=5)
    other = 1 if wrong == "of the other rank" else 0
    index = torch.from_numpy(plan.mini_batches(other)[0].copy())
    schedule.collect(index, feature_of(index), feature_of(index))
    with pytest.raises(ValueError, match="24 samples were collected .* not 40"):
        schedule.end(0)


@pytest.mark.parametrize("wrong", ["positions", "foreign", "one mini-batch twice"])
def test_samples_of_other_numbers_are_not_lost_in_silence(wrong):
    schedule = GritSchedule(8, 4)
    mini_batches = schedule.begin(0).mini_batches(0)
    for number in range(2):
        index = torch.from_numpy(mini_batches[0].copy())
        if wrong != "one mini-batch twice":
            index = torch.arange(4) if wrong == "positions" else torch.arange(4) + 100 + 4 * number
        schedule.collect(index, feature_of(index), feature_of(index))
    lost = 8 if wrong == "foreign" else 4
    with pytest.raises(ValueError, match=f"{lost} of 8 samples were not collected in epoch 0, oth"):
        schedule.end(0)


def test_ids_of_other_data_are_refused():
    for name, count in (("image_ids", 7), ("group_ids", 9)):
        ids = {"image_ids": np.arange(8), name: np.arange(count)}
        wrong = f"{name} has {count} rows of int64, expected an integer for each of 8 samples"
        with pytest.raises(ValueError, match=wrong):
            GritSchedule(8, 4, **ids)
    with pytest.raises(ValueError, match="image_ids has 8 rows of <U1, expected an integer"):
        GritSchedule(8, 4, image_ids=list("aabbccdd"))


def test_ids_may_be_a_list():
    ids, orders = np.repeat(np.arange(4), 2), []
    for chosen in (ids, ids.tolist()):
        schedule = GritSchedule(8, 4, grit_settings(), image_ids=chosen)
        collect_epoch([schedule], schedule.begin(0))
        schedule.end(0)
        orders.append(schedule.next_plan.order.tolist())
    assert orders[0] == orders[1]


def test_an_epoch_begun_twice_keeps_its_order_and_what_it_collected():
    schedule, again = (GritSchedule(40, 4, grit_settings(), seed=3) for _ in range(2))
    for epoch in range(3):
        plan, other = schedule.begin(epoch), again.begin(epoch)
        collect_epoch([schedule], plan)
        collect_epoch([again], other, last=4)
        assert again.begin(epoch) is other
        collect_epoch([again], other, 4)
        assert other.order.tolist() == plan.order.tolist()
        schedule.end(epoch)
        again.end(epoch)


def test_a_given_order_replaces_the_order_of_any_epoch():
    schedule = GritSchedule(40, 4, grit_settings())
    for epoch in range(3):
        own = np.random.default_rng(epoch).permutation(40)
        if epoch == 2:
            schedule.begin(2)  # what was grouped
        plan = schedule.begin(epoch, order=own)
        assert plan.grouped and plan.order.tolist() == own.tolist()
        assert schedule.begin(epoch) is plan
        collect_epoch([schedule], plan)
        schedule.end(epoch)
    found = schedule.begin(3).order.tolist()
    assert sorted(found) == list(range(40)) and found != own.tolist()


def test_an_error_of_grouping_is_raised_at_the_next_mini_batch():
    collector = GritCollector(GritSettings(queue_size=8, search_space=8), 4, seed=0)
    part, failed = torch.arange(8), torch.full((8, 6), float("nan"))
    collector.collect(part, failed, failed)
    with pytest.raises(ValueError, match="finite"):
        for _ in range(2000):  # the thread needs a moment
            collector.collect(part[:0], failed[:0], failed[:0])
            time.sleep(0.005)


def test_at_most_two_full_queues_wait_when_grouping_is_slower_than_training(monkeypatch):
    """Each holds features, which with more of them would fill the memory."""
    done, waiting = [], []

    def slow_group(images, *args, **kwargs):
        time.sleep(0.02)
        done.append(len(images))
        return np.arange(len(images))

    monkeypatch.setattr(collector_module, "group", slow_group)
    collector = GritCollector(GritSettings(queue_size=4, search_space=4), 4, seed=0)
    for number, part in enumerate(torch.arange(40).split(4)):
        collector.collect(part, feature_of(part), feature_of(part))
        waiting.append(number + 1 - len(done))
    assert max(waiting) == 2
    assert sorted(collector.finish().tolist()) == list(range(40))


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_orders_of_ranks_are_gathered_in_pieces(piece, monkeypatch):
    orders = np.random.default_rng(0).permutation(60).astype(np.int32).reshape(3, 20)
    offset = 0

    def all_gather(pieces, own):
        nonlocal offset
        assert own.tolist() == orders[1, offset : offset + len(own)].tolist()
        for gathered, order in zip(pieces, orders, strict=True):
            gathered.copy_(torch.from_numpy(order[offset : offset + len(own)]))
        offset += len(own)

    monkeypatch.setattr(schedule_module, "INDICES_PER_EXCHANGE", piece)
    monkeypatch.setattr(schedule_module.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(schedule_module.dist, "all_gather", all_gather)
    gathered = schedule_module._gather_orders(orders[1], 3)
    assert gathered.tolist() == orders.tolist() and gathered.dtype == np.int32
    assert offset == 20


@pytest.mark.parametrize("kind", ["images", "groups"])
def test_images_and_groups_are_kept_apart_or_ignored_by_the_setting(kind):
    """``together``, the papers' setting: the order of data without ids."""
    samples = np.arange(96)
    # Captions of an image, or pairs of a group, are each other's most similar; -1: in no group.
    ids = samples // 2 if kind == "images" else np.where(samples < 80, samples // 4, -1)

    def grouped(given, **changes):
        settings = grit_settings(queue_size=96, search_space=96, **changes)
        known = {"image_ids": given}
        if kind == "groups":
            known = {"image_ids": samples, "group_ids": given}
        schedule = GritSchedule(96, 8, settings, seed=2, **known)
        for batch in schedule.begin(0).mini_batches(0):
            feature = feature_of(ids[batch])
            schedule.collect(torch.from_numpy(batch.copy()), feature, feature)
        schedule.end(0)
        return schedule.next_plan.order

    def repeats(order):
        batches = [[one for one in row if one >= 0] for row in ids[order].reshape(-1, 8).tolist()]
        return sum(len(batch) - len(set(batch)) for batch in batches)

    together = grouped(ids, same_image="together")
    assert together.tolist() == grouped(None).tolist()
    assert repeats(grouped(ids)) < repeats(together) / 5
    if kind == "groups":
        assert grouped(np.full(96, -1)).tolist() == together.tolist()


@pytest.mark.parametrize("stop", [0, 1, 5, 11, 12])
@pytest.mark.parametrize("hardness", [1.0, 0.7])
def test_resumed_schedule_equals_uninterrupted_schedule(stop, hardness, tmp_path):
    cfg = grit_settings(queue_size=20, search_space=8, hardness=hardness)

    def run(schedule, epochs, first_step=0):
        orders = []
        for epoch in epochs:
            schedule.begin(epoch)
            orders.append(schedule.plan.order.tolist())
            collect_epoch([schedule], schedule.plan, first_step)
            first_step = 0
            schedule.end(epoch)
        return orders

    uninterrupted = run(GritSchedule(100, 8, cfg, seed=4), range(4))
    interrupted = GritSchedule(100, 8, cfg, seed=4)
    interrupted.begin(0)
    collect_epoch([interrupted], interrupted.plan)
    interrupted.end(0)
    interrupted.begin(1)
    collect_epoch([interrupted], interrupted.plan, 0, stop)
    torch.save(interrupted.state_dict(), tmp_path / "state.pth")
    resumed = GritSchedule(100, 8, cfg, seed=4)
    resumed.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True), epoch=1)
    assert run(resumed, range(1, 4), stop) == uninterrupted[1:]


def test_batches_can_start_at_any_step():
    plan = random_plan(50, 4, 1, np.random.default_rng(0))
    all_batches = list(EpochBatches(plan, 0, epoch=7))
    assert list(EpochBatches(plan, 0, 7, first_step=5)) == all_batches[5:]
    assert len(all_batches) == 12 and all_batches[0] == [(int(i), 7) for i in plan.order[:4]]


def test_less_data_than_a_batch_is_rejected():
    with pytest.raises(ValueError, match="batch_size_train"):
        random_plan(7, 4, 2, np.random.default_rng(0))


def test_search_space_above_the_queue_size_is_rejected():
    with pytest.raises(ValueError, match="search_space"):
        GritCollector(GritSettings(queue_size=4, search_space=5), 2, seed=0)


def test_saved_order_must_be_a_permutation(tmp_path):
    np.save(tmp_path / "order.npy", np.array([2, 0, 1]))
    plan = GritSchedule(3, 1, grit_settings(first_order=str(tmp_path / "order.npy"))).begin(0)
    assert plan.order.tolist() == [2, 0, 1] and plan.grouped
    wrong_orders = [[0, 0, 1], [0, 1, 3], [-1, 0, 1], [0.5, 1, 2], [2**32, 1, 2], [[0, 1, 2]]]
    for size, wrong in [(4, [2, 0, 1]), *((3, one) for one in wrong_orders)]:
        np.save(tmp_path / "order.npy", np.array(wrong))
        with pytest.raises(ValueError, match="order.npy is not a permutation"):
            GritSchedule(size, 1, grit_settings(first_order=str(tmp_path / "order.npy"))).begin(0)
        with pytest.raises(ValueError, match="order is not a permutation"):
            GritSchedule(size, 1, grit_settings()).begin(0, order=np.array(wrong))


def test_random_orders_differ_by_epoch():
    cfg = grit_settings(enabled=False)
    schedule, orders = GritSchedule(64, 8, cfg), []
    for epoch in range(5):
        orders.append(tuple(schedule.begin(epoch).order.tolist()))
        schedule.end(epoch)
    assert len(set(orders)) == 5
    # Also where an epoch has no order from the one before it.
    first = {tuple(GritSchedule(64, 8, cfg).begin(epoch).order.tolist()) for epoch in range(5)}
    assert len(first) == 5


def test_grouping_and_its_shuffling_differ_by_epoch():
    """Of the same pairs, collected in the same order: each draws from a seed of its epoch."""
    groups, shuffled = [], []
    for epoch in range(4):
        schedule = GritSchedule(64, 8, grit_settings(start_epoch=0))
        schedule.begin(0)
        schedule._start_collecting(epoch)
        for batch in np.arange(64).reshape(8, 8):
            index = torch.from_numpy(batch)
            schedule.collect(index, feature_of(index), feature_of(index).flip(1))
        groups.append(frozenset(schedule.collector.finish().tolist()[k] for k in range(8)))
        schedule.collector.finish = lambda: np.arange(64)
        schedule.end(epoch)
        shuffled.append(tuple(schedule.next_plan.order.tolist()))
    assert len(set(groups)) == 4
    assert len(set(shuffled)) == 4
