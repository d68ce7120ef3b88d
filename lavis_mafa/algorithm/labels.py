"""Soft labels of the image-text contrastive loss (ITC).

A soft label is a pure function ``(side, soft) -> labels`` of one direction of ITC and the settings
`SoftLabels`; register it in `SOFT_LABELS` to use its name as ``model.mafa.soft_labels.type``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.algorithm.registry import MAFA, Registry


def labels_from_positives(positives: Tensor) -> Tensor:
    """Return labels spread evenly over each anchor's positives (MAFA 4.1: 1, or 0.5 / 0.5).

    Args:
        positives: ``(B, N)`` bool, at least one per row; or weights from 0 to 1, to which the
            labels are proportional.

    Returns:
        ``(B, N)`` float32, rows sum to 1.

    Raises:
        ValueError: if an anchor has no positive. On a GPU, where this check would wait for the
            device, its labels are NaN instead.
    """
    # `sum` of bool would first convert all elements to integers.
    whole = positives.dtype == torch.bool
    counts = (positives.count_nonzero(dim=1) if whole else positives.sum(dim=1))[:, None]
    if counts.device.type == "cpu" and bool((counts == 0).any()):
        rows = torch.nonzero(counts.squeeze(1) == 0).flatten().tolist()
        raise ValueError(f"every anchor needs a positive; anchors without one: {rows}")
    return positives / counts


def smooth(labels: Tensor, alpha: float, dropped: Tensor | None = None) -> Tensor:
    """Return smoothed labels ``(1 - alpha) * labels + alpha / N`` (S-ITC, MAFA eq. 5).

    Args:
        labels: ``(B, N)``, rows sum to 1.
        alpha: mixing parameter, 0 to 1.
        dropped: ``(B, N)`` bool, candidates left out; the others share the uniform part.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    if dropped is None:
        return (1.0 - alpha) * labels + alpha / labels.shape[1]
    present = (~dropped).float()
    return (1.0 - alpha) * labels + alpha * present / present.sum(dim=1, keepdim=True)


def distilled_labels(sim: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Return a model's distribution over the candidates, detached, as labels (ALBEF eq. 6).

    Args:
        sim: ``(B, N)`` of a momentum encoder, divided by the temperature.
        dropped: ``(B, N)`` bool, candidates left out.
    """
    return torch.softmax(without(sim.detach(), dropped), dim=1)


def mix(labels: Tensor, soft: Tensor, alpha: float) -> Tensor:
    """Return the labels of distillation, ``(1 - alpha) * labels + alpha * soft`` (ALBEF eq. 6).

    Args:
        labels, soft: ``(B, N)``, rows sum to 1.
        alpha: 0 to 1.
    """
    return (1.0 - alpha) * labels + alpha * soft


def without(sim: Tensor, dropped: Tensor | None) -> Tensor:
    """Return similarities with -inf for dropped candidates, so that a softmax ignores them."""
    return sim if dropped is None else sim.masked_fill(dropped, float("-inf"))


def consistency_loss(sim: Tensor, other_direction: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Return ``E[KL(sg(q) || p)]`` of GRIT-VLP eq. 6 for one direction.

    p is the distribution of an image (or text) over the candidates, and q the distribution of its
    own partner in the other direction. q is the target and passes no gradient.

    Args:
        sim, other_direction: ``(B, N)``, divided by the temperature, with the same anchors (pair b
            in row b) and the same numbering of candidates.
        dropped: ``(B, N)`` bool, candidates left out of both.
    """
    log_p = F.log_softmax(without(sim, dropped), dim=1)
    log_q = F.log_softmax(without(other_direction, dropped), dim=1).detach()
    terms = log_q.exp() * (log_q - log_p)
    if dropped is not None:
        terms = terms.masked_fill(dropped, 0.0)
    return terms.sum(dim=1).mean()


@dataclass(frozen=True)
class ItcSide:
    """One direction of ITC: B anchors of one modality, N candidates of the other.

    Attributes:
        sim: ``(B, N)`` similarities divided by the temperature.
        other: ``(B, N)``, the similarities of the anchors' partners in the other direction.
        positives: ``(B, N)`` bool, known and mined positives; with ``connections.labels:
            probability`` weights from 0 to 1.
        dropped: ``(B, N)`` bool, candidates left out of the loss; None: none.
        soft_sim: ``(B, N)`` similarities from momentum encoders; None without them.
        momentum_weight: share of the labels that comes from momentum encoders, after its ramp.
        temperature: the temperature of ITC.
        intra_modal_of: returns similarities ``(B, C)`` of the anchors to samples of their own
            modality, see `intra_modal`; None: unknown.
    """

    sim: Tensor
    other: Tensor
    positives: Tensor
    dropped: Tensor | None = None
    soft_sim: Tensor | None = None
    momentum_weight: float = 0.0
    temperature: Tensor | float = 1.0
    intra_modal_of: Callable[[], Tensor] | None = None

    def intra_modal(self) -> Tensor:
        """Return cosine similarities ``(B, C)`` of the anchors to samples of their own modality.

        Column c belongs to the image (or text) of the pair whose text (or image) is candidate c;
        the momentum queue has no columns. The first call in a step gathers over ranks.

        Raises:
            ValueError: if they are unknown, because there is no training step.
        """
        if self.intra_modal_of is None:
            raise ValueError(
                "these labels need intra-modal similarities, which are known in a training step "
                "only (run_step)"
            )
        return self.intra_modal_of()

    def one_hot(self) -> Tensor:
        """Return labels ``(B, N)`` spread evenly over each anchor's positives."""
        return labels_from_positives(self.positives)

    def smoothed(self, alpha: float, labels: Tensor | None = None) -> Tensor:
        """Return labels (None: `one_hot`) mixed with a share ``alpha`` of the uniform
        distribution."""
        labels = self.one_hot() if labels is None else labels
        return smooth(labels, alpha, self.dropped) if alpha else labels


_SoftLabel = Callable[..., Tensor]  # (side, soft) or (side, soft, own=settings)


@dataclass(frozen=True)
class _LabelTraits:
    """What the step and the model must know of a soft label; keyword arguments of ``register``.

    Attributes:
        needs_momentum: the model has momentum encoders, and ``side.soft_sim`` their similarities.
            Such labels are soft from the first step on, see `SoftLabels.active`.
        extra_loss: a function with the same arguments, whose result ITC adds in each direction.
    """

    needs_momentum: bool = False
    extra_loss: _SoftLabel | None = None


SOFT_LABELS: Registry[_SoftLabel] = Registry("soft label", MAFA, _LabelTraits)


@dataclass(frozen=True)
class SoftLabels(Checked):
    """Soft labels of the image-text contrastive loss (ITC).

    The field ``start_epoch`` does not apply to labels from momentum encoders: they start in the
    first step, with a weight that grows over ``model.ramp_epochs``.
    """

    type: str = option(
        "smoothed",
        "one-hot labels, S-ITC, GRIT-VLP's consistency loss, pseudo-positives (PCME++), "
        "intra-modal similarities (SoftCLIP) or momentum distillation",
        source="MAFA 4.2, GRIT-VLP 4.2, PCME++, SoftCLIP, ALBEF 3.4",
        choices=SOFT_LABELS,
    )
    alpha: float = option(
        0.5, "share of the uniform distribution (BLIP-2: 0.2)", source="MAFA 4.2", low=0, high=1
    )
    weight: float = option(
        0.2, "lambda of the consistency loss", source="GRIT-VLP 4.2", low=0, also=("lambda",)
    )
    start_epoch: int | None = option(
        None, "first epoch with soft labels; null: the first grouped one", source="MAFA 4.2", low=0
    )
    label_smoothing: float = option(
        0.0,
        "share of the uniform distribution where alpha does not apply (BLIP-2: 0.1)",
        source="BLIP-2 in LAVIS",
        low=0,
        high=1,
    )

    @property
    def needs_momentum(self) -> bool:
        """Whether the labels come from momentum encoders."""
        return bool(SOFT_LABELS.entry(self.type).traits.needs_momentum)

    def active(self, epoch: int, grouped: bool) -> bool:
        """Return whether labels are soft in a mini-batch of an epoch."""
        if self.needs_momentum:
            return True
        return grouped if self.start_epoch is None else epoch >= self.start_epoch


@SOFT_LABELS.register("one_hot", source="MAFA 4.1")
def _one_hot(side: ItcSide, soft: SoftLabels) -> Tensor:
    """Spread labels over positives, with ``label_smoothing``."""
    return side.smoothed(soft.label_smoothing)


@SOFT_LABELS.register("smoothed", source="MAFA eq. 5")
def _smoothed(side: ItcSide, soft: SoftLabels) -> Tensor:
    """Smooth labels by ``alpha`` (S-ITC)."""
    return side.smoothed(soft.alpha)


def _weighted_consistency(side: ItcSide, soft: SoftLabels) -> Tensor:
    """Return the consistency loss times its weight (GRIT-VLP eq. 6).

    It is not mixed into the labels, which would lower the weight of the own pair.
    """
    return soft.weight * consistency_loss(side.sim, side.other, side.dropped)


@SOFT_LABELS.register("consistency", source="GRIT-VLP eq. 6", extra_loss=_weighted_consistency)
def _consistency(side: ItcSide, soft: SoftLabels) -> Tensor:
    """Use one-hot labels; ITC adds the consistency loss as a term of its own."""
    return side.smoothed(soft.label_smoothing)


@dataclass(frozen=True)
class _PseudoPositives(Checked):
    """Settings of the pseudo-positives."""

    weight: float = option(
        0.1,
        "label of a pseudo-positive relative to a positive's",
        source="PCME++ 2.3",
        low=0,
        high=1,
    )


@SOFT_LABELS.register("pseudo_positives", settings=_PseudoPositives, source="PCME++ 2.3")
def _pseudo_positives(side: ItcSide, soft: SoftLabels, own: _PseudoPositives) -> Tensor:
    """Give a label to candidates at least as similar to an anchor as one of its positives.

    Chun, ICLR 2024, compares distances of probabilistic embeddings and adds a loss on
    pseudo-positives; here similarities of the model itself are compared, and the weight of that
    loss is the pseudo-positives' label relative to the positives'. Positives are the candidates
    with the largest weight; with ``connections.labels: probability``, a judged candidate keeps its
    weight if that is larger.

    Args:
        side: a direction of ITC.
        soft: settings, of which ``label_smoothing`` is used.
        own: settings.
    """
    weights = side.positives.float()
    full = weights == weights.amax(dim=1, keepdim=True)
    sim = side.sim.detach().float()
    least = sim.masked_fill(~full, float("inf")).amin(dim=1, keepdim=True)
    near = sim >= least
    if side.dropped is not None:
        near = near & ~side.dropped
    labels = labels_from_positives(torch.maximum(weights, own.weight * near))
    return side.smoothed(soft.label_smoothing, labels)


@dataclass(frozen=True)
class _SoftClip(Checked):
    """Settings of the labels from intra-modal similarities."""

    weight: float = option(
        0.5, "share of the intra-modal distribution in the labels", source="SoftCLIP", low=0, high=1
    )
    temperature: float = option(
        0.07, "temperature of the intra-modal similarities", source="lavis_mafa", low=0, above=True
    )


@SOFT_LABELS.register("softclip", settings=_SoftClip, source="SoftCLIP")
def _softclip(side: ItcSide, soft: SoftLabels, own: _SoftClip) -> Tensor:
    """Mix one-hot labels with the anchors' similarities within their own modality.

    Gao et al., AAAI 2024: the labels of image i over texts j are ``softmax_j(image_i . image_j /
    temperature)``, and the labels of text i over images j use text similarities. The similarities
    come from the model in training; the paper uses features of detected objects and attribute tags.
    Its re-weighting of negatives and its symmetric KL divergence are left out. Candidates of a
    momentum queue get no share.

    Args:
        side: a direction of ITC.
        soft: settings, of which ``label_smoothing`` is used.
        own: settings.
    """
    similar = side.intra_modal().detach().float() / own.temperature
    missing = side.sim.shape[1] - similar.shape[1]
    similar = F.pad(similar, (0, missing), value=float("-inf"))
    distribution = torch.softmax(without(similar, side.dropped), dim=1)
    return mix(side.smoothed(soft.label_smoothing), distribution, own.weight)


@SOFT_LABELS.register("momentum", source="ALBEF eq. 6", needs_momentum=True)
def _momentum(side: ItcSide, soft: SoftLabels) -> Tensor:
    """Mix one-hot labels with the momentum encoders' distribution."""
    labels = side.smoothed(soft.label_smoothing)
    if side.soft_sim is None:
        return labels
    return mix(labels, distilled_labels(side.soft_sim, side.dropped), side.momentum_weight)


def over_all(mark: Tensor, sim: Tensor, queued: Tensor | None = None) -> Tensor:
    """Extend a mark ``(B, C)`` of the mini-batches' candidates to all ``(B, N)``.

    Args:
        mark: bool or weights.
        sim: ``(B, N)``; only its shape is used.
        queued: ``(B, Q)`` mark of the queue; None marks none of it.
    """
    if queued is not None:
        return torch.cat([mark, queued.to(mark.dtype)], dim=1)
    missing = sim.shape[1] - mark.shape[1]
    return F.pad(mark, (0, missing)) if missing else mark
