"""Image-text contrastive loss (ITC).

Similarities are ``(B, N)``: B anchors of this rank, N candidates of the other modality; they are
divided by the temperature already. Labels are ``(B, N)`` distributions over the candidates.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lavis_mafa.algorithm.context import Compared
from lavis_mafa.algorithm.itc_forms import contrastive_loss
from lavis_mafa.algorithm.labels import SOFT_LABELS, ItcSide, over_all
from lavis_mafa.algorithm.mining import Connections
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step_context import StepContext

__all__ = ["contrastive_loss", "itc"]


def _itc_sides(step: StepContext) -> tuple[ItcSide, ItcSide]:
    """Return both directions of ITC, with what mining made of their candidates."""
    compared, batch = step.compared, step.batch
    images, texts = (
        _side(compared, found, step.settings, *sims)
        for found, sims in (
            (step.i2t, (compared.i2t, compared.t2i, compared.soft_i2t)),
            (step.t2i, (compared.t2i, compared.i2t, compared.soft_t2i)),
        )
    )
    return (
        replace(images, temperature=batch.temperature, intra_modal_of=lambda: batch.intra_modal[0]),
        replace(texts, temperature=batch.temperature, intra_modal_of=lambda: batch.intra_modal[1]),
    )


def _side(
    compared: Compared,
    found: Connections,
    settings: StepSettings,
    sim: Tensor,
    other: Tensor,
    soft_sim: Tensor | None,
) -> ItcSide:
    positives, dropped = found.itc_targets(settings.connections)
    return ItcSide(
        sim,
        other,
        over_all(positives, sim, compared.queued_positives),
        None if dropped is None else over_all(dropped, sim, compared.queued_dropped),
        soft_sim,
        compared.alpha,
    )


def itc(step: StepContext) -> Tensor:
    """Return ITC in the form and with the labels of the settings, mean of both directions."""
    soft, active = step.settings.soft_labels, step.soft_labels_active
    label = step.soft_label if active else SOFT_LABELS["one_hot"]
    total = step.compared.i2t.new_zeros(())
    for side in _itc_sides(step):
        total = total + step.form(side, label(side, soft)) / 2
        if active and step.extra_loss is not None:
            total = total + step.extra_loss(side, soft) / 2
    return total
