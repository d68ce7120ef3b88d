"""TCL's two objectives within a modality, beside ITC (Yang et al., "Vision-Language Pre-Training
with Triple Contrastive Learning", CVPR 2022; what its equations leave open is from its authors'
public code).

Everything here is for one modality; TCL takes the mean over images and texts, and the mean of ITC,
IMC and LMI. Features are normalised and ``(B, E)``; similarities are computed in float32 whatever
the precision around.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.losses.contrastive import contrastive_loss, labels_from_positives


def intra_modal_loss(
    features: Tensor, targets: Tensor, positives: Tensor, temperature: Tensor | float
) -> Tensor:
    """IMC: a view's feature finds the momentum feature of another view of its own sample (L_imc).

    InfoNCE with hard labels: TCL distils ITC only. A text's other view is the text itself, encoded
    again.

    Args:
        features: ``(B, E)`` of the anchors, the only ones trained.
        targets: ``(N, E)`` of a momentum encoder, of other views of the same modality: the C
            candidates of the mini-batches first, then what is queued, if anything. Detached here.
        positives: ``(B, C)`` bool, which candidates show an anchor's own sample; several share the
            label evenly. All that is queued is negative.
        temperature: what similarities are divided by, > 0; trained if it asks for gradients.

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
    return contrastive_loss(_similarity(features, targets, temperature), labels)


def local_loss(
    features: Tensor,
    regions: Tensor,
    temperature: Tensor | float,
    present: Tensor | None = None,
    same: Tensor | None = None,
) -> Tensor:
    """LMI: a sample's global feature finds each of its own regions among others' (L_lmi).

    For every region of an anchor's own, InfoNCE against the regions of all other samples of the
    mini-batch; the anchor's other regions are left out. Mean over an anchor's regions, then over
    anchors. Without another sample the loss is 0.

    Args:
        features: ``(B, E)`` of the anchors' first tokens, the only ones trained.
        regions: ``(B, M, E)``, normalised local features (see `local_features`) of a momentum
            encoder, of the samples' other views; for images pooled (`pool_patches`). Detached here.
        temperature: what similarities are divided by, > 0; trained if it asks for gradients.
        present: ``(B, M)``, 0 for regions that are padding, which count nowhere; None: all are
            there. An anchor without a region takes no part as an anchor.
        same: ``(B, B)`` bool, samples that are no negatives of each other, such as those of one
            image; always true of a sample and itself.

    Raises:
        ValueError: if features and regions are not of the same samples.
    """
    count, places = regions.shape[:2]
    if len(features) != count:
        raise ValueError(
            f"features are of {len(features)} samples and regions of {count}; anchor b's own "
            "regions are those of row b"
        )
    there = regions.new_ones(count, places, dtype=torch.bool) if present is None else present.bool()
    # Zeros: what stands in padding may be anything, and 0 * NaN is NaN.
    regions = regions.masked_fill(~there[:, :, None], 0.0)
    sim = _similarity(features, regions.flatten(0, 1), temperature).unflatten(1, (count, places))

    own = torch.eye(count, dtype=torch.bool, device=sim.device)
    negative = ~(own if same is None else own | same)[:, :, None] & there[None]
    others = sim.masked_fill(~negative, float("-inf")).flatten(1).logsumexp(dim=1)
    found = sim.diagonal().t()  # (B, M)
    losses = F.softplus(others[:, None] - found)  # -log(e^found / (e^found + e^others))

    regions_of = there.sum(dim=1)
    of_anchor = (losses * there).sum(dim=1) / regions_of.clamp(min=1)
    return of_anchor.sum() / (regions_of > 0).sum().clamp(min=1)


def local_features(embeds: Tensor, projection: Callable[[Tensor], Tensor]) -> Tensor:
    """Normalised features ``(N, S - 1, E)`` of every token but the first.

    TCL projects patches and words by the heads of the first token.

    Args:
        embeds: ``(N, S, D)`` of an encoder.
        projection: from ``(N, S - 1, D)`` to ``(N, S - 1, E)``.
    """
    return F.normalize(projection(embeds[:, 1:]).float(), dim=-1)


def pool_patches(patches: Tensor) -> Tensor:
    """Means of the features of neighbouring patches, for larger regions and fewer of them.

    As in TCL a window's side is the root of the grid's, rounded down: 16 x 16 patches (256 px)
    become 4 x 4 regions of 4 x 4 patches. Where windows do not fit the grid they overlap, so that
    no patch is lost. The means are not normalised again.

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
            f"{patches.shape[1]} patches do not make a square grid; give those of a square image, "
            "without its first token"
        )
    grid = patches.transpose(1, 2).unflatten(2, (side, side))
    return F.adaptive_avg_pool2d(grid, side // isqrt(side)).flatten(2).transpose(1, 2)


def _similarity(features: Tensor, targets: Tensor, temperature: Tensor | float) -> Tensor:
    """``(B, N)`` of features ``(B, E)`` and targets ``(N, E)``, which get no gradient."""
    # The temperature's gradient suffers in lower precision.
    with torch.autocast(features.device.type, enabled=False):
        return features.float() @ targets.detach().float().t() / temperature
