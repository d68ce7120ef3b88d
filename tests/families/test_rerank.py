"""Re-ranking: equal to LAVIS and to single pairs, without repeated computation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny_config
from hypothesis import given
from hypothesis import strategies as st
from lavis.models.albef_models import compute_sim_matrix as lavis_scores
from lavis.models.med import XBertEncoder
from omegaconf import OmegaConf
from two_forks import answers_of_a_group

from lavis_mafa import load_model
from lavis_mafa.families import AlbefMafa, many_pairs
from lavis_mafa.families.many_pairs import HELD, ManyPairs, _blocks
from lavis_mafa.families.rerank import UNRANKED, compute_sim_matrix
from research.benchmarks.reference_step import PlainAlbef

WORDS = ["circle", "red", "blue", "a", "above", "square", "the", "left", "of", "big"]
LENGTHS = (1, 25, 3, 2, 14, 7)


class Loader(list):
    """Random images, and captions of very different lengths."""

    def __init__(self, images, texts, batch=5, lengths=LENGTHS):
        rng = np.random.default_rng(0)
        captions = [" ".join(rng.choice(WORDS, lengths[n % len(lengths)])) for n in range(texts)]
        pixels = torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        super().__init__({"image": part} for part in pixels.split(batch))
        self.dataset = SimpleNamespace(text=captions, image=range(images))


class CountingBackbone:
    """Records which pairs a backbone matches."""

    def __init__(self, backbone):
        self.backbone, self.pairs = backbone, []

    def __getattr__(self, name):
        return getattr(self.backbone, name)

    def match(self, images, texts, image_of, text_of):
        # An image is identified by its first embedding value.
        numbers = images.embeds[image_of, 0, 0]
        self.pairs += zip(numbers.tolist(), text_of.tolist(), strict=True)
        return self.backbone.match(images, texts, image_of, text_of)


def widen_scores(model):
    """Scale the ITM head so that scores differ by more than rounding."""
    model.itm_head.weight.data.mul_(30.0)
    return model.eval()


@pytest.fixture(scope="module")
def ours_and_lavis():
    """A tiny ALBEF, and LAVIS's modules as in its ``albef_retrieval``, with equal weights."""
    cfg = tiny_config(AlbefMafa)
    torch.manual_seed(0)
    lavis = widen_scores(PlainAlbef(cfg))
    ours = AlbefMafa.from_config(cfg).eval()
    ours.load_state_dict(lavis.state_dict())
    lavis.text_encoder = lavis.text_encoder.bert
    lavis.text_encoder.__class__ = XBertEncoder
    return ours, lavis


@pytest.fixture(params=["albef_mafa", "blip_mafa", "blip2_mafa"])
def family(request):
    torch.manual_seed(0)
    return widen_scores(load_model(request.param, "tiny"))


@torch.inference_mode()
def all_scores(backbone, loader, length=35):
    """Return similarity plus logit ``(I, T)``, computed pair by pair."""
    images = backbone.encode_images(torch.cat([batch["image"] for batch in loader]))
    zero, columns = torch.zeros(1, dtype=torch.long), []
    for caption in loader.dataset.text:
        text = backbone.encode_texts([caption], max_length=length)
        logits = [
            backbone.match(type(images)(images.embeds[i : i + 1]), text, zero, zero)[0, 1]
            for i in range(len(images.embeds))
        ]
        columns.append(
            torch.stack(logits) + backbone.similarity(images.features, text.features)[:, 0]
        )
    return torch.stack(columns, dim=1).numpy()


def assert_scores_close(measured, expected, atol=1e-4):
    for mine, reference in zip(measured, expected, strict=True):
        assert mine.shape == reference.shape and mine.dtype == np.float32
        assert ((mine == UNRANKED) == (reference == UNRANKED)).all()
        assert abs(mine - reference).max() < atol


@pytest.mark.parametrize("k, at_once", [(1, 64), (4, 64), (4, 3), (9, 8)])
def test_scores_equal_lavis(ours_and_lavis, k, at_once, monkeypatch):
    ours, lavis = ours_and_lavis
    monkeypatch.setitem(many_pairs._PAIRS, "cpu", at_once)
    loader = Loader(9, 31)
    with torch.no_grad():
        expected = lavis_scores(lavis, loader, k_test=k)
    measured = compute_sim_matrix(ours.backbone, loader, k)
    assert_scores_close(measured, expected)
    assert [((scores != UNRANKED).sum(1) == k).all() for scores in measured] == [True, True]
    assert measured[0][measured[0] != UNRANKED].std() > 0.1


def test_itm_alone_ranks_the_candidates_as_in_albef(family):
    """ALBEF: the k best by similarity are ranked by the logit; captions have 30 tokens."""
    loader, k = Loader(6, 9, lengths=(3, 40, 8)), 4
    cfg = OmegaConf.create({"k_test": k, "rerank_by": "itm", "retrieval_max_txt_len": 30})
    measured = family.compute_sim_matrix(loader, cfg)
    both = all_scores(family.backbone, loader, length=30)
    with torch.inference_mode():
        images = family.backbone.encode_images(torch.cat([one["image"] for one in loader]))
        texts = family.backbone.encode_texts(loader.dataset.text, max_length=30)
        sims = family.backbone.similarity(images.features, texts.features).numpy()
    assert texts.ids.shape[1] == 30
    logits = both - sims
    directions = (measured[0], logits, sims), (measured[1], logits.T, sims.T)
    for scores, logit, sim in directions:
        for query in range(len(scores)):
            best = np.argsort(-sim[query])[:k]
            assert set(np.flatnonzero(scores[query] != UNRANKED)) == set(best)
            assert abs(scores[query, best] - logit[query, best]).max() < 1e-4
    assert abs(measured[0][measured[0] != UNRANKED]).max() > 1  # no similarity is that large


@torch.inference_mode()
def test_odds_are_the_product_of_both_heads(family):
    """exp(similarity / temperature) * P(match) / (1 - P(match)), pair by pair."""
    loader, k, zero = Loader(5, 7), 3, torch.zeros(1, dtype=torch.long)
    backbone = CountingBackbone(family.backbone)
    backbone.temperature = torch.tensor(0.01)
    backbone.similarity = lambda *both: family.backbone.similarity(*both) - 2  # scores below -100
    measured = compute_sim_matrix(backbone, loader, k, by="odds")
    images = backbone.encode_images(torch.cat([one["image"] for one in loader]))
    expected = np.empty((5, 7))
    for column, caption in enumerate(loader.dataset.text):
        text = backbone.encode_texts([caption], max_length=35)
        itc = backbone.similarity(images.features, text.features)[:, 0] / 0.01
        for row in range(5):
            one = type(images)(images.embeds[row : row + 1])
            p = backbone.match(one, text, zero, zero)[0].softmax(0).double()
            expected[row, column] = itc[row] + torch.log(p[1] / p[0])
    similarity = compute_sim_matrix(backbone, loader, 0)
    sides = (measured[0], expected, similarity[0]), (measured[1], expected.T, similarity[1])
    for scores, product, sim in sides:
        for query in range(len(scores)):
            best, others = np.split(np.argsort(-sim[query]), [k])
            assert np.allclose(scores[query, best], product[query, best], rtol=1e-3)
            assert scores[query, others].max() < scores[query, best].min()


def test_unknown_order_of_candidates_is_refused(ours_and_lavis):
    with pytest.raises(ValueError, match="rerank_by is 'product', expected one of sum, itm"):
        compute_sim_matrix(ours_and_lavis[0].backbone, Loader(2, 4), 1, by="product")


def test_scores_equal_single_pairs(family):
    """k exceeds the number of candidates, and some images have no caption."""
    loader = Loader(8, 6)
    expected = all_scores(family.backbone, loader)
    assert_scores_close(compute_sim_matrix(family.backbone, loader, 100), (expected, expected.T))
    best = compute_sim_matrix(family.backbone, loader, 1)
    similarity = compute_sim_matrix(family.backbone, loader, 0)[0]
    for scores, table, sim in zip(
        best, (expected, expected.T), (similarity, similarity.T), strict=True
    ):
        rows = np.arange(len(scores))
        assert (scores.argmax(1) == sim.argmax(1)).all() and ((scores > UNRANKED).sum(1) == 1).all()
        assert abs(scores.max(1) - table[rows, sim.argmax(1)]).max() < 1e-4


def test_texts_encoded_in_chunks_equal_texts_encoded_at_once(family):
    loader = Loader(1, 150)
    with torch.inference_mode():
        ours = ManyPairs(family.backbone).encode_texts(loader.dataset.text, 12)
        theirs = family.backbone.encode_texts(loader.dataset.text, 12)
    assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.mask, theirs.mask)
    assert torch.allclose(ours.features, theirs.features, atol=1e-5)
    if theirs.embeds is None:
        assert ours.embeds is None
    else:
        visible = ours.mask.bool()
        assert torch.allclose(ours.embeds[visible], theirs.embeds[visible], atol=1e-5)


def test_images_encoded_in_chunks_equal_images_encoded_at_once(family):
    images = torch.randn(37, 3, 32, 32)
    with torch.inference_mode():
        ours = ManyPairs(family.backbone).encode_images(images, for_matching=True).embeds
        assert torch.allclose(ours, family.backbone.encode_images(images).embeds, atol=1e-5)


@pytest.mark.parametrize("at_once", [64, 10])
def test_every_pair_and_every_images_keys_are_computed_once(ours_and_lavis, at_once, monkeypatch):
    """A pair requested by its image and its text is matched once; keys are projected once per
    image.
    """
    ours, _ = ours_and_lavis
    loader, k = Loader(40, 120), 12
    monkeypatch.setitem(many_pairs._PAIRS, "cpu", at_once)
    backbone = CountingBackbone(ours.backbone)
    projected = []
    layer = ours.text_encoder.bert.encoder.layer[-1].crossattention.self.key
    hook = layer.register_forward_hook(lambda module, inputs, out: projected.append(len(inputs[0])))
    try:
        i2t, t2i = compute_sim_matrix(backbone, loader, k)
    finally:
        hook.remove()
    requested = (i2t != UNRANKED) | (t2i.T != UNRANKED)
    assert requested.sum() < 40 * k + 120 * k
    assert len(backbone.pairs) == len(set(backbone.pairs)) == requested.sum()
    assert sum(projected) == requested.any(1).sum() == 40


@given(st.lists(st.integers(0, 60), max_size=200), st.integers(1, 80))
def test_blocks_contain_every_pair_once_and_keep_images_together(images, size):
    image_of = torch.tensor(images, dtype=torch.long)
    found = list(_blocks(image_of, size))
    assert sorted(torch.cat(found).tolist() if found else []) == list(range(len(images)))
    images_of_blocks = [set(image_of[block].tolist()) for block in found]
    assert sum(map(len, images_of_blocks)) == len(set(images))
    for block, images_here in zip(found, images_of_blocks, strict=True):
        assert len(images_here) <= HELD
        assert len(images_here) == 1 or len(block) < len(images_here) * size / 4
        # Parts of a block that exceed a pass have at least as many pairs as images.
        parts = -(-len(block) // size)
        assert len(images_here) == 1 or len(block) // parts >= len(images_here)


def counted_albef():
    torch.manual_seed(0)
    return CountingBackbone(widen_scores(load_model("albef_mafa", "tiny")).backbone)


def score_on_rank(rank):
    backbone = counted_albef()
    if rank == 1:  # different rounding must not change how the pairs are divided
        similarity = backbone.backbone.similarity
        backbone.similarity = lambda *given: similarity(*given) + 0.05 * torch.randn(7, 23)
    scores = compute_sim_matrix(backbone, Loader(7, 23), 3)
    return len(backbone.pairs), *(one.tolist() for one in scores)


def test_two_ranks_share_the_pairs_and_have_all_scores(tmp_path):
    single_process = counted_albef()
    expected = compute_sim_matrix(single_process, Loader(7, 23), 3)
    answers = answers_of_a_group(score_on_rank, tmp_path)
    for _, count, *scores in answers:
        assert abs(count - len(single_process.pairs) / 2) <= 1
        assert_scores_close([np.array(part, np.float32) for part in scores], expected)


def test_incompletely_read_split_is_rejected(ours_and_lavis):
    loader = Loader(10, 4)
    del loader[1]
    with pytest.raises(ValueError, match="read 5 of 10 images"):
        compute_sim_matrix(ours_and_lavis[0].backbone, loader, 2)
