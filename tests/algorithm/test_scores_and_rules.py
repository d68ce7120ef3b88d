"""Scores and rules that judge hard negatives: against slow loops written from their equations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import mini_batch
from hypothesis import given
from hypothesis import strategies as st

from lavis_mafa import load_model
from lavis_mafa.algorithm.discriminator import EncodedByFrozen
from lavis_mafa.algorithm.mining import ALL, MiningRule, _pick, find_connections
from lavis_mafa.algorithm.parts import build_parts
from lavis_mafa.algorithm.pickers import NONE, hardest
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.rules import KEPT, POSITIVE, RULES, Margin
from lavis_mafa.algorithm.scores import SCORES, PairView, _IntraModal
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step

BATCH = 8


def table(seed, size=BATCH):
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed)).tanh()


def slow_false(score, b, k, margin, kind):
    """Return whether candidate k of anchor b is a false negative, by the papers' inequalities."""
    own = float(score[b, b])
    width = margin if kind == "absolute" else margin * abs(own)
    return float(score[b, k]) > own - width


def connections_of(rule, scores, own=None, sims=None, **more):
    sims = sims or (table(1), table(2))
    size = len(sims[0])
    return find_connections(
        *sims,
        torch.eye(size, dtype=torch.bool),
        torch.arange(size),
        [hardest, hardest],
        rule,
        scores=scores,
        verdict=RULES.entry(rule.rule).make(own),
        **more,
    )


@given(
    st.integers(0, 1000),
    st.sampled_from([1, 2, 3, ALL]),
    st.floats(-0.5, 0.5),
    st.sampled_from(["absolute", "relative"]),
)
def test_margin_equals_a_loop_over_pairs(seed, top_k, margin, kind):
    scores = table(seed), table(seed + 1)
    rule = MiningRule(score="similarity", rule="margin", top_k=top_k)
    own = Margin(margin=margin, kind=kind)
    i2t, t2i, judged = connections_of(rule, scores, own)
    assert judged == 0
    for found, score, sim in ((i2t, scores[0], table(1)), (t2i, scores[1], table(2))):
        for row, (b, k) in enumerate(zip(found.anchor.tolist(), found.hard.tolist(), strict=True)):
            rank = row // BATCH
            others = sorted((c for c in range(BATCH) if c != b), key=lambda c: -sim[b, c])
            assert k == others[rank]
            expected = POSITIVE if slow_false(score, b, k, margin, kind) else KEPT
            assert int(found.state[row]) == expected
            assert float(found.probability[row]) == float(score[b, k])


def test_thresholds_apply_to_scores():
    scores = table(3), table(4)
    rule = MiningRule(score="similarity", low=0.1, high=0.4, top_k=2)
    i2t, _, _ = connections_of(rule, scores)
    for b, k, state in zip(i2t.anchor, i2t.hard, i2t.state, strict=True):
        s = float(scores[0][b, k])
        assert int(state) == (2 if s > 0.4 else 1 if s > 0.1 else 0)


def test_all_candidates_are_those_picked_one_after_another():
    sim, positives = table(5), torch.eye(BATCH, dtype=torch.bool)
    positives[2, 3] = positives[3, 2] = True
    positives[4] = True  # nothing left to pick
    one_by_one, second = _pick(sim, positives, hardest, False, BATCH - 1)
    together, no_second = _pick(sim, positives, hardest, True, ALL)
    assert torch.equal(one_by_one, together)
    assert torch.equal(second, no_second) and (no_second == NONE).all()


def test_all_candidates_begin_with_the_pickers():
    def least(sim, positives):
        return hardest(-sim, positives)

    sim, positives = table(6), torch.eye(BATCH, dtype=torch.bool)
    order = _pick(sim, positives, least, True, ALL)[0].view(-1, BATCH)
    assert torch.equal(order[0], least(sim, positives))
    for b in range(BATCH):
        rest = sim[b, order[1:, b]]
        assert torch.equal(rest, rest.sort(descending=True).values)
        assert sorted(order[:, b].tolist()) == [c for c in range(BATCH) if c != b]


class Recorded:
    """Con-D by a table, which records the pairs that it judges."""

    def __init__(self, scores):
        self.scores, self.pairs = scores, []

    def __call__(self, image_of, text_of):
        self.pairs = list(zip(image_of.tolist(), text_of.tolist(), strict=True))
        return self.scores[image_of, text_of]


@pytest.mark.parametrize("top_k", [1, 3, ALL])
def test_con_d_judges_own_pairs_only_where_the_rule_needs_them(top_k):
    scores = table(9).sigmoid()
    plain, with_own = Recorded(scores), Recorded(scores)
    rule = MiningRule(top_k=top_k)
    _, _, judged = connections_of(rule, None, judge=plain)
    assert judged == len(plain.pairs) and not any(i == t for i, t in plain.pairs)
    rule = MiningRule(rule="margin", top_k=top_k)
    own = Margin(margin=0.1)
    i2t, t2i, judged = connections_of(rule, None, own, judge=with_own)
    assert with_own.pairs[-BATCH:] == [(b, b) for b in range(BATCH)]
    assert judged == len(plain.pairs) + BATCH
    for found, score in ((i2t, scores), (t2i, scores.t())):
        for b, k, state in zip(found.anchor, found.hard, found.state, strict=True):
            assert bool(state == POSITIVE) == slow_false(score, b, k, 0.1, "absolute")


def test_a_mini_batch_without_negatives_is_judged():
    everything = torch.ones(3, 3, dtype=torch.bool)
    for rule in (MiningRule(rule="margin"), MiningRule()):
        con_d = Recorded(torch.rand(3, 3))
        i2t, _, judged = find_connections(
            torch.rand(3, 3),
            torch.rand(3, 3),
            everything,
            torch.arange(3),
            [hardest, hardest],
            rule,
            con_d,
            judge_none=True,
        )
        assert judged == (3 if rule.rule == "margin" else 0)
        assert i2t.itm_pairs(rule)[0].numel() == 0


def test_probabilities_as_labels_need_a_probability():
    with pytest.raises(ValueError, match="score that is a probability"):
        MiningRule(score="intra_modal", labels="probability")
    with pytest.raises(ValueError, match="rule must be thresholds, margin"):
        MiningRule(rule="margn")
    with pytest.raises(ValueError, match="score must be con_d, similarity"):
        MiningRule(score="similarty")


@pytest.mark.parametrize("combine", ["max", "min", "mean"])
def test_intra_modal_equals_a_loop(combine):
    images, texts = (F.normalize(table(seed), dim=1) for seed in (10, 11))
    batch = SimpleNamespace(ranks=Ranks(False))
    view = PairView(table(1), table(2), images, texts, batch)
    i2t, t2i = SCORES["intra_modal"](view, own=_IntraModal(combine))
    for b in range(BATCH):
        for k in range(BATCH):
            both = float(images[b] @ images[k]), float(texts[b] @ texts[k])
            value = {"max": max(both), "min": min(both), "mean": sum(both) / 2}[combine]
            assert float(i2t[b, k]) == pytest.approx(value, abs=1e-6)
    assert torch.equal(i2t, t2i)


# The step


@pytest.fixture
def samples(toy_train):
    return mini_batch(toy_train, range(BATCH))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return load_model("albef_mafa", "tiny")


def step(model, samples, encoder=None, con_d=None, **changes):
    torch.manual_seed(5)
    parts = build_parts(StepSettings(**changes), con_d, negatives_encoder=encoder)
    return run_step(model.backbone, samples, parts)


def test_similarity_of_the_model_in_training_judges(model, samples):
    rule = MiningRule(score="similarity", rule="margin", top_k=2)
    output = step(model, samples, connections=rule, own={"margin": Margin(margin=0.01)})
    images, texts = output.image_features, output.text_features
    for found, cosine in ((output.i2t, images @ texts.t()), (output.t2i, texts @ images.t())):
        rows = found.hard != NONE
        expected = cosine[found.anchor[rows], found.hard[rows]]
        assert torch.allclose(found.probability[rows], expected, atol=1e-5)
        known = torch.tensor(
            [slow_false(cosine, b, k, 0.01, "absolute")
             for b, k in zip(found.anchor[rows], found.hard[rows], strict=True)]
        )  # fmt: skip
        assert torch.equal(found.state[rows] == POSITIVE, known)
    assert output.judged_pairs == 0
    assert output.counts[:, 1].sum() == output.counts[:, 0].sum() > 0


class Guide:
    """A frozen encoder with similarities of its own."""

    def __init__(self, seed):
        self.sims = table(seed), table(seed + 1)

    def compare(self, samples, ranks=None, seen=None):
        vectors = F.normalize(table(20), dim=1), F.normalize(table(21), dim=1)
        sims = (sim / 0.1 for sim in self.sims)
        return EncodedByFrozen(*sims, torch.tensor(0.1), *vectors)


def test_the_frozen_encoder_is_the_guide(model, samples):
    rule = MiningRule(score="similarity", rule="margin", top_k=ALL)
    guide = Guide(30)
    output = step(model, samples, guide, connections=rule)
    found = output.i2t
    rows = found.hard != NONE
    expected = guide.sims[0][found.anchor[rows], found.hard[rows]]
    assert torch.allclose(found.probability[rows], expected, atol=1e-6)


def test_negatives_are_picked_within_a_modality(model, samples):
    output = step(model, samples, negatives_by="intra_modal")
    images, texts = output.image_features, output.text_features
    ids = samples["image_id"]
    for found in (output.i2t, output.t2i):
        for b in range(BATCH):
            others = [k for k in range(BATCH) if ids[k] != ids[b]]
            near = {
                k: max(float(images[b] @ images[k]), float(texts[b] @ texts[k])) for k in others
            }
            assert int(found.hard[b]) == max(near, key=near.__getitem__)


def test_settings_by_default_need_no_score(model, samples):
    """A score that is not used is not computed, and Con-D is not used beside one."""

    class Never:
        def judge(self, *args, **more):
            raise AssertionError("Con-D judged")

    output = step(model, samples, con_d=Never(), connections=MiningRule(score="similarity"))
    assert output.judged_pairs == 0
    plain = step(model, samples)
    assert torch.isnan(plain.i2t.probability).all() and (plain.counts[:, 1] == 0).all()


@pytest.fixture
def registered(monkeypatch):
    for registry in (SCORES, RULES):
        monkeypatch.setattr(registry, "_entries", registry.entries())


def test_scores_and_verdicts_of_another_form_are_refused(model, samples, registered):
    SCORES.register("narrow")(lambda view: (view.i2t, view.t2i[:, 1:]))
    with pytest.raises(ValueError, match=r"narrow returned .* \(8, 7\), expected \(8, 8\)"):
        step(model, samples, connections=MiningRule(score="narrow"))
    RULES.register("truth")(lambda pairs, rule: pairs.score > 0.0)
    with pytest.raises(ValueError, match=r"truth returned an array \(8,\) of bool"):
        step(model, samples, connections=MiningRule(score="similarity", rule="truth"))
    RULES.register("one")(lambda pairs, rule: torch.tensor(POSITIVE))
    with pytest.raises(ValueError, match=r"one returned an array \(\) of int64, expected \(8,\)"):
        step(model, samples, connections=MiningRule(score="similarity", rule="one"))
