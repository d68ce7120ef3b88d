"""Re-ranking: LAVIS's scores, and the values of single pairs, with each thing made once."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lavis.common.registry import registry
from lavis.models.albef_models import compute_sim_matrix as lavis_scores
from lavis.models.med import XBertEncoder
from lavis.tasks.retrieval import RetrievalTask
from omegaconf import OmegaConf
from two_forks import answers_of_two

from benchmarks.reference_step import PlainAlbef
from lavis_mafa import load_model
from lavis_mafa.models import AlbefMafa
from lavis_mafa.models.inference.many_pairs import HELD, ManyPairs, blocks
from lavis_mafa.models.inference.rerank import UNRANKED, compute_sim_matrix, itm_scores

WORDS = ["circle", "red", "blue", "a", "above", "square", "the", "left", "of", "big"]
LENGTHS = (1, 25, 3, 2, 14, 7)


class Loader(list):
    """Random images, and captions of very different lengths."""

    def __init__(self, images, texts, batch=5, lengths=LENGTHS):
        rng = np.random.default_rng(0)
        captions = [" ".join(rng.choice(WORDS, lengths[n % len(lengths)])) for n in range(texts)]
        made = torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        super().__init__({"image": part} for part in made.split(batch))
        self.dataset = SimpleNamespace(text=captions, image=range(images))


class Counting:
    """A backbone that notes which pairs it matches, and the width of its texts."""

    def __init__(self, backbone):
        self.backbone, self.pairs, self.widths = backbone, [], []

    def __getattr__(self, name):
        return getattr(self.backbone, name)

    def match(self, images, texts, image_of, text_of):
        # `mark` tells an image by its first number.
        numbers = images.embeds[image_of, 0, 0]
        self.pairs += zip(numbers.tolist(), text_of.tolist(), strict=True)
        self.widths.append((texts.ids.shape[1], int(texts.mask[text_of].sum(1).max())))
        return self.backbone.match(images, texts, image_of, text_of)


def wide(model):
    """Scores that differ by more than rounding."""
    model.itm_head.weight.data.mul_(30.0)
    return model.eval()


@pytest.fixture(scope="module")
def both():
    """A tiny ALBEF, and LAVIS's modules as its ``albef_retrieval`` has them, of equal weights."""
    cfg = OmegaConf.load(AlbefMafa.default_config_path("tiny")).model
    torch.manual_seed(0)
    lavis = wide(PlainAlbef(cfg))
    ours = AlbefMafa.from_config(cfg).eval()
    ours.load_state_dict(lavis.state_dict())
    lavis.text_encoder = lavis.text_encoder.bert
    lavis.text_encoder.__class__ = XBertEncoder
    return ours, lavis


@pytest.fixture(params=["albef_mafa", "blip_mafa", "blip2_mafa"])
def family(request):
    torch.manual_seed(0)
    return wide(load_model(request.param, "tiny"))


@torch.inference_mode()
def all_scores(backbone, loader):
    """Similarity plus logit ``(I, T)``, pair by pair."""
    images = backbone.encode_images(torch.cat([batch["image"] for batch in loader]))
    zero, columns = torch.zeros(1, dtype=torch.long), []
    for caption in loader.dataset.text:
        text = backbone.encode_texts([caption], max_length=35)
        logits = [
            backbone.match(type(images)(images.embeds[i : i + 1]), text, zero, zero)[0, 1]
            for i in range(len(images.embeds))
        ]
        columns.append(
            torch.stack(logits) + backbone.similarity(images.features, text.features)[:, 0]
        )
    return torch.stack(columns, dim=1).numpy()


def require_equal(measured, expected, atol=1e-4):
    for mine, reference in zip(measured, expected, strict=True):
        assert mine.shape == reference.shape and mine.dtype == np.float32
        assert ((mine == UNRANKED) == (reference == UNRANKED)).all()
        assert abs(mine - reference).max() < atol


@pytest.mark.parametrize("k, at_once", [(1, None), (4, None), (4, 3), (9, 8)])
def test_scores_are_those_of_lavis(both, k, at_once):
    ours, lavis = both
    loader = Loader(9, 31)
    with torch.no_grad():
        expected = lavis_scores(lavis, loader, k_test=k)
    measured = compute_sim_matrix(ours.backbone, loader, k, at_once)
    require_equal(measured, expected)
    assert [((one != UNRANKED).sum(1) == k).all() for one in measured] == [True, True]
    assert measured[0][measured[0] != UNRANKED].std() > 0.1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_recall_is_that_of_lavis_on_a_thousand_images(both, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.mapping["paths"], "output_dir", str(tmp_path))
    ours, lavis = both
    loader = Loader(1000, 5000, batch=100, lengths=(9, 25, 12, 16))  # no caption comes twice
    with torch.no_grad():
        expected = lavis_scores(lavis, loader, k_test=8)
    measured = compute_sim_matrix(ours.backbone, loader, 8)
    for mine, theirs in zip(measured, expected, strict=True):
        # Two candidates may be as similar as rounding tells, one of them the last that is ranked.
        both_ranked = (mine != UNRANKED) & (theirs != UNRANKED)
        assert both_ranked.sum() >= 0.999 * mine.shape[0] * 8
        assert abs(mine - theirs)[both_ranked].max() < 1e-4
    text2image = {text: text // 5 for text in range(5000)}
    image2text = {image: list(range(5 * image, 5 * image + 5)) for image in range(1000)}
    figures = [
        RetrievalTask._report_metrics(*scores, text2image, image2text)
        for scores in (measured, expected)
    ]
    assert figures[0] == figures[1] and figures[0]["txt_r10"] > 0


def test_scores_are_those_of_single_pairs(family):
    """More candidates asked for than there are, and fewer texts than images: of some images no
    caption is there."""
    loader = Loader(8, 6)
    whole = all_scores(family.backbone, loader)
    require_equal(compute_sim_matrix(family.backbone, loader, 100), (whole, whole.T))
    best = compute_sim_matrix(family.backbone, loader, 1)
    similarity = compute_sim_matrix(family.backbone, loader, 0)[0]
    for one, table, sim in zip(best, (whole, whole.T), (similarity, similarity.T), strict=True):
        rows = np.arange(len(one))
        assert (one.argmax(1) == sim.argmax(1)).all() and ((one > UNRANKED).sum(1) == 1).all()
        assert abs(one.max(1) - table[rows, sim.argmax(1)]).max() < 1e-4


def test_texts_together_are_those_alone(family):
    loader = Loader(1, 150)
    with torch.inference_mode():
        ours = ManyPairs(family.backbone).encode_texts(loader.dataset.text, 12)
        theirs = family.backbone.encode_texts(loader.dataset.text, 12)
    assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.mask, theirs.mask)
    assert torch.allclose(ours.features, theirs.features, atol=1e-5)
    if theirs.embeds is None:
        assert ours.embeds is None
    else:
        there = ours.mask.bool()
        assert torch.allclose(ours.embeds[there], theirs.embeds[there], atol=1e-5)


def test_images_in_parts_are_those_at_once(family):
    images = torch.randn(37, 3, 32, 32)
    with torch.inference_mode():
        ours = ManyPairs(family.backbone).encode_images(images, for_matching=True).embeds
        assert torch.allclose(ours, family.backbone.encode_images(images).embeds, atol=1e-5)


@pytest.mark.parametrize("at_once", [None, 10])
def test_every_pair_and_every_image_s_keys_are_made_once(both, at_once):
    """A pair that its image and its text ask for is matched once, and what looks at an image is
    projected once for all its pairs."""
    ours, _ = both
    loader, k = Loader(40, 120), 12
    backbone = Counting(ours.backbone)
    projected = []
    layer = ours.text_encoder.bert.encoder.layer[-1].crossattention.self.key
    hook = layer.register_forward_hook(lambda module, given, out: projected.append(len(given[0])))
    try:
        i2t, t2i = compute_sim_matrix(backbone, loader, k, at_once)
    finally:
        hook.remove()
    asked = (i2t != UNRANKED) | (t2i.T != UNRANKED)
    assert asked.sum() < 40 * k + 120 * k
    assert len(backbone.pairs) == len(set(backbone.pairs)) == asked.sum()
    assert sum(projected) == asked.any(1).sum() == 40


def test_texts_are_cut_to_the_longest_of_a_pass(both):
    backbone = Counting(both[0].backbone)
    compute_sim_matrix(backbone, Loader(2, 60), 60, pairs_per_pass=10)
    assert len(backbone.widths) == 12
    assert all(width == longest for width, longest in backbone.widths)
    assert len({width for width, _ in backbone.widths}) > 3


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 60), max_size=200),
    st.integers(1, 80),
)
def test_blocks_have_every_pair_once_and_images_whole(images, size):
    image_of = torch.tensor(images, dtype=torch.long)
    found = list(blocks(image_of, size))
    assert sorted(torch.cat(found).tolist() if found else []) == list(range(len(images)))
    inside = [set(image_of[block].tolist()) for block in found]
    assert sum(map(len, inside)) == len(set(images))
    for block, here in zip(found, inside, strict=True):
        assert len(here) <= HELD
        assert len(here) == 1 or len(block) < len(here) * size / 4
        # Parts of a block that do not fit a pass hold as many pairs as there are images.
        parts = -(-len(block) // size)
        assert len(here) == 1 or len(block) // parts >= len(here)


def test_images_with_few_pairs_come_together():
    """As many as leave a pass no fewer pairs than images; those with many pairs are alone."""
    image_of = torch.tensor([0, 0, 1, 1, 2, 2, *range(3, 10), *[10] * 30])
    sizes = [len(set(image_of[block].tolist())) for block in blocks(image_of, 10)]
    assert sorted(sizes) == [1, 5, 5]
    assert [len(block) for block in blocks(torch.arange(2 * HELD), 1000)] == [HELD, HELD]


def test_no_pairs_no_scores(both):
    backbone, none = both[0].backbone, torch.empty(0, dtype=torch.long)
    with torch.inference_mode():
        images = backbone.encode_images(Loader(2, 2)[0]["image"])
        texts = backbone.encode_texts(["a circle"])
        assert itm_scores(backbone, images, texts, none, none).shape == (0,)


def test_progress_is_told_pair_by_pair(both):
    backbone, told = both[0].backbone, []
    with torch.inference_mode():
        images = backbone.encode_images(torch.cat([b["image"] for b in Loader(6, 1)]))
        texts = backbone.encode_texts(Loader(1, 9).dataset.text)
        pairs = torch.cartesian_prod(torch.arange(6), torch.arange(9)).unbind(1)
        ManyPairs(backbone, 4, told.append).match(images, texts, *pairs)
    assert sum(told) == 54 and max(told) <= 4


def _one_of_two(rank, folder, results):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        backbone = Counting(wide(load_model("albef_mafa", "tiny")).backbone)
        if rank == 1:  # rounding that differs must not change which pairs are shared
            similarity = backbone.backbone.similarity
            backbone.similarity = lambda *given: similarity(*given) + 0.05 * torch.randn(7, 23)
        scores = compute_sim_matrix(backbone, Loader(7, 23), 3)
        results.put((rank, len(backbone.pairs), *(one.tolist() for one in scores)))
    except Exception as error:
        results.put((rank, repr(error)))
    finally:
        dist.destroy_process_group()
        results.close()
        results.join_thread()
        os._exit(0)


def test_two_ranks_share_the_pairs_and_have_all_scores(tmp_path):
    torch.manual_seed(0)
    alone = Counting(wide(load_model("albef_mafa", "tiny")).backbone)
    expected = compute_sim_matrix(alone, Loader(7, 23), 3)
    answers = answers_of_two(_one_of_two, str(tmp_path))
    for _, count, *scores in answers:
        assert abs(count - len(alone.pairs) / 2) <= 1
        require_equal([np.array(one, np.float32) for one in scores], expected)


def test_a_split_that_was_not_read_whole_is_refused(both):
    loader = Loader(10, 4)
    del loader[1]
    with pytest.raises(ValueError, match="read 5 of 10 images"):
        compute_sim_matrix(both[0].backbone, loader, 2)
