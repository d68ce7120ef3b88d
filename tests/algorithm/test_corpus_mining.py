"""Mining of a whole corpus against a slow loop over anchors and candidates."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa import MiningRule, StepSettings, mine_corpus
from lavis_mafa.algorithm import corpus_mining
from lavis_mafa.algorithm.corpus_mining import BY_MARGIN

LOW, HIGH = 0.3, 0.7
BY_THRESHOLDS = StepSettings(connections=MiningRule(score="similarity", rule="global_threshold"))
INTRA_MODAL = StepSettings(connections=MiningRule(score="intra_modal"))


class Table:
    """A judge with given probabilities; `asked` are the pairs that it judged."""

    def __init__(self, probability):
        self.probability, self.asked = probability, []

    def judge(self, samples, image_of, text_of, ranks=None, seen=None):
        assert torch.equal(samples["loaded_index"], torch.arange(len(self.probability)))
        self.asked += list(zip(image_of.tolist(), text_of.tolist(), strict=True))
        return self.probability[image_of, text_of]


def slowly(features, others, judged, low, high, negatives, search, skip, anchor_ids, other_ids):
    """Return the negatives of every anchor, and a set of connections (first rows)."""
    similarity = F.normalize(features, dim=1) @ F.normalize(others, dim=1).T
    first = [other_ids.index(one) for one in other_ids]
    known = {(a, t) for a, t in zip(anchor_ids, other_ids, strict=True)}
    hard, found = [], set()
    for row in range(len(features)):
        wanted = [
            other
            for other in sorted(set(first), key=lambda one: -similarity[row, one])
            if (anchor_ids[row], other_ids[other]) not in known
        ][skip : skip + search]
        own = min(
            similarity[row, other]
            for other, anchor in enumerate(anchor_ids)
            if anchor == anchor_ids[row]
        )
        score = [similarity[row, o] if judged is None else judged[row, o] for o in wanted]
        ceiling = own - 0.05 * own.abs() if judged is None else low
        floor = ceiling if judged is None else high
        kept = [o for o, s in zip(wanted, score, strict=True) if s <= ceiling][:negatives]
        hard.append(kept + [-1] * (negatives - len(kept)))
        matches = [o for o, s in zip(wanted, score, strict=True) if s > floor]
        found |= {(anchor_ids.index(anchor_ids[row]), other) for other in matches}
    return hard, found


@settings(max_examples=60)
@given(
    seed=st.integers(0, 999),
    size=st.integers(2, 14),
    negatives=st.integers(1, 3),
    more=st.integers(0, 4),
    skip=st.integers(0, 2),
    chunk=st.integers(1, 20),
    repeated=st.booleans(),
    with_judge=st.booleans(),
)
def test_equals_a_loop(seed, size, negatives, more, skip, chunk, repeated, with_judge):
    drawn = torch.Generator().manual_seed(seed)
    features, others = torch.randn(2, size, 4, generator=drawn)
    groups = max(1, size // 2) if repeated else 10**6
    drawn_ids = torch.randint(groups, (2, size), generator=drawn) if repeated else None
    ids = torch.arange(size).expand(2, size) if drawn_ids is None else drawn_ids
    probability = torch.rand(size, size, generator=drawn)
    same = [[side.tolist().index(one) for one in side] for side in ids]  # hold the same
    features, others, probability = features[same[0]], others[same[1]], probability[same[0]]
    judge = Table(probability) if with_judge else None
    given_settings = BY_MARGIN
    if with_judge:
        given_settings = StepSettings(connections=MiningRule(low=LOW, high=HIGH))
    given_ids = (None, None) if drawn_ids is None else tuple(drawn_ids)
    search = negatives + more
    mined = mine_corpus(
        features,
        others,
        given_settings,
        judge,
        negatives,
        search,
        skip,
        anchor_ids=given_ids[0],
        positive_ids=given_ids[1],
        chunk=chunk,
    )
    judged, rows, columns = probability if with_judge else None, ids[0].tolist(), ids[1].tolist()
    hard, found = slowly(
        features, others, judged, LOW, HIGH, negatives, search, skip, rows, columns
    )
    assert mined.negatives.tolist() == hard
    assert {tuple(pair) for pair in mined.connections.tolist()} == found
    assert len(mined.connections) == len(mined.score) == len(found)
    if judge is not None:
        assert len({*judge.asked}) == len(judge.asked) == mined.judged
        assert bool((mined.score > HIGH).all())


@given(
    values=st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=1, max_size=5),
    k=st.integers(1, 8),
    room=st.integers(1, 40),
)
@settings(max_examples=80)
def test_nearest_equals_a_loop_with_ties_at_the_lower_position(values, k, room):
    table, sizes = torch.tensor(values).float(), []

    def compare(begin, end):
        sizes.append((end - begin) * len(values))
        return table[:, begin:end].clone()

    with mock.patch.object(corpus_mining, "MAX_SIMILARITIES", room):
        places, best = corpus_mining.nearest(compare, len(values), 6, k)
    assert sum(sizes) == 6 * len(values) and max(sizes) <= max(room, len(values))
    for row, found, similar in zip(values, places.tolist(), best.tolist(), strict=True):
        expected = sorted(range(6), key=lambda column: (-row[column], column))[:k]
        assert found == expected and similar == [row[column] for column in expected]


NAN = torch.full((5,), torch.nan)


@pytest.mark.parametrize("side", ["anchors", "positives"])
def test_rows_without_features_are_named(side):
    """`topk` takes NaN for the largest value: such a row would be everyone's first candidate."""
    features = torch.eye(5)
    features[1], features[2, 0], features[4] = NAN, torch.inf, 0.0
    sides = {"anchors": torch.eye(5), "positives": torch.eye(5), side: features}
    told = rf"{side}: 3 rows are zero, NaN or infinite, such as \[1, 2, 4\]"
    with pytest.raises(ValueError, match=told):
        mine_corpus(**sides)


def test_own_pairs_without_a_probability_are_named():
    """Nothing is above NaN, so that every candidate of such an anchor would be a negative."""
    probability = torch.full((5, 5), 0.5)
    probability[2, 2] = torch.nan
    rule = StepSettings(connections=MiningRule(rule="margin"))
    with pytest.raises(ValueError, match=r"own pairs of rows \[2\] have no probability"):
        mine_corpus(torch.eye(5), torch.eye(5), rule, Table(probability), search=4)
    mine_corpus(torch.eye(5), torch.eye(5), StepSettings(), Table(probability), search=4)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"negatives": 9, "search": 3}, "1 <= negatives <= search"),
        ({"skip": -1}, "skip >= 0"),
        ({"anchors": torch.ones(0, 5), "positives": torch.ones(0, 5)}, "N >= 1"),
        (
            {"con_d": Table(torch.ones(5, 5)), "settings": BY_MARGIN},
            "a judge and score: similarity, which",
        ),
        ({"settings": StepSettings()}, "got no judge and score: con_d; use score: sim"),
        ({"settings": INTRA_MODAL}, "score: intra_modal; use score: similarity"),
        ({"settings": BY_THRESHOLDS}, "needs the scores of all candidates"),
    ],
)
def test_what_cannot_be_mined_is_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        mine_corpus(**{"anchors": torch.eye(5), "positives": torch.eye(5)} | changes)


def test_a_margin_of_a_judge_compares_with_its_own_pairs():
    probability = torch.rand(6, 6, generator=torch.Generator().manual_seed(0))
    rule = StepSettings(connections=MiningRule(rule="margin"))
    mined = mine_corpus(torch.eye(6), torch.eye(6), rule, Table(probability), search=5)
    others = ~torch.eye(6, dtype=torch.bool)
    match = (probability > probability.diagonal()[:, None] - 0.05) & others
    assert mined.connections.tolist() == match.nonzero().tolist()
    assert torch.equal(mined.score, probability[match])
