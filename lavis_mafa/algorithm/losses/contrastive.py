"""Image-text contrastive loss (ITC).

Similarities are ``(B, N)``: B anchors of this rank, N candidates of the other modality; they are
already divided by the temperature. Labels are ``(B, N)`` distributions over the candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lavis_mafa.algorithm.itc_forms import contrastive_loss
from lavis_mafa.algorithm.labels import SOFT_LABELS, ItcSide, over_all
from lavis_mafa.algorithm.step_context import StepContext

__all__ = ["contrastive_loss", "itc"]


def _sides(step: StepContext) -> list[ItcSide]:
    """Return both directions of ITC, with the candidates as mining has relabelled them."""
    compared, batch = step.compared, step.batch
    of_images = step.i2t, compared.i2t, compared.t2i, compared.soft_i2t
    of_texts = step.t2i, compared.t2i, compared.i2t, compared.soft_t2i
    sides = []
    for number, (found, sim, other, soft_sim) in enumerate((of_images, of_texts)):
        positives, dropped = found.itc_targets(step.settings.connections)
        sides.append(
            ItcSide(
                sim,
                other,
                over_all(positives, sim, compared.queued_positives),
                None if dropped is None else over_all(dropped, sim, compared.queued_dropped),
                soft_sim,
                compared.alpha,
                batch.temperature,
                # A function, because the first call gathers over ranks.
                lambda number=number: batch.intra_modal[number],  # type: ignore[misc]
            )
        )
    return sides


def itc(step: StepContext) -> Tensor:
    """Return ITC with the form and labels of the settings, averaged over both directions."""
    soft, samples = step.settings.soft_labels, step.batch.samples
    active = soft.active(samples.get("epoch", 0), bool(samples.get("grouped", True)))
    label = step.soft_label if active else SOFT_LABELS["one_hot"]
    terms = []
    for side in _sides(step):
        terms.append(step.form(side, label(side, soft)))
        if active and step.extra_loss is not None:
            terms.append(step.extra_loss(side, soft))
    return torch.stack(terms).sum() / 2
