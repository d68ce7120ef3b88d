"""Retrieval scores: ITC similarity, re-ranked by ITM among the best k (ALBEF 3.5, MAFA F)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lavis.common.dist_utils import get_rank, get_world_size, is_main_process
from torch import Tensor
from tqdm import tqdm

from lavis_mafa.backbones.base import Backbone, Images, Texts

TEXT_BATCH = 256
MAX_TOKENS = 35  # LAVIS's length for retrieval captions
UNRANKED = -100.0


@torch.inference_mode()
def compute_sim_matrix(
    backbone: Backbone, data_loader: Any, k_test: int, pairs_per_pass: int = 256
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of every image for every text and the reverse, for LAVIS's retrieval task.

    For each query the ``k_test`` candidates of highest ITC similarity get similarity plus ITM
    logit, all others `UNRANKED`. With 0 the scores are ITC similarities. Several ranks share the
    queries; each must read the whole split.

    Args:
        data_loader: over a LAVIS retrieval evaluation set (``text``, ``image``).
        k_test: candidates to re-rank; clipped to what there is.
        pairs_per_pass: pairs that go through the fusion encoder at once.

    Returns:
        ``(num_images, num_texts)`` and ``(num_texts, num_images)`` float32.
    """
    images, texts = encode_split(backbone, data_loader)
    assert images.features is not None and texts.features is not None
    sim_i2t = backbone.similarity(images.features, texts.features)
    if k_test == 0:
        return sim_i2t.float().cpu().numpy(), sim_i2t.t().float().cpu().numpy()
    scores = []
    for sim, anchors_are_images in ((sim_i2t, True), (sim_i2t.t(), False)):
        scores.append(
            _rerank(backbone, images, texts, sim, k_test, anchors_are_images, pairs_per_pass)
        )
    return scores[0], scores[1]


def encode_split(backbone: Backbone, data_loader: Any) -> tuple[Images, Texts]:
    """Encode a whole evaluation split; embeddings of images stay on the CPU."""
    captions = data_loader.dataset.text
    parts = [
        backbone.encode_texts(captions[i : i + TEXT_BATCH], max_length=MAX_TOKENS)
        for i in range(0, len(captions), TEXT_BATCH)
    ]
    texts = _concatenate_texts(parts)
    embeds, features = [], []
    for samples in _progress(data_loader, "encoding images"):
        one = backbone.encode_images(samples["image"].to(texts.ids.device))
        assert one.features is not None
        embeds.append(one.embeds.cpu())
        features.append(one.features)
    images = Images(torch.cat(embeds), torch.cat(features))
    if len(images.embeds) != len(data_loader.dataset.image):
        raise ValueError(
            f"retrieval needs the whole split on every rank: read {len(images.embeds)} of "
            f"{len(data_loader.dataset.image)} images; set run.use_dist_eval_sampler: False"
        )
    return images, texts


def itm_scores(
    backbone: Backbone, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor, chunk: int
) -> Tensor:
    """ITM logit of class 1 ``(P,)`` of the given pairs, ``chunk`` pairs at a time."""
    device = texts.ids.device
    logits = []
    for begin in range(0, len(image_of), chunk):
        rows = image_of[begin : begin + chunk].cpu()
        columns = text_of[begin : begin + chunk].to(device)
        part = Images(images.embeds[rows].to(device))
        here = torch.arange(len(rows), device=device)
        logits.append(backbone.match(part, texts, here, columns)[:, 1].float())
    return torch.cat(logits) if logits else torch.empty(0, device=device)


def _rerank(
    backbone: Backbone,
    images: Images,
    texts: Texts,
    sim: Tensor,
    k_test: int,
    anchors_are_images: bool,
    chunk: int,
) -> np.ndarray:
    k = min(k_test, sim.shape[1])
    rank, world = get_rank(), get_world_size()
    mine = torch.arange(rank, len(sim), world, device=sim.device)
    scores = torch.zeros_like(sim, dtype=torch.float32)
    scores[mine] = UNRANKED
    what = "re-ranking texts" if anchors_are_images else "re-ranking images"
    anchors_per_pass = max(1, chunk // k)
    for begin in _progress(range(0, len(mine), anchors_per_pass), what):
        anchors = mine[begin : begin + anchors_per_pass]
        top_sim, top = sim[anchors].topk(k, dim=1)
        queries, candidates = anchors.repeat_interleave(k), top.flatten()
        pair = (queries, candidates) if anchors_are_images else (candidates, queries)
        logits = itm_scores(backbone, images, texts, *pair, chunk)
        scores[queries, candidates] = logits + top_sim.flatten().float()
    if world > 1:
        dist.all_reduce(scores)
    return scores.cpu().numpy()


def _concatenate_texts(parts: list[Texts]) -> Texts:
    """Put batches padded to different lengths together."""
    length = max(part.ids.shape[1] for part in parts)

    def padded(tensor: Tensor) -> Tensor:
        missing = length - tensor.shape[1]
        shape = (len(tensor), missing, *tensor.shape[2:])
        return torch.cat([tensor, tensor.new_zeros(shape)], dim=1)

    def together(name: str) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat([padded(value) for value in values])

    return Texts(
        ids=torch.cat([padded(part.ids) for part in parts]),
        mask=torch.cat([padded(part.mask) for part in parts]),
        embeds=together("embeds"),
        features=torch.cat([part.features for part in parts if part.features is not None]),
    )


def _progress(what: Iterable[Any], name: str) -> Iterable[Any]:
    return tqdm(what, desc=name, disable=not is_main_process(), leave=False, mininterval=1.0)
