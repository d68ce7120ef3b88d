"""The two losses within a modality that TCL adds to ITC.

Yang et al., "Vision-Language Pre-Training with Triple Contrastive Learning", CVPR 2022; details
that its equations leave open follow its authors' public code.

The pure functions are for one modality; TCL takes the mean over images and texts, and the mean of
ITC, IMC and LMI. Features are normalised and ``(B, E)``; similarities are computed in float32, also
under autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.context import MomentumView
from lavis_mafa.algorithm.labels import labels_from_positives, over_all
from lavis_mafa.algorithm.losses.contrastive import contrastive_loss
from lavis_mafa.algorithm.step_context import StepContext


def _intra_modal_loss(
    features: Tensor,
    targets: Tensor,
    positives: Tensor,
    temperature: Tensor | float,
    dropped: Tensor | None = None,
) -> Tensor:
    """Return IMC (L_imc): match a feature with momentum features of its sample's other view.

    It is InfoNCE with hard labels: TCL distils only ITC. A text's other view is the text itself,
    encoded a second time.

    Args:
        features: ``(B, E)`` of the anchors; only these are trained.
        targets: ``(N, E)`` momentum features of other views, in the same modality: the C candidates
            of the mini-batches, then the queue's, if there is one. They get no gradient.
        positives: ``(B, C)`` bool, which candidates show an anchor's own sample; several share the
            label evenly. Queued targets beyond C are negatives.
        temperature: divides similarities, > 0; trained if it requires a gradient.
        dropped: ``(B, N)`` bool, targets that are left out; None: none.

    Raises:
        ValueError: if there are fewer targets than candidates, or an anchor has no positive.
    """
    queued = len(targets) - positives.shape[1]
    if queued < 0:
        raise ValueError(
            f"positives are of {positives.shape[1]} candidates, but targets has {len(targets)} "
            "rows; give the candidates' momentum features first, then the queue's"
        )
    labels = labels_from_positives(F.pad(positives, (0, queued)))
    return contrastive_loss(_similarity(features, targets, temperature), labels, dropped)


def _local_loss(
    features: Tensor,
    regions: Tensor,
    temperature: Tensor | float,
    present: Tensor | None = None,
    same: Tensor | None = None,
) -> Tensor:
    """Return LMI (L_lmi): match a sample's global feature with each of its own regions.

    For each of an anchor's own regions, InfoNCE has this region as positive and the regions of all
    other samples of the mini-batch as negatives; the anchor's other regions are left out. The loss
    is the mean over an anchor's regions, then over anchors; without other samples it is 0.

    Args:
        features: ``(B, E)`` of the anchors' first tokens; only these are trained.
        regions: ``(B, M, E)``, normalised local features (see `local_features`) of the samples'
            other views by a momentum encoder, pooled for images (`pool_patches`). They get no
            gradient.
        temperature: divides similarities, > 0; trained if it requires a gradient.
        present: ``(B, M)``, 0 for padding, which is ignored; None: no padding. An anchor without
            any region has no loss.
        same: ``(B, B)`` bool, samples that are not negatives of each other, such as captions of
            one image; a sample is never its own negative.

    Raises:
        ValueError: if features and regions belong to different numbers of samples.
    """
    count, places = regions.shape[:2]
    if len(features) != count:
        raise ValueError(
            f"features are of {len(features)} samples and regions of {count}; anchor b's own "
            "regions are in row b"
        )
    valid = regions.new_ones(count, places, dtype=torch.bool) if present is None else present.bool()
    # Padding may hold NaN, which a mask of 0 does not remove by multiplication.
    regions = regions.masked_fill(~valid[:, :, None], 0.0)
    sim = _similarity(features, regions.flatten(0, 1), temperature).reshape(
        len(features), count, places
    )

    own = torch.eye(count, dtype=torch.bool, device=sim.device)
    negative = ~(own if same is None else own | same)[:, :, None] & valid[None]
    others = sim.masked_fill(~negative, float("-inf")).flatten(1).logsumexp(dim=1)
    found = sim.diagonal().t()  # (B, M)
    losses = F.softplus(others[:, None] - found)  # -log(e^found / (e^found + e^others))

    regions_of = valid.sum(dim=1)
    of_anchor = (losses * valid).sum(dim=1) / regions_of.clamp(min=1)
    return of_anchor.sum() / (regions_of > 0).sum().clamp(min=1)


def local_features(embeds: Tensor, projection: Callable[[Tensor], Tensor]) -> Tensor:
    """Return normalised features ``(N, S - 1, E)`` of every token but the first.

    TCL projects patches and words with the heads of the first token.

    Args:
        embeds: ``(N, S, D)``, output of an encoder.
        projection: from ``(N, S - 1, D)`` to ``(N, S - 1, E)``.
    """
    return F.normalize(projection(embeds[:, 1:]).float(), dim=-1)


def pool_patches(patches: Tensor) -> Tensor:
    """Average the features of neighbouring patches into fewer, larger regions.

    As in TCL, the side of a region is the square root of the grid's side, rounded down: 16 x 16
    patches (256 px) become 4 x 4 regions of 4 x 4 patches. If regions do not fit the grid, they
    overlap, so that every patch counts. The means are not normalised again.

    Args:
        patches: ``(N, S, E)``, row by row of a square grid.

    Returns:
        ``(N, M, E)``.

    Raises:
        ValueError: if S patches do not make a square.
    """
    side = isqrt(patches.shape[1])
    if side == 0 or side * side != patches.shape[1]:
        raise ValueError(
            f"{patches.shape[1]} patches do not make a square grid; give a square image's, "
            "without its first token"
        )
    grid = patches.transpose(1, 2).reshape(len(patches), patches.shape[2], side, side)
    return F.adaptive_avg_pool2d(grid, side // isqrt(side)).flatten(2).transpose(1, 2)


def _similarity(features: Tensor, targets: Tensor, temperature: Tensor | float) -> Tensor:
    """Return similarities ``(B, N)`` of features ``(B, E)`` to detached targets ``(N, E)``."""
    # In float32, for the precision of the temperature's gradient.
    with torch.autocast(features.device.type, enabled=False):
        return features.float() @ targets.detach().float().t() / temperature


def imc(step: StepContext) -> Tensor:
    """Return TCL's intra-modal loss, mean of this rank's images and texts."""
    batch, view = step.batch, _view(step)
    images, texts = batch.features()
    compared, dropped = step.compared, batch.dropped
    positives = over_all(batch.positives, compared.i2t, compared.queued_positives)
    if dropped is not None:
        dropped = over_all(dropped, compared.i2t, compared.queued_dropped)
    rest = positives, batch.temperature, dropped
    of_images = _intra_modal_loss(images, view.all_images, *rest)
    of_texts = _intra_modal_loss(texts, view.all_texts, *rest)
    return (of_images + of_texts) / 2


def lmi(step: StepContext) -> Tensor:
    """Return TCL's local loss, mean of this rank's images and texts."""
    batch, view = step.batch, _view(step)
    images, texts = batch.features()
    local: Any = view.backbone  # see `FromFirstTokens.regions`
    with torch.no_grad():
        regions, words = local.regions(view.images, view.texts)
    same = batch.never_negative[:, batch.own]
    of_images = _local_loss(images, regions, batch.temperature, same=same)
    of_texts = _local_loss(texts, words, batch.temperature, view.texts.mask[:, 1:], same)
    return (of_images + of_texts) / 2


def _view(step: StepContext) -> MomentumView:
    if step.compared.momentum is None:
        raise ValueError("loss_weights imc and lmi (TCL) need soft_labels.type: momentum")
    return step.compared.momentum
