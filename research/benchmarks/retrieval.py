"""Compare the time of re-ranking in retrieval with LAVIS's ``compute_sim_matrix``.

LAVIS's side is its own function over its own modules, with the same weights, images and captions.
Only re-ranking is timed. Both sides encode images and captions before, which takes a small part of
an evaluation's time.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from lavis.models.albef_models import compute_sim_matrix as lavis_scores
from lavis.models.med import XBertEncoder
from omegaconf import OmegaConf
from torch import Tensor

from lavis_mafa.families import AlbefMafa
from lavis_mafa.families.rerank import UNRANKED, encode_split, itm_scores, rerank
from lavis_mafa.io.project_files import find_config
from research.benchmarks.harness import Row, Sizes, in_turn
from research.benchmarks.reference_step import PlainAlbef
from research.benchmarks.step_models import CAPTION_WORDS, captions

CAPTIONS = 5  # per image
_SAME = 1e-3  # largest difference of scores that count as equal in fp32


@dataclass(frozen=True)
class _Job:
    """An evaluation, and the share of it that is timed.

    Attributes:
        images: number of images, with `CAPTIONS` captions each.
        k: number of candidates of a query.
        lavis: number of ranks, of which LAVIS does the work of the first.
    """

    images: int
    k: int
    lavis: int = 1

    @property
    def pairs(self) -> int:
        """Return the number of requested pairs; a pair requested in both directions counts
        twice."""
        return self.k * self.images * (1 + CAPTIONS)

    @property
    def pairs_of_lavis(self) -> int:
        share = [min(n, n // self.lavis + 1) for n in (self.images, self.images * CAPTIONS)]
        return self.k * sum(share)


_JOBS = {"quick": _Job(12, 8), "cpu": _Job(100, 64, 501), "gpu": _Job(1000, 128, 5)}
_WIDTH = {"cpu": 384, "gpu": 768}  # widths of both encoders, with 12 layers and heads of 64


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure the seconds for a thousand requested pairs in both directions."""
    job = _JOBS[sizes.name]
    with tempfile.TemporaryDirectory() as folder:
        ours, lavis = _both_models(sizes, Path(folder))
        loader = _random_split(job.images, _states_of(ours), sizes.device)
        with torch.inference_mode():
            images, texts = encode_split(ours.backbone, loader)
            lavis.text_encoder.known = texts

            def our_side() -> Any:
                return rerank(ours.backbone, images, texts, job.k, ["sum"])

            def lavis_share() -> Any:
                return _lavis_scores_of(lavis, loader, job.k, job.lavis)

            _require_equal(ours.backbone, images, texts, lavis_share())
            actions = {"ours": our_side, "lavis": lavis_share}
            times = in_turn(actions, sizes.repeats, 0, sizes.device)
    per_pair = (
        [1000 * seconds / job.pairs for seconds in times["ours"]],
        [1000 * seconds / job.pairs_of_lavis for seconds in times["lavis"]],
    )
    width = _WIDTH.get(sizes.name, "tiny")
    what = f"re-ranking {job.images} x {CAPTIONS}, k = {job.k}, width {width}: 1000 pairs asked for"
    done = f"LAVIS {job.pairs_of_lavis // job.k} of the queries; "
    note = (
        "LAVIS's compute_sim_matrix of albef_retrieval, same weights, scores equal within "
        f"{_SAME:g}; {done if job.lavis > 1 else ''}captions of {CAPTION_WORDS[0]:g} words; "
        "images and captions encoded before; fp32"
    )
    yield Row.of(what, note, *per_pair)


def _both_models(sizes: Sizes, folder: Path) -> tuple[Any, Any]:
    """Build ``albef_mafa`` and the modules of LAVIS's ``albef_retrieval`` with equal weights."""
    cfg = OmegaConf.load(AlbefMafa.default_config_path("tiny")).model
    if not sizes.quick:
        cfg = OmegaConf.merge(cfg, _sized_config(_WIDTH[sizes.name], folder))
    torch.manual_seed(0)
    lavis = PlainAlbef(cfg).eval()
    lavis.itm_head.weight.data.mul_(50.0)  # scores that differ by more than rounding
    ours = AlbefMafa.from_config(cfg).eval()
    ours.load_state_dict(lavis.state_dict())
    lavis.text_encoder = lavis.text_encoder.bert
    lavis.text_encoder.__class__ = _KnownTexts
    for model in (ours, lavis):
        model.visual_encoder.forward_features = lambda states: states
    return ours.to(sizes.device), lavis.to(sizes.device)


def _lavis_scores_of(model: Any, loader: Any, k: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a function that computes LAVIS's scores on the first of several ranks."""
    world = mock.patch("lavis.common.dist_utils.get_world_size", lambda: ranks)
    with world, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return lavis_scores(model, loader, k_test=k)


def _states_of(model: Any) -> tuple[int, int]:
    """Return random states ``(S, D)`` of an encoded image."""
    encoder = model.visual_encoder
    return encoder.patch_embed.num_patches + 1, encoder.vision_width


def _random_split(images: int, states: tuple[int, int], device: str, seed: int = 0) -> Any:
    """Return a loader of random encoded images ``(N, S, D)``, with captions."""
    encoded = torch.randn(images, *states, generator=torch.Generator().manual_seed(seed))
    data = SimpleNamespace(text=captions(images * CAPTIONS, seed), image=range(images))
    return _Loader(data, [{"image": part} for part in encoded.split(50)])


class _Loader(list):
    def __init__(self, dataset: Any, batches: Sequence[dict[str, Tensor]]) -> None:
        super().__init__(batches)
        self.dataset = dataset


class _KnownTexts(XBertEncoder):
    """A text encoder that returns precomputed states of captions: the items of ``known`` in
    turn."""

    known: Any = None
    place = 0

    def forward_text(self, tokenized_text: Any, **kwargs: Any) -> Any:
        count = len(tokenized_text.input_ids)
        part = self.known.embeds[self.place : self.place + count]
        self.place = (self.place + count) % len(self.known.embeds)
        return SimpleNamespace(last_hidden_state=part)


def _require_equal(backbone: Any, images: Any, texts: Any, lavis: tuple[Any, Any]) -> None:
    """Raise an error unless the scores of pairs that LAVIS has matched are equal."""
    sim = backbone.similarity(images.features, texts.features).cpu()
    for expected, similarity, of_images in zip(lavis, (sim, sim.t()), (True, False), strict=True):
        pair = (torch.from_numpy(expected) > UNRANKED).nonzero()[: 4 * 64]
        assert len(pair)
        image, text = pair.t() if of_images else pair.t().flip(0)
        scores = (
            itm_scores(backbone, images, texts, image, text)[:, 1].cpu()
            + similarity[pair[:, 0], pair[:, 1]]
        )
        difference = (scores - torch.from_numpy(expected)[pair[:, 0], pair[:, 1]]).abs().max()
        if difference > _SAME * max(1.0, float(scores.abs().max())):
            raise AssertionError(f"scores differ from LAVIS's by {float(difference):.2g}")


def _sized_config(width: int, folder: Path) -> dict[str, Any]:
    """Return the config of ALBEF base with another width."""
    bert = json.loads(Path(find_config("configs/models/med_config_albef.json")).read_text())
    bert |= {
        "hidden_size": width,
        "encoder_width": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": width // 64,
    }
    file = folder / "bert.json"
    file.write_text(json.dumps(bert))
    return {
        "image_size": 256,
        "med_config_path": str(file),
        "embed_dim": 256,
        "vit": {"patch_size": 16, "width": width, "depth": 12, "heads": width // 64},
    }
