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

from lavis_mafa.algorithm.backbone import Backbone, Images, Texts
from lavis_mafa.models.inference.many_pairs import ManyPairs

MAX_TOKENS = 35  # LAVIS's length for retrieval captions
QUERIES = 1024  # whose candidates are looked for at once
UNRANKED = -100.0


@torch.inference_mode()
def compute_sim_matrix(
    backbone: Backbone, data_loader: Any, k_test: int, pairs_per_pass: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of every image for every text and the reverse, for LAVIS's retrieval task.

    For each query the ``k_test`` candidates of highest ITC similarity get similarity plus ITM
    logit, all others `UNRANKED`. With 0 the scores are ITC similarities. Several ranks share the
    pairs; each must read the whole split.

    Args:
        data_loader: over a LAVIS retrieval evaluation set (``text``, ``image``).
        k_test: candidates to re-rank; clipped to what there is.
        pairs_per_pass: pairs that go through the fusion encoder at once; None: what suits the
            device.

    Returns:
        ``(num_images, num_texts)`` and ``(num_texts, num_images)`` float32, on all ranks.
    """
    return rerank(backbone, *encode_split(backbone, data_loader), k_test, pairs_per_pass)


@torch.inference_mode()
def rerank(
    backbone: Backbone,
    images: Images,
    texts: Texts,
    k_test: int,
    pairs_per_pass: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`compute_sim_matrix` of what is encoded already.

    A pair that both its image and its text ask for is matched once.
    """
    assert images.features is not None and texts.features is not None
    sim = backbone.similarity(images.features, texts.features).float()
    if k_test == 0:
        return sim.cpu().numpy(), sim.t().cpu().numpy()
    sim_i2t, text_of = best_candidates(sim, k_test)
    sim_t2i, image_of = best_candidates(sim.t(), k_test)
    size = sim.shape
    del sim
    # Numbered image by image, so that the pairs of an image stand together.
    asked_by_image = torch.arange(size[0])[:, None] * size[1] + text_of
    asked_by_text = image_of * size[1] + torch.arange(size[1])[:, None]
    pairs, row = torch.unique(
        torch.cat([asked_by_image.flatten(), asked_by_text.flatten()]), return_inverse=True
    )
    logits = _shared_logits(backbone, images, texts, pairs, pairs_per_pass)[row]
    i2t, t2i = logits.split([text_of.numel(), image_of.numel()])
    return (
        _scores(size[1], text_of, i2t.view_as(sim_i2t) + sim_i2t),
        _scores(size[0], image_of, t2i.view_as(sim_t2i) + sim_t2i),
    )


def encode_split(backbone: Backbone, data_loader: Any) -> tuple[Images, Texts]:
    """Encode a whole evaluation split; embeddings of images stay on the CPU."""
    texts = ManyPairs(backbone).encode_texts(data_loader.dataset.text, max_length=MAX_TOKENS)
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
    backbone: Backbone,
    images: Images,
    texts: Texts,
    image_of: Tensor,
    text_of: Tensor,
    pairs_per_pass: int | None = None,
) -> Tensor:
    """ITM logit of class 1 ``(P,)`` of the given pairs; a bar shows how far it is."""
    with tqdm(
        total=len(image_of),
        desc="re-ranking",
        unit=" pairs",
        disable=not is_main_process(),
        leave=False,
        mininterval=1.0,
    ) as bar:
        matching = ManyPairs(backbone, pairs_per_pass, bar.update)
        return matching.match(images, texts, image_of, text_of)[:, 1]


def best_candidates(sim: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Similarities and numbers ``(Q, k)`` of the best candidates of Q queries, on the CPU.

    All ranks must call it; they get those of rank 0, because rounding may differ between them.

    Args:
        sim: ``(Q, C)``.
        k: clipped to C.
    """
    k = min(k, sim.shape[1])
    found = [part.topk(k, dim=1) for part in sim.split(QUERIES)]
    values, numbers = (torch.cat(parts) for parts in zip(*found, strict=True))
    if get_world_size() > 1:
        dist.broadcast(values, src=0)
        dist.broadcast(numbers, src=0)
    return values.cpu(), numbers.cpu()


def _shared_logits(
    backbone: Backbone, images: Images, texts: Texts, pairs: Tensor, pairs_per_pass: int | None
) -> Tensor:
    """Logits ``(P,)`` of pairs numbered as ``image * num_texts + text``, on the CPU of all ranks,
    each of which matches as many."""
    count, world = len(texts.ids), get_world_size()
    parts = list(pairs.tensor_split(world))
    mine = parts[get_rank()]
    logits = itm_scores(backbone, images, texts, mine // count, mine % count, pairs_per_pass)
    if world > 1:
        begin = sum(map(len, parts[: get_rank()]))
        own, logits = logits, logits.new_zeros(len(pairs))
        logits[begin : begin + len(own)] = own
        dist.all_reduce(logits)
    return logits.cpu()


def _scores(candidates: int, ranked: Tensor, scores: Tensor) -> np.ndarray:
    table = torch.full((len(ranked), candidates), UNRANKED)
    return table.scatter_(1, ranked, scores).numpy()


def _progress(what: Iterable[Any], name: str) -> Iterable[Any]:
    return tqdm(what, desc=name, disable=not is_main_process(), leave=False, mininterval=1.0)
