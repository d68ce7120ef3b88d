"""Con-D's self-check: slow loops, random pairs, bounds, and what does not need it."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from conftest import mini_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from two_forks import answers_of_a_group

from lavis_mafa.io.processes import from_main_process
from lavis_mafa.judges.discriminators import ModelDiscriminator
from lavis_mafa.judges.self_check import (
    PoorDiscriminatorError,
    SelfCheck,
    drawn_samples,
    random_partners,
    self_check,
)


class Known:
    """A discriminator that gives own pairs one probability and all others another one."""

    def __init__(self, own, other):
        self.own, self.other = own, other

    def judge(self, samples, image_of, text_of, ranks=None, seen=None):
        index = samples["index"]
        return torch.where(index[image_of] == index[text_of], self.own, self.other)


class Asked:
    """A discriminator that notes what another one is asked."""

    def __init__(self, con_d):
        self.con_d, self.asked = con_d, []

    def judge(self, samples, image_of, text_of, ranks=None, seen=None):
        self.asked.append((samples, image_of.tolist(), text_of.tolist()))
        return self.con_d.judge(samples, image_of, text_of, ranks, seen)


def checked(own, random, low=0.5, high=0.8):
    return SelfCheck("one", np.array(own, float), np.array(random, float), (low, high))


def batches_of(train_set, *sizes):
    begins = np.cumsum([0, *sizes])
    return [mini_batch(train_set, range(*ends)) for ends in zip(begins, begins[1:], strict=False)]


def test_figures_equal_a_loop_over_pairs(toy_train, tiny):
    """Every pair is judged alone; the AUC is counted over all couples of an own and a random one.

    What is random is read from what the discriminator was asked."""
    torch.manual_seed(3)
    torch.nn.init.normal_(tiny.itm_head.weight, std=3.0)
    con_d = ModelDiscriminator(tiny)
    asking = Asked(con_d)
    batches = batches_of(toy_train, 12, 9)
    first = self_check(con_d, batches, (0.5,), "tiny", seed=2)
    # Between values, and different for own and random pairs.
    low, high = np.quantile(np.concatenate([first.own, first.random]), (0.31, 0.77))
    found = self_check(asking, batches, (high, low), "tiny", seed=2)
    own, random = [], []
    for samples, images, texts in asking.asked:
        for image, text in zip(images, texts, strict=True):
            alone = {
                "image": samples["image"][image : image + 1],
                "text_input": [samples["text_input"][text]],
            }
            probability = float(con_d.judge(alone, *torch.zeros(2, 1, dtype=torch.long)))
            (own if image == text else random).append(probability)
            if image != text:
                assert samples["image_id"][image] != samples["image_id"][text]
    assert len(own) == len(random) == 21
    wins = sum((a > b) + 0.5 * (a == b) for a in own for b in random)
    assert found.auc == pytest.approx(wins / (len(own) * len(random)), abs=0.01)
    for threshold, of_own, of_random in found._above:
        assert of_own == pytest.approx(sum(p > threshold for p in own) / 21, abs=1e-6)
        assert of_random == pytest.approx(sum(p > threshold for p in random) / 21, abs=1e-6)
    assert [threshold for threshold, *_ in found._above] == [low, high]
    assert found._above[0][1:] != found._above[1][1:], "the thresholds must separate something"


IDS_AND_GROUPS = st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 2)), min_size=1, max_size=12)


@given(IDS_AND_GROUPS, st.booleans(), st.integers(0, 100))
@settings(max_examples=160)
def test_partners_show_other_images_and_are_of_other_groups(drawn, grouped, seed):
    ids, groups = np.array(drawn).T
    if not grouped:
        groups = np.full(len(ids), -1)
    generator = np.random.default_rng(seed)
    rows, partners = random_partners(ids, generator, groups if grouped else None)
    allowed = {
        (a, b)
        for a, b in np.ndindex(len(ids), len(ids))
        if ids[a] != ids[b] and (groups[a] != groups[b] or groups[a] < 0)
    }
    assert rows.tolist() == sorted({a for a, _ in allowed})
    assert set(zip(rows.tolist(), partners.tolist(), strict=True)) <= allowed


def test_random_pairs_are_of_other_groups(toy_train):
    asking, groups = Asked(Known(0.5, 0.5)), torch.arange(16) % 2
    (batch,) = batches_of(toy_train, 16)
    self_check(asking, [{**batch, "group_id": groups}], (0.5,), "a")
    ((_, images, texts),) = asking.asked
    same = groups[images] == groups[texts]
    assert same[:16].all() and not same[16:].any()


def test_every_other_image_is_an_equally_likely_partner():
    ids, generator = np.array([0, 0, 1, 2, 3]), np.random.default_rng(0)
    drawn = np.array([random_partners(ids, generator)[1] for _ in range(3000)])
    counts = np.array([np.bincount(column, minlength=5) for column in drawn.T]) / len(drawn)
    expected = (ids[:, None] != ids) / (ids[:, None] != ids).sum(axis=1, keepdims=True)
    assert np.abs(counts - expected).max() < 0.04


@given(st.integers(1, 300), st.integers(8, 300))
@settings(max_examples=60)
def test_samples_are_drawn_once(size, pairs):
    drawn = drawn_samples(size, {"self_check_pairs": pairs}, seed=0)
    numbers = np.concatenate(drawn)
    assert len(np.unique(numbers)) == len(numbers) == min(size, pairs)
    assert numbers.min() >= 0 and numbers.max() < size
    assert max(map(len, drawn)) <= 32


GOOD, SWAPPED, CHANCE = Known(0.9, 0.1), Known(0.1, 0.9), Known(0.9, 0.9)


@pytest.mark.parametrize(
    ("con_d", "auc", "said"),
    [
        (GOOD, 1.0, []),
        (SWAPPED, 0.0, ["(AUC) of only 0.00", "100.0% of random pairs are above 0.8"]),
        (CHANCE, 0.5, ["(AUC) of only 0.50", "more than a third of the 100.0% of own pairs"]),
        (Known(0.9, float("nan")), None, ["not finite"]),
    ],
)
def test_a_poor_discriminator_is_warned_of_or_refused(toy_train, caplog, con_d, auc, said):
    found = self_check(con_d, batches_of(toy_train, 16), (0.5, 0.8), "mine")
    assert found.auc == auc and len(found.problems) == len(said)
    with caplog.at_level(logging.INFO):
        found.settle("warn", "set KEY to {}")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == found.line and len(lines) == 1 + bool(said)
    if not said:
        found.settle("refuse")
        return
    with pytest.raises(PoorDiscriminatorError, match="set KEY to warn") as caught:
        found.settle("refuse", "set KEY to {}")
    for text in (lines[1], str(caught.value)):
        for part in (*said, "mine", "tokenizer", "grouped hard negatives"):
            assert part in text


def test_the_bounds():
    """AUC of .75; a third of the own pairs' share, and 5 % of own pairs, beyond what chance
    explains."""
    scores = np.linspace(0.81, 0.99, 100)
    assert not checked(scores, scores - 0.8).problems
    # 100 values each, shifted: the share of couples that are in order crosses .75.
    for shift, fails in ((0.02, True), (0.09, False)):
        found = checked((scores - 0.8) / 2 + shift, (scores - 0.8) / 2, low=0.1, high=0.1)
        assert (found.auc < 0.75) == fails and bool(found.problems) == fails
    few = checked([0.9] * 3 + [0.6] * 97, [0.81] * 2 + [0.1] * 98)
    assert few._above[-1] == (0.8, 0.03, 0.02) and not few.problems
    many = checked([0.9] * 60 + [0.6] * 40, [0.81] * 30 + [0.1] * 70)
    assert many.auc > 0.75 and len(many.problems) == 1
    # 1 of 100 may be 5 of 100 by chance, 1 of 200 hardly.
    assert not checked([0.9] + [0.6] * 99, [0.1] * 100).problems
    (said,) = checked([0.9] + [0.6] * 199, [0.1] * 200).problems
    assert said.startswith("only 0.5% of own pairs are above 0.8, expected at least 5%")


def _checked_on_a_rank(rank, batches):
    con_d = SWAPPED if rank == 0 else GOOD  # what rank 1 would find by itself is different
    found = from_main_process(lambda: self_check(con_d, batches, (0.5, 0.8), "mine"))
    try:
        found.settle("refuse")
    except PoorDiscriminatorError as error:
        return found.auc, str(error)
    return found.auc, ""


def test_unreadable_images_are_left_out(toy_train):
    class Broken(Known):
        def judge(self, samples, image_of, text_of):
            return super().judge(samples, image_of, text_of).masked_fill(image_of == 3, torch.nan)

    batches = batches_of(toy_train, 16)
    for batch in batches:
        batch["load_error"] = ["lost" if number == 3 else "" for number in range(16)]
    found = self_check(Broken(0.9, 0.1), batches, (0.5, 0.8), "mine")
    assert found.auc == 1 and len(found.own) == 15 * len(batches) and not found.problems


def test_two_processes_have_the_verdict_of_rank_0(toy_train, tmp_path):
    first, second = answers_of_a_group(_checked_on_a_rank, tmp_path, batches_of(toy_train, 16))
    assert first[1:] == second[1:] and first[1] == 0.0 and "(AUC) of only 0.00" in first[2]


def test_pairs_of_one_image_have_no_random_partner(toy_train):
    samples = mini_batch(toy_train, range(4))
    samples["image_id"] = torch.zeros(4, dtype=torch.int64)
    found = self_check(CHANCE, [samples], (0.5, 0.8), "mine")
    assert found.auc is None and not found.problems and "not possible" in found.line
    assert found.content()["above"] == [] and found.scalars() == {}
