"""Hardness schedules: q of every epoch, users' functions, what reads q, resume."""

import math
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

from lavis_mafa.algorithm.grit import HARDNESS, GritSchedule, GritSettings, HardnessSchedule
from lavis_mafa.algorithm.grit.hardness import GRIT, _Ramp
from lavis_mafa.tools.model_and_data import _grouping_of

SIZE, BATCH = 96, 8


def grit_settings(**changes):
    return GritSettings(**{"enabled": True, "queue_size": 48, "search_space": 24, **changes})


def features_of(index):
    g = torch.Generator().manual_seed(0)
    table = F.normalize(torch.randn(SIZE, 6, generator=g), dim=1)
    return table[index], table[index].flip(1)


def train(schedule, epochs, first=0):
    """Collect every pair in each epoch; return the plans."""
    plans = []
    for epoch in range(first, epochs):
        plan = schedule.begin(epoch)
        for batch in plan.mini_batches(0):
            index = torch.from_numpy(batch.copy())
            schedule.collect(index, *features_of(index))
        schedule.end(epoch)
        plans.append(plan)
    return plans


@pytest.mark.parametrize("start", [0.2, 1.0])
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_hardness_moves_from_the_first_grouped_epoch_to_the_last(name, start):
    settings = grit_settings(
        schedule=name, hardness=0.7, own={name: _Ramp(start, epochs=4)}, start_epoch=2
    )
    schedule = GritSchedule(SIZE, BATCH, settings)
    found = [schedule._hardness_at(epoch) for epoch in range(10)]
    shares = [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]
    if name == "cosine":
        shares = [(1 - math.cos(math.pi * share)) / 2 for share in shares]
    assert found[2:] == pytest.approx([start + (0.7 - start) * share for share in shares])
    assert found[0] == found[2] == start and found[6] == found[9] == 0.7  # exactly
    plans = train(schedule, 5)
    assert [plan.hardness for plan in plans] == [None, None, *found[2:5]]


def test_an_epoch_is_grouped_by_its_own_hardness():
    """Epochs of a ramp equal those of a constant schedule with the same q and the same features."""
    own = {"linear": _Ramp(0.2, epochs=2)}
    ramp = GritSchedule(SIZE, BATCH, grit_settings(schedule="linear", own=own), seed=3)
    orders = [plan.order.tolist() for plan in train(ramp, 2)]
    for q, same in ((0.2, True), (0.6, False), (1.0, False)):
        constant = GritSchedule(SIZE, BATCH, grit_settings(hardness=q), seed=3)
        assert ([plan.order.tolist() for plan in train(constant, 2)] == orders) == same


def test_the_naive_variant_groups_an_epoch_by_its_own_hardness():
    own = {"linear": _Ramp(0.2, epochs=2)}
    settings = grit_settings(schedule="linear", own=own, naive=True, start_epoch=0)
    schedule = GritSchedule(SIZE, BATCH, settings)

    def vectors(plan):
        for batch in plan.mini_batches(0):
            index = torch.from_numpy(batch.copy())
            yield (index, *features_of(index))

    found = []
    for epoch in range(4):
        schedule.collect_first(epoch, vectors)
        found.append(schedule.begin(epoch).hardness)
        schedule.end(epoch)
    assert found == pytest.approx([0.2, 0.6, 1.0, 1.0])


def test_the_schedule_skips():
    orders = [
        train(GritSchedule(SIZE, BATCH, grit_settings(skip=skip), seed=3), 2)[1].order.tolist()
        for skip in (0, 4)
    ]
    assert orders[0] != orders[1]


def test_hardness_of_a_plan_is_in_its_state(tmp_path):
    own = {"cosine": _Ramp(0.3, epochs=3)}
    settings = grit_settings(schedule="cosine", own=own)
    expected = [plan.hardness for plan in train(GritSchedule(SIZE, BATCH, settings), 4)]
    stopped = GritSchedule(SIZE, BATCH, settings)
    train(stopped, 2)
    torch.save(stopped.state_dict(), tmp_path / "state.pth")
    state = torch.load(tmp_path / "state.pth", weights_only=True)
    resumed = GritSchedule(SIZE, BATCH, settings)
    resumed.load_state_dict(state, epoch=2)
    assert [plan.hardness for plan in train(resumed, 4, first=2)] == expected[2:]


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(HARDNESS, "_entries", HARDNESS.entries())


def test_a_users_function_is_a_schedule(registered):
    @HARDNESS.register("halved", settings=_Ramp)
    def halved(grouped_epochs, hardness, own):
        return max(own.start, hardness / 2**grouped_epochs)

    settings = grit_settings(schedule="halved", own={"halved": _Ramp(0.3)})
    found = [plan.hardness for plan in train(GritSchedule(SIZE, BATCH, settings), 5)]
    assert found == [None, 1.0, 0.5, 0.3, 0.3]
    HARDNESS.register("too_much")(lambda grouped_epochs, hardness: 1.5)
    with pytest.raises(ValueError, match="hardness must be above 0 and at most 1, got 1.5"):
        train(GritSchedule(SIZE, BATCH, grit_settings(schedule="too_much")), 2)


def test_settings_under_a_key_of_the_section_are_refused(registered):
    assert GRIT.keys == {one.name for one in fields(GritSettings)}
    with pytest.raises(ValueError, match="already used by the run.grit key shuffle; register"):
        HARDNESS.register("shuffle", settings=_Ramp)(lambda grouped_epochs, hardness, own: 1.0)


def test_analyses_use_the_hardness_of_the_last_epoch():
    grit = {"hardness": 0.9, "schedule": "linear", "linear": {"start": 0.5, "epochs": 4}, "skip": 3}
    for epochs, expected in ((None, 0.5), (2, 0.5), (4, 0.7), (6, 0.9), (9, 0.9)):
        run = OmegaConf.create({"grit": grit, "max_epoch": epochs})
        found = _grouping_of(run)
        assert (found.hardness, found.skip) == (pytest.approx(expected), 3)


def test_analyses_replace_a_hardness_with_state_and_say_so(caplog, registered):
    @HARDNESS.register("stateful")
    class Stateful(HardnessSchedule):
        learns = True

    run = OmegaConf.create({"grit": {"schedule": "stateful", "hardness": 0.8}, "max_epoch": 9})
    with caplog.at_level("INFO"):
        assert _grouping_of(run).hardness == 0.8
    assert "schedule stateful has state of its run: mini-batches are formed with" in caplog.text


def test_description_names_both_ends():
    settings = grit_settings(
        schedule="linear", hardness=0.9, own={"linear": _Ramp(0.5, 4)}, start_epoch=2, skip=1200
    )
    found = GritSchedule(SIZE, BATCH, settings).describe_hardness(20)
    assert found == "hardness 0.5 in epoch 2 to 0.9 in epoch 19, most similar 1,200 skipped"
    assert GritSchedule(SIZE, BATCH, grit_settings()).describe_hardness(20) == "hardness 1"
