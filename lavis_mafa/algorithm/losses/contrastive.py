"""Image-text contrastive loss (ITC).

Similarities are ``(B, N)``: B anchors of this rank, N candidates of the other modality; they are
divided by the temperature already. Labels are ``(B, N)`` distributions over the candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lavis_mafa.algorithm.context import Compared, MiniBatch, StepContext
from lavis_mafa.algorithm.itc_forms import ITC_LOSSES, contrastive_loss
from lavis_mafa.algorithm.labels import SOFT_LABELS, ItcSide, over_all
from lavis_mafa.algorithm.mining import Connections
from lavis_mafa.algorithm.settings import StepSettings, function_or_object

__all__ = ["contrastive_loss", "itc", "itc_labels", "itc_sides", "labels_of"]


def itc_sides(
    compared: Compared,
    i2t: Connections,
    t2i: Connections,
    settings: StepSettings,
    batch: MiniBatch | None = None,
) -> tuple[ItcSide, ItcSide]:
    """Return both directions of ITC, with what mining made of their candidates.

    Args:
        batch: the mini-batch that was compared; None: intra-modal similarities and the temperature
            are unknown.
    """
    images, texts = (
        _side(compared, found, settings, *sims)
        for found, sims in (
            (i2t, (compared.i2t, compared.t2i, compared.soft_i2t)),
            (t2i, (compared.t2i, compared.i2t, compared.soft_t2i)),
        )
    )
    if batch is None:
        return images, texts
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


def labels_of(
    side: ItcSide, settings: StepSettings, active: bool, objects: Mapping[str, Any] | None = None
) -> Tensor:
    """Return the labels ``(B, N)`` of one direction; one-hot until soft labels are ``active``.

    Args:
        objects: see `lavis_mafa.algorithm.settings.build_objects`.
    """
    entry = SOFT_LABELS.entry(settings.soft_labels.type if active else "one_hot")
    labels: Tensor = function_or_object(entry, settings, objects or {})(side, settings.soft_labels)
    return labels


def itc_labels(
    compared: Compared, i2t: Connections, t2i: Connections, settings: StepSettings, active: bool
) -> list[tuple[Tensor, Tensor | None]]:
    """Return labels ``(B, N)`` of ITC and dropped candidates ``(B, N)`` or None, images first.

    Args:
        compared: similarities, and with momentum encoders theirs.
        i2t, t2i: what was found in both directions.
        settings: see `StepSettings`.
        active: whether labels are soft by now, see `SoftLabels.active`.
    """
    sides = itc_sides(compared, i2t, t2i, settings)
    return [(labels_of(side, settings, active), side.dropped) for side in sides]


def itc(step: StepContext) -> Tensor:
    """Return ITC in the form and with the labels of the settings, mean of both directions."""
    active = step.soft_labels_active
    entry = SOFT_LABELS.entry(step.settings.soft_labels.type)
    extra_loss = entry.traits.extra_loss
    form = step.function_or_object(ITC_LOSSES.entry(step.settings.itc_loss))
    total = step.compared.i2t.new_zeros(())
    for side in itc_sides(step.compared, step.i2t, step.t2i, step.settings, step.batch):
        labels = labels_of(side, step.settings, active, step.objects)
        total = total + form(side, labels) / 2
        if active and extra_loss is not None:
            own = {} if entry.settings is None else {"own": step.settings.own_of(entry)}
            total = total + extra_loss(side, step.settings.soft_labels, **own) / 2
    return total
