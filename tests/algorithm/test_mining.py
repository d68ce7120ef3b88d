"""ECM on hand-made cases that go through every branch of MAFA's Algorithm 1."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.algorithm.mining import (
    AMBIGUOUS,
    KEPT,
    POSITIVE,
    MiningRule,
    _connect,
    _pick,
    _read_together,
    _unique_pairs,
)
from lavis_mafa.algorithm.pickers import NONE, _uniform, hardest, one_of, sampled

pytestmark = pytest.mark.strict_smoke
RULE = MiningRule()


def own_pairs(size):
    return torch.eye(size, dtype=torch.bool)


def mine_both_directions(sim, verdicts, rule=RULE, positives=None):
    """Mine with a table of verdicts (image, text) -> probability; count the judged pairs."""
    size = len(sim)
    positives = own_pairs(size) if positives is None else positives
    own = torch.arange(size)
    hard_i2t, second_i2t = _pick(sim, positives, hardest)
    hard_t2i, second_t2i = _pick(sim.t(), positives, hardest)
    images, texts, row_i2t, row_t2i = _unique_pairs(hard_i2t, hard_t2i, own)
    judged = list(zip(images.tolist(), texts.tolist(), strict=True))
    probability = torch.tensor([verdicts.get(pair, 0.0) for pair in judged])
    i2t = _connect(positives, hard_i2t, second_i2t, probability, row_i2t, rule)
    t2i = _connect(positives, hard_t2i, second_t2i, probability, row_t2i, rule)
    return i2t, t2i, judged


SIM = torch.tensor(
    [
        [0.9, 0.8, 0.1, 0.0],
        [0.2, 0.9, 0.7, 0.6],
        [0.3, 0.5, 0.9, 0.1],
        [0.4, 0.1, 0.2, 0.9],
    ]
)


def test_pair_nominated_in_both_directions_is_judged_once():
    _, _, judged = mine_both_directions(SIM, {})
    # (0,1), (1,2) and (3,0) are nominated by an image and by a text.
    assert sorted(judged) == [(0, 1), (1, 2), (1, 3), (2, 1), (3, 0)]


def test_high_probability_converts_to_positive_in_every_loss():
    i2t, t2i, _ = mine_both_directions(SIM, {(0, 1): 0.9})
    assert i2t.state.tolist() == [POSITIVE, KEPT, KEPT, KEPT]
    assert t2i.state.tolist() == [KEPT, POSITIVE, KEPT, KEPT]
    positives, dropped = i2t.itc_targets(RULE)
    assert positives[0].tolist() == [True, True, False, False] and dropped is None
    assert torch.equal(positives[1:], own_pairs(4)[1:])
    anchors, candidates, labels = i2t.itm_pairs(RULE)
    assert anchors.tolist() == [0, 1, 2, 3] and candidates.tolist() == [1, 2, 1, 0]
    assert labels.tolist() == [1, 0, 0, 0]
    assert [x.tolist() for x in i2t.mined(RULE)] == [[0], [1]]
    assert [x.tolist() for x in t2i.mined(RULE)] == [[1], [0]]


def test_dropping_removes_false_negatives_from_the_losses():
    rule = MiningRule(action="drop")
    i2t, _, _ = mine_both_directions(SIM, {(0, 1): 0.9}, rule)
    positives, dropped = i2t.itc_targets(rule)
    assert torch.equal(positives, own_pairs(4))
    assert torch.nonzero(dropped).tolist() == [[0, 1]]
    assert i2t.itm_pairs(rule)[0].tolist() == [1, 2, 3]
    assert len(i2t.mined(rule)[0]) == 0


def test_action_keep_only_counts():
    rule = MiningRule(action="keep")
    i2t, _, _ = mine_both_directions(SIM, {(0, 1): 0.9, (1, 2): 0.7}, rule)
    assert i2t.state.tolist() == [POSITIVE, AMBIGUOUS, KEPT, KEPT]
    assert torch.equal(i2t.itc_targets(rule)[0], own_pairs(4))
    _, candidates, labels = i2t.itm_pairs(rule)
    assert candidates.tolist() == [1, 2, 1, 0] and labels.sum() == 0
    assert len(i2t.mined(rule)[0]) == 0


@pytest.mark.parametrize("use_in", [(), ("itc",), ("itm",), ("lm",), ("itc", "lm")])
def test_each_use_can_be_disabled(use_in):
    rule = MiningRule(use_in=use_in)
    i2t, _, _ = mine_both_directions(SIM, {(0, 1): 0.9, (1, 2): 0.7}, rule)
    assert bool(i2t.itc_targets(rule)[0][0, 1]) == ("itc" in use_in)
    assert bool(i2t.itm_pairs(rule)[2][0]) == ("itm" in use_in)
    # Re-sampling is part of ITM's use of verdicts.
    assert i2t.itm_pairs(rule)[1][1].item() == (3 if "itm" in use_in else 2)
    assert (len(i2t.mined(rule)[0]) == 1) == ("lm" in use_in)


def test_probability_at_a_threshold_takes_the_lower_state():
    states = MiningRule(low=0.5, high=0.75).states(torch.tensor([0.0, 0.5, 0.51, 0.75, 0.76, 1.0]))
    assert states.tolist() == [KEPT, KEPT, AMBIGUOUS, AMBIGUOUS, POSITIVE, POSITIVE]
    equal = MiningRule(low=0.5, high=0.5).states(torch.tensor([0.5, 0.500001]))
    assert equal.tolist() == [KEPT, POSITIVE]


@given(
    size=st.integers(1, 9),
    seed=st.integers(0, 9999),
    picker=st.sampled_from([hardest, sampled, _uniform]),
)
def test_picks_are_never_positives_and_second_choice_differs(size, seed, picker):
    g = torch.Generator().manual_seed(seed)
    # Divided by the lowest temperature, so that probabilities underflow.
    sim = torch.randn(size, size, generator=g) / 0.001
    positives = own_pairs(size) | (torch.rand(size, size, generator=g) < 0.3)
    hard, second = _pick(sim, positives, picker)
    for row in range(size):
        negatives = size - int(positives[row].sum())
        assert (hard[row] != NONE) == (negatives >= 1)
        assert (second[row] != NONE) == (negatives >= 2)
        if negatives >= 1:
            assert not positives[row, hard[row]]
        if negatives >= 2:
            assert not positives[row, second[row]] and second[row] != hard[row]


def test_sampling_follows_the_softmax_of_similarities():
    torch.manual_seed(0)
    sim = torch.tensor([[5.0, 0.0, 1.0, 2.0]]).repeat(4000, 1)
    own = torch.zeros(4000, 4, dtype=torch.bool)
    own[:, 0] = True
    drawn = torch.bincount(sampled(sim, own), minlength=4).float() / 4000
    assert torch.allclose(drawn[1:], torch.softmax(sim[0, 1:], 0), atol=0.03) and drawn[0] == 0


def test_uniform_draws_ignore_the_similarities():
    torch.manual_seed(0)
    sim = torch.tensor([[5.0, 9.0, float("nan"), -2.0, 800.0]]).repeat(4000, 1)
    positives = torch.zeros(4000, 5, dtype=torch.bool)
    positives[:, [0, 4]] = True
    drawn = torch.bincount(_uniform(sim, positives), minlength=5).float() / 4000
    assert torch.allclose(drawn, torch.tensor([0, 1, 1, 1, 0]) / 3, atol=0.03)
    assert drawn[0] == 0 and drawn[4] == 0
    # As many random numbers as a draw by similarity, so that what follows in a step is the same.
    after = []
    for picker in (sampled, _uniform):
        torch.manual_seed(1)
        picker(sim, positives)
        after.append(torch.rand(1))
    assert after[0] == after[1]


def test_invalid_rules_are_rejected():
    with pytest.raises(ValueError, match="low <= high"):
        MiningRule(low=0.9, high=0.5)
    with pytest.raises(ValueError, match="convert"):
        MiningRule(action="convrt")
    with pytest.raises(ValueError, match="top_k"):
        MiningRule(top_k=-1)
    with pytest.raises(ValueError, match="hard or probability"):
        MiningRule(labels="soft")
    with pytest.raises(ValueError, match="needs action: convert"):
        MiningRule(labels="probability", action="drop")


def slow_top_k(sim, table, known, rule):
    """Return the ITM pairs, LM pairs and label weights of one direction, anchor by anchor."""
    itm, lm = set(), set()
    weights = known.float()
    for b in range(len(sim)):
        negatives_of_anchor = [k for k in range(len(sim)) if not known[b, k]]
        order = sorted(negatives_of_anchor, key=lambda k: -sim[b, k].item())
        nominated = order[: rule.top_k]
        found = [k for k in nominated if table[b, k] > rule.high]
        lm |= {(b, k) for k in found}
        if rule.labels == "probability":
            itm |= {(b, k, round(table[b, k].item(), 5)) for k in nominated}
            for k in nominated:
                weights[b, k] = table[b, k]
            continue
        itm |= {(b, k, 1.0) for k in found}
        for k in found:
            weights[b, k] = 1.0
        ambiguous = [k for k in nominated if rule.low < table[b, k] <= rule.high]
        negatives = [k for k in nominated if table[b, k] <= rule.low]
        if not rule.resample:
            negatives = [k for k in nominated if table[b, k] <= rule.high]
        elif not negatives and ambiguous:
            negatives = order[rule.top_k : rule.top_k + 1]
        itm |= {(b, k, 0.0) for k in negatives[:1]}
    return itm, lm, weights


@settings(max_examples=150)
@given(
    size=st.integers(1, 7),
    seed=st.integers(0, 9999),
    top_k=st.integers(1, 5),
    labels=st.sampled_from(["hard", "probability"]),
    resample=st.booleans(),
)
def test_several_nominations_equal_slow_loop(size, seed, top_k, labels, resample):
    g = torch.Generator().manual_seed(seed)
    sim, table = torch.randn(size, size, generator=g), torch.rand(size, size, generator=g)
    known = own_pairs(size) | (torch.rand(size, size, generator=g) < 0.15)
    rule = MiningRule(top_k=top_k, labels=labels, resample=resample)
    hard, second = _pick(sim, known, hardest, True, top_k)
    from_texts = torch.full_like(hard, NONE)
    images, texts, row, _ = _unique_pairs(hard, from_texts, torch.arange(size))
    found = _connect(known, hard, second, table[images, texts], row, rule)
    itm, lm, weights = slow_top_k(sim, table, known, rule)
    pairs = [x.tolist() for x in found.itm_pairs(rule)]
    itm_pairs = {(b, k, round(p, 5)) for b, k, p in zip(*pairs, strict=True)}
    assert itm_pairs == itm and len(pairs[0]) == len(itm)
    assert set(zip(*(x.tolist() for x in found.mined(rule)), strict=True)) == lm
    targets, dropped = found.itc_targets(rule)
    assert torch.equal(targets.float(), weights) and dropped is None


def test_one_of_draws_as_multinomial_does():
    weights = torch.rand(50, 9).masked_fill(torch.rand(50, 9) < 0.5, 0.0)
    weights[:, 3] += 0.1
    drawn = []
    for draw in (one_of, lambda given: torch.multinomial(given, 1).squeeze(1)):
        torch.manual_seed(0)
        drawn.append(torch.stack([draw(weights) for _ in range(20)]))
    assert torch.equal(*drawn) and len(drawn[0].unique()) == 9


@pytest.mark.parametrize("rows", [[1], [0, 1, 2]])
def test_sampled_draws_in_spite_of_nan(rows):
    """The loss is checked later, and names the samples; a failure here would not."""
    torch.manual_seed(0)
    sim, own = torch.randn(3, 5), torch.eye(3, 5, dtype=torch.bool)
    sim[rows, 3] = torch.nan
    for _ in range(20):
        drawn = sampled(sim, own)
        assert ((drawn >= 0) & (drawn < 5)).all() and not own[torch.arange(3), drawn].any()
    sim[rows] = torch.nan
    drawn = sampled(sim, own)
    assert ((drawn >= 0) & (drawn < 5)).all() and not own[torch.arange(3), drawn].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verdicts_read_from_the_device_in_one_copy_are_exact(dtype):
    """Numbers of candidates up to 2^40, probabilities of every bit pattern, both directions."""
    i2t, t2i, _ = mine_both_directions(SIM, {(0, 1): 0.1 + 0.2, (2, 1): 1e-38})
    i2t.hard[0], t2i.second[1] = 2**40 + 1, 2**40 - 1
    for side in (i2t, t2i):
        side.probability = side.probability.to(dtype)
    _read_together([i2t, t2i])
    for side in (i2t, t2i):
        assert side.host is not side
        for name in ("hard", "second", "probability", "state"):
            copy, given = getattr(side.host, name), getattr(side, name)
            assert copy.dtype is given.dtype
            torch.testing.assert_close(copy, given, rtol=0, atol=0, equal_nan=True)
