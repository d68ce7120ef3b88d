"""Retrieval scores: ITC similarity, re-ranked by ITM among the best k (ALBEF 3.5, MAFA F)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from lavis.common.dist_utils import get_rank, get_world_size
from torch import Tensor

from lavis_mafa.algorithm.backbone import Backbone, Images, Texts
from lavis_mafa.algorithm.options import option
from lavis_mafa.families.many_pairs import ManyPairs
from lavis_mafa.io.processes import progress

MAX_TOKENS = 35  # LAVIS's maximum length of captions in retrieval
# Scores by which the best candidates are ordered: similarity plus ITM logit (LAVIS, BLIP), only the
# ITM logit (ALBEF, GRIT-VLP, MAFA F), or ITC's logit (similarity / temperature) plus ITM's
# log-odds, which are both logarithms of probability ratios.
RERANK_BY = ("sum", "itm", "odds")
_QUERIES = 1024  # number of queries searched at a time
# As in LAVIS; below every similarity plus logit.
UNRANKED = -100.0

Scores = npt.NDArray[np.float32]


@dataclass(kw_only=True)
class RerankOptions:
    """Keys of ``run`` that `compute_sim_matrix` reads."""

    k_test: int = option(
        doc="candidates re-ranked with ITM in retrieval; 0: ITC only", source="LAVIS", low=0
    )
    rerank_by: str = option(
        "sum",
        "retrieval: order candidates by ITC similarity plus ITM logit, by the logit, or by ITC's "
        "logit plus ITM's log-odds",
        source="LAVIS, MAFA F",
        choices=RERANK_BY,
    )
    retrieval_max_txt_len: int = option(
        MAX_TOKENS, "retrieval: tokens at which captions are cut", source="LAVIS", low=2
    )


@torch.inference_mode()
def compute_sim_matrix(
    backbone: Backbone,
    data_loader: Any,
    k_test: int,
    by: str = "sum",
    max_tokens: int = MAX_TOKENS,
) -> tuple[Scores, Scores]:
    """Return the scores of all texts for every image and vice versa, for LAVIS's retrieval task.

    For each query, the ``k_test`` candidates with the highest ITC similarity get the score named by
    ``by``, and all others a lower constant. With 0, all scores are ITC similarities. Ranks share
    the work of matching, but each must read the whole split.

    Args:
        data_loader: loader of a LAVIS retrieval evaluation set (``text``, ``image``).
        k_test: number of candidates to re-rank, at most all of them.
        by: ``sum``, ``itm`` or ``odds``, see `RERANK_BY`.
        max_tokens: number of tokens at which captions are cut.

    Returns:
        ``(num_images, num_texts)`` and ``(num_texts, num_images)`` float32, on all ranks.
    """
    images, texts = encode_split(backbone, data_loader, max_tokens)
    (scores,) = rerank(backbone, images, texts, k_test, [by])
    return scores


@torch.inference_mode()
def rerank(
    backbone: Backbone,
    images: Images,
    texts: Texts,
    k_test: int,
    orders: Sequence[str],
) -> list[tuple[Scores, Scores]]:
    """Return the scores of `compute_sim_matrix` for encoded images and texts, in several orders.

    A pair that is a candidate of both its image and its text is matched once.

    Args:
        orders: names in `RERANK_BY`.

    Raises:
        ValueError: if an order is not in `RERANK_BY`.
    """
    for by in orders:
        if by not in RERANK_BY:
            raise ValueError(f"rerank_by is {by!r}, expected one of {', '.join(RERANK_BY)}")
    assert images.features is not None and texts.features is not None
    sim = backbone.similarity(images.features, texts.features).float()
    if k_test == 0:
        return [(sim.cpu().numpy(), sim.t().cpu().numpy()) for _ in orders]
    sim_i2t, text_of = _best_candidates(sim, k_test)
    sim_t2i, image_of = _best_candidates(sim.t(), k_test)
    size = sim.shape
    del sim
    # Numbered image by image, so that the pairs of an image are adjacent.
    of_images = torch.arange(size[0])[:, None] * size[1] + text_of
    of_texts = image_of * size[1] + torch.arange(size[1])[:, None]
    pairs, row = torch.unique(
        torch.cat([of_images.flatten(), of_texts.flatten()]), return_inverse=True
    )
    no, yes = _shared_logits(backbone, images, texts, pairs)[row].unbind(1)
    weight = {"sum": 1.0, "itm": 0.0, "odds": 1 / float(backbone.temperature)}
    found = []
    for by in orders:
        matched = yes - no if by == "odds" else yes
        i2t, t2i = torch.split(matched, [text_of.numel(), image_of.numel()])
        of_image = _scores(size[1], text_of, i2t.view_as(sim_i2t) + weight[by] * sim_i2t)
        of_text = _scores(size[0], image_of, t2i.view_as(sim_t2i) + weight[by] * sim_t2i)
        found.append((of_image, of_text))
    return found


def encode_split(
    backbone: Backbone, data_loader: Any, max_tokens: int = MAX_TOKENS
) -> tuple[Images, Texts]:
    """Encode a whole evaluation split, with the embeddings of images on the CPU."""
    texts = ManyPairs(backbone).encode_texts(data_loader.dataset.text, max_length=max_tokens)
    embeds, features = [], []
    for samples in progress(data_loader, "encoding images", leave=False):
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


def _best_candidates(sim: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return similarities and indices ``(Q, k)`` of the best candidates of Q queries, on the CPU.

    All ranks must call it; they get rank 0's, because rounding may differ between ranks.

    Args:
        sim: ``(Q, C)``.
        k: number of candidates, clipped to C.
    """
    k = min(k, sim.shape[1])
    found = [part.topk(k, dim=1) for part in torch.split(sim, _QUERIES)]
    values, numbers = (torch.cat(parts) for parts in zip(*found, strict=True))
    if get_world_size() > 1:
        dist.broadcast(values, src=0)
        dist.broadcast(numbers, src=0)
    return values.cpu(), numbers.cpu()


def _shared_logits(backbone: Backbone, images: Images, texts: Texts, pairs: Tensor) -> Tensor:
    """Return the logits ``(P, 2)`` of pairs on the CPU, sharing the work among ranks, and show a
    progress bar.

    A pair's number is ``image * num_texts + text``. Every rank matches an equal share of the pairs
    and gets the logits of all.
    """
    count, world = len(texts.ids), get_world_size()
    parts = list(pairs.tensor_split(world))
    mine = parts[get_rank()]
    with progress(desc="re-ranking", total=len(mine), unit=" pairs", leave=False) as bar:
        matching = ManyPairs(backbone, bar.update)
        logits = matching.match(images, texts, mine // count, mine % count)
    if world > 1:
        begin = sum(map(len, parts[: get_rank()]))
        own, logits = logits, logits.new_zeros(len(pairs), 2)
        logits[begin : begin + len(own)] = own
        dist.all_reduce(logits)
    return logits.cpu()


def _scores(candidates: int, ranked: Tensor, scores: Tensor) -> Scores:
    below = min(UNRANKED, float(scores.min()) - 1 if scores.numel() else 0.0)
    table = torch.full((len(ranked), candidates), below)
    filled: Scores = table.scatter_(1, ranked, scores).numpy()
    return filled
