"""Groups of pairs that are never negatives of each other (`model.mafa.same_group`)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import mini_batch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from slow_families import SLOW, TableConD
from slow_forms import SLOW_FORMS

from lavis_mafa import load_model
from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.algorithm.context import NO_GROUP
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.mining import ALL, MiningRule, find_connections
from lavis_mafa.algorithm.momentum import GROUP_QUEUE, Momentum
from lavis_mafa.algorithm.parts import build_parts
from lavis_mafa.algorithm.pickers import NONE, PICKERS
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step

BATCH = 6
# Pairs 0, 2 and 3 are of group 7, 1 and 4 of group 2; pair 5 is in none.
GROUPS = [7, 2, 7, 7, 2, NO_GROUP]
ITC_ONLY = {"itc": 1.0, "itm": 0.0, "lm": 0.0}
VALUES = ("dropped", "positive", "negative")


def with_groups(train_set, groups=GROUPS, **options):
    samples = mini_batch(train_set, range(len(groups)), epoch=1, **options)
    samples["image_id"] = torch.arange(len(groups))
    return {**samples, "group_id": torch.tensor(groups)}


def mates(groups, anchor):
    """Return the other pairs of an anchor's group."""
    known = groups[anchor] != NO_GROUP
    return {k for k in range(len(groups)) if k != anchor and known and groups[k] == groups[anchor]}


def step(model, samples, con_d=None, momentum=None, **changes):
    parts = build_parts(StepSettings(**changes), con_d, momentum)
    return run_step(model.backbone, samples, parts)


# Losses against loops


def slow_losses(model, samples, groups, same_group, form):
    """ITC and ITM pair by pair, from the definition of `same_group`."""
    slow = SLOW["albef_mafa"](model, samples)
    size, temperature = slow.size, float(model.temp)
    itc, itm = [], [(slow.fuse(b, b), 1) for b in range(size)]
    for image_anchor in (True, False):
        for b in range(size):
            sims = [
                slow.similarity(
                    *((slow.v[b], slow.t[k]) if image_anchor else (slow.v[k], slow.t[b]))
                )
                for k in range(size)
            ]
            sims = [float(s) / temperature for s in sims]
            near = mates(groups, b) if same_group != "negative" else set()
            kept = [k for k in range(size) if k not in near or same_group == "positive"]
            degree = [float(k == b or k in near) for k in kept]
            label = [d / sum(degree) for d in degree]
            itc.append(SLOW_FORMS[form]([sims[k] for k in kept], degree, label, temperature))
            left = [k for k in range(size) if k != b and k not in near]
            if left:
                k = max(left, key=lambda k: sims[k])
                itm.append((slow.fuse(b, k) if image_anchor else slow.fuse(k, b), 0))
    losses = [F.cross_entropy(logits[None], torch.tensor([label])) for logits, label in itm]
    return sum(itc) / len(itc), torch.stack(losses).mean().item()


@pytest.mark.parametrize("form", SLOW_FORMS)
@pytest.mark.parametrize("same_group", VALUES)
def test_losses_with_groups_equal_slow_loop(tiny, toy_train, same_group, form):
    samples = with_groups(toy_train)
    options = {"soft_labels": SoftLabels("one_hot"), "itc_loss": form, "same_group": same_group}
    output = step(tiny, samples, loss_weights={"itc": 1.0, "itm": 1.0, "lm": 0.0}, **options)
    with torch.no_grad():
        itc, itm = slow_losses(tiny, samples, GROUPS, same_group, form)
    assert output.loss_itc.item() == pytest.approx(itc, rel=2e-4)
    assert output.loss_itm.item() == pytest.approx(itm, rel=1e-4)


@pytest.mark.parametrize("same_group", VALUES)
def test_without_groups_losses_are_equal_bit_for_bit(tiny, toy_train, same_group):
    samples = with_groups(toy_train)
    del samples["group_id"]
    rule = MiningRule(low=0.3, high=0.5, action="drop")
    found = []
    for change in ({}, {"same_group": same_group}):
        torch.manual_seed(0)
        output = step(tiny, samples, TableConD(), connections=rule, **change)
        found.append([output.loss_itc, output.loss_itm, output.loss_lm])
    assert found[0] == found[1]
    ungrouped = {**samples, "group_id": torch.full((BATCH,), NO_GROUP)}
    torch.manual_seed(0)
    output = step(tiny, ungrouped, TableConD(), connections=rule, same_group=same_group)
    assert [output.loss_itc, output.loss_itm, output.loss_lm] == found[0]


def test_same_image_in_one_group_stays_positive_and_other_images_are_dropped(tiny, toy_train):
    samples = with_groups(toy_train)
    samples["image_id"] = torch.tensor([0, 1, 0, 3, 4, 5])
    output = step(tiny, samples)
    assert output.i2t.positives[0].tolist() == [True, False, True, False, False, False]
    assert output.i2t.dropped[0].tolist() == [False, False, False, True, False, False]
    papers = step(tiny, samples, same_image="negative")
    assert papers.i2t.dropped[0].tolist() == [False, False, True, True, False, False]
    both = step(tiny, samples, same_image="negative", same_group="positive")
    assert both.i2t.positives[0].tolist() == [True, False, True, True, False, False]
    assert both.i2t.dropped is None


# Picking


@given(data=st.data())
@hypothesis_settings(max_examples=60)
def test_no_pair_of_one_group_is_ever_picked(data):
    size = data.draw(st.integers(1, 7))
    groups = torch.tensor(data.draw(st.lists(st.integers(-1, 2), min_size=size, max_size=size)))
    own = torch.arange(size)
    near = torch.tensor(
        [[int(b) in mates(groups.tolist(), a) for b in range(size)] for a in range(size)]
    ).view(size, size)
    positives = torch.eye(size, dtype=torch.bool)
    sims = torch.randn(2, size, size, generator=torch.Generator().manual_seed(size))
    picker = PICKERS.entry(data.draw(st.sampled_from(["hardest", "sampled", "uniform"]))).value
    rule = MiningRule(
        low=0.3,
        high=0.6,
        top_k=data.draw(st.sampled_from([ALL, 1, 2])),
        action=data.draw(st.sampled_from(["convert", "drop", "keep"])),
    )
    known = {"positives": positives, "dropped": near}
    if data.draw(st.booleans()):
        known = {"positives": positives | near, "dropped": None}
    con_d = TableConD()
    i2t, t2i, _ = find_connections(
        *sims,
        own=own,
        pickers=(picker, picker),
        rule=rule,
        judge=lambda image_of, text_of: con_d.judge(None, image_of, text_of),
        **known,
    )
    for found in (i2t, t2i):
        rows = found.hard != NONE
        assert not (near | positives)[found.anchor[rows], found.hard[rows]].any()
        anchors = torch.nonzero(found.second != NONE).flatten()
        assert not near[anchors, found.second[anchors]].any()
        # An anchor without a candidate has no pair in ITM, every other one has.
        anchors, candidates, _ = found.itm_pairs(rule)
        assert not near[anchors, candidates].any()
        if rule.action == "keep":
            assert set(anchors.tolist()) == set(
                torch.nonzero(~(near | positives).all(dim=1)).flatten().tolist()
            )
        kept, dropped = found.itc_targets(rule)
        if known["dropped"] is not None:
            assert dropped[near].all() and not (kept & near).any()
        else:
            assert kept[near].all()
    assert not any(near[image, text] for image, text in con_d.judged)


@pytest.mark.parametrize("same_group", ["dropped", "positive"])
def test_one_group_for_all_leaves_no_negative(tiny, toy_train, same_group):
    samples = with_groups(toy_train, [3] * 4)
    con_d = TableConD()
    output = step(tiny, samples, con_d, same_group=same_group)
    assert not con_d.judged and (output.i2t.hard == NONE).all()
    output.loss.backward()
    assert output.loss.isfinite()
    assert all(p.grad.isfinite().all() for p in tiny.parameters() if p.grad is not None)
    itm = torch.stack([output.loss_itm])
    assert itm.isfinite().all()
    if same_group == "dropped":
        one_hot = step(tiny, samples, soft_labels=SoftLabels("one_hot"), loss_weights=ITC_ONLY)
        assert one_hot.loss_itc.item() == 0.0


# The momentum queue


def test_queue_keeps_groups_of_earlier_steps(toy_train):
    def first_and_second(same_group):
        torch.manual_seed(2)
        model = load_model("albef_mafa", "tiny")
        settings = StepSettings(
            soft_labels=SoftLabels("momentum"), loss_weights=ITC_ONLY, same_group=same_group
        )
        momentum = Momentum(model, backbone_of, 64, queue_size=2 * BATCH)
        assert not hasattr(model, GROUP_QUEUE)
        samples = with_groups(toy_train)
        run_step(model.backbone, samples, settings, None, momentum)
        later = mini_batch(toy_train, range(10, 10 + BATCH), epoch=1)
        later |= {"image_id": torch.arange(10, 10 + BATCH), "group_id": torch.tensor(GROUPS)}
        seen = {}
        real = momentum.compare
        momentum.compare = lambda batch: seen.setdefault("compared", real(batch))
        loss = run_step(model.backbone, later, settings, None, momentum).loss_itc
        return model, seen["compared"], loss.item()

    expected = torch.tensor(
        [[k in mates(GROUPS * 2, a) for k in range(BATCH)] for a in range(BATCH)]
    )
    expected |= torch.diag(torch.tensor(GROUPS) != NO_GROUP)  # the same group, another pair
    empty = torch.zeros(BATCH, BATCH, dtype=torch.bool)
    model, compared, dropped = first_and_second("dropped")
    assert torch.equal(compared.queued_dropped, torch.cat([expected, empty], dim=1))
    assert not compared.queued_positives.any()
    assert getattr(model, GROUP_QUEUE)[0].tolist() == GROUPS * 2
    _, compared, positive = first_and_second("positive")
    assert torch.equal(compared.queued_positives, torch.cat([expected, empty], dim=1))
    assert compared.queued_dropped is None
    model, compared, negative = first_and_second("negative")
    assert compared.queued_dropped is None and not compared.queued_positives.any()
    assert not hasattr(model, GROUP_QUEUE)
    assert len({dropped, positive, negative}) == 3
