"""Forms of the image-text contrastive loss (ITC): softmax, sigmoid, debiased and noise-robust.

A form is a function ``(side, labels) -> scalar`` of one direction of ITC and its labels ``(B, N)``,
or a class whose objects are called like it; register it in `ITC_LOSSES` to use its name as
``model.mafa.itc_loss``. ITC is the mean of both directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lavis_mafa.algorithm.labels import ItcSide, without
from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.algorithm.registry import MAFA, Registry

_SMALLEST = 1e-30  # smaller sums have no normal float32 reciprocal
_LARGEST_EXPONENT = 10.0  # its exponential is still a float16


@dataclass(frozen=True)
class _ItcTraits:
    """What the step and the config check must know of a form; keyword arguments of ``register``.

    Attributes:
        soft_labels: it can use labels for candidates that are not positives.
        queue: it can use the candidates of the momentum queue.
        fixed_temperature: minimising it over the temperature gives no useful temperature.
        own_pairs: the same loss with one-hot labels, see `_info_nce`; None: there is none.
        symmetric: both directions are the same loss where only own pairs match.
    """

    soft_labels: bool = True
    queue: bool = True
    fixed_temperature: bool = False
    own_pairs: Callable[..., Tensor] | None = None
    symmetric: bool = False


ITC_LOSSES: Registry[Callable[..., Any]] = Registry("form of ITC", MAFA, _ItcTraits)


def contrastive_loss(sim: Tensor, labels: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy of ``softmax(sim)`` with soft labels (MAFA eq. 1).

    Args:
        sim: ``(B, N)``, divided by the temperature.
        labels: ``(B, N)``, rows sum to 1, 0 where dropped.
        dropped: ``(B, N)`` bool, candidates left out of the softmax.
    """
    log_p = F.log_softmax(without(sim, dropped), dim=1)
    if dropped is not None:
        # 0 * -inf would be NaN.
        log_p = log_p.masked_fill(dropped, 0.0)
    return -(labels * log_p).sum(dim=1).mean()


def degrees(labels: Tensor) -> Tensor:
    """Return to which degree ``(B, N)``, from 0 to 1, every candidate counts as a positive.

    It is a candidate's label divided by the largest label of its anchor: 1 for every positive with
    one-hot labels, however many there are, and Con-D's probability for a judged pair with
    ``connections.labels: probability``.

    Args:
        labels: ``(B, N)``, rows sum to 1.
    """
    return labels / labels.amax(dim=1, keepdim=True)


def _info_nce(
    form: Any,
    sim: Tensor,
    own: Tensor,
    temperature: Tensor,
    found: Sequence[Tensor | None],
    drop: bool,
) -> Tensor:
    """Return InfoNCE with one-hot labels: ITC without a matrix of labels.

    Args:
        form: the form itself; it is not used.
        sim: ``(B, C)``, divided by the temperature.
        own: ``(B,)``, the anchors' numbers among the candidates.
        temperature: scalar; it is not used.
        found: ``(B, C)`` bool, false negatives of the rows and, if the columns are anchors, too, of
            the columns; never an own pair. None: none.
        drop: they are left out; otherwise they are positives.
    """
    terms = []
    for dim, false in zip((1, 0), found, strict=False):
        at = own.unsqueeze(dim)
        # An added constant is several times faster than `without`, and has no backward pass.
        least = torch.finfo(sim.dtype).min
        shown = sim + false.to(sim.dtype).mul_(least) if drop and false is not None else sim
        log_p = F.log_softmax(shown, dim)
        if drop or false is None:
            terms.append(-log_p.gather(dim, at).mean())
        else:
            positives = false.scatter(dim, at, True).to(log_p.dtype)
            labels = positives / positives.sum(dim, keepdim=True)
            terms.append(-(log_p * labels).sum() / len(own))
    return torch.stack(terms).mean()


@ITC_LOSSES.register("softmax", source="MAFA eq. 1", own_pairs=_info_nce)
def _softmax(side: ItcSide, labels: Tensor) -> Tensor:
    """Compare an anchor with all candidates by cross-entropy (InfoNCE)."""
    return contrastive_loss(side.sim, labels, side.dropped)


@dataclass(frozen=True)
class _SigmoidRule(Checked):
    """Settings of the sigmoid form."""

    relative_bias: float = option(
        1.0,
        "initial value of the learned cosine at which a pair has even odds",
        source="SigLIP 3.2: 10 / 10",
    )


def _sigmoid_loss(logits: Tensor, targets: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Return the binary cross-entropy of all pairs, summed over candidates, mean over anchors.

    ``-1 / B * sum_ij [y_ij log s(l_ij) + (1 - y_ij) log s(-l_ij)]`` with the logits l and the
    sigmoid s; targets of 0 and 1 make it SigLIP's eq. 1.

    Args:
        logits: ``(B, N)``, similarities divided by the temperature, plus a bias.
        targets: ``(B, N)`` probabilities that the pairs match.
        dropped: ``(B, N)`` bool, pairs left out.
    """
    logits = _full(logits)
    losses = F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none")
    if dropped is not None:
        losses = losses.masked_fill(dropped, 0.0)
    return losses.sum(dim=1).mean()


def _sigmoid_of_own_pairs(
    form: _SigmoidForm,
    sim: Tensor,
    own: Tensor,
    temperature: Tensor,
    found: Sequence[Tensor | None],
    drop: bool,
) -> Tensor:
    """Return the sigmoid loss with one-hot labels, see `_info_nce`."""
    # A difference of a matrix and a scalar would negate the whole gradient.
    logits = _full(sim + (-form.relative_bias / temperature))
    losses, of_own = F.softplus(logits), logits.gather(1, own[:, None]).sum()
    masks = [false.to(logits.dtype) for false in found if false is not None]
    if not masks:
        return (losses.sum() - of_own) / len(own)
    share = masks[0]
    for other in masks[1:]:  # a pair counts for its row and for its column
        share = share.add_(other).mul_(0.5)
    if drop:
        return (losses.sum() - (losses * share).sum() - of_own) / len(own)
    # -log s(l) of a positive is -log s(-l) less l.
    return (losses.sum() - (logits * share).sum() - of_own) / len(own)


# A queue's negatives, thousands for every anchor, would outweigh its positives in the sum.
@ITC_LOSSES.register(
    "sigmoid",
    settings=_SigmoidRule,
    source="SigLIP eq. 1, FFF",
    queue=False,
    own_pairs=_sigmoid_of_own_pairs,
    symmetric=True,
)
class _SigmoidForm(nn.Module):
    """Classify every pair separately, by a sigmoid with a learned bias.

    An anchor may have any number of positives, each with its own target, see `degrees`.

    The logit of a pair is ``(cosine - r) / temperature`` with a learned relative bias r. SigLIP
    learns the bias ``b = -r / temperature`` instead and starts at -10 with a temperature of 1 / 10,
    which is r = 1: equal vectors have even odds, all other pairs less. A fixed b would not carry
    over to the temperature of a trained model: at 0.01 and b = -10 every pair with a cosine above
    0.1 is a match.

    The mean of both directions counts every pair once: it equals the paper's loss and, with
    ``detach_other: False``, its gradients. The temperature differs: ours is the model's, a divisor
    that starts at ``model.temp`` (0.07; SigLIP: 1 / 10) and is clamped, whereas SigLIP learns the
    logarithm of an unbounded factor.
    """

    def __init__(self, own: _SigmoidRule | None = None) -> None:
        super().__init__()
        self.relative_bias = nn.Parameter(torch.tensor((own or _SigmoidRule()).relative_bias))

    def forward(self, side: ItcSide, labels: Tensor) -> Tensor:
        """Return the loss of one direction."""
        logits = side.sim - self.relative_bias / side.temperature
        return _sigmoid_loss(logits, degrees(labels), side.dropped)


@dataclass(frozen=True)
class _DebiasedRule(Checked):
    """Settings of the debiased form."""

    prior: float = option(
        0.1,
        "tau+, share of false negatives among the candidates",
        source="DCL",
        low=0,
        high=0.99,
    )


@ITC_LOSSES.register("debiased", settings=_DebiasedRule, source="DCL")
def _debiased(side: ItcSide, labels: Tensor, own: _DebiasedRule) -> Tensor:
    """Subtract the false negatives expected among the negatives (DCL).

    Chuang et al., NeurIPS 2020. The loss of a positive p is ``-log e^p / (e^p + K g)`` with ``g =
    max((mean_k e^k - prior * mean_p e^p) / (1 - prior), e^(-1 / temperature))`` over the K
    negatives k and all positives of the anchor. Here a candidate is a positive with weight d (see
    `degrees`) and a negative with weight 1 - d in both means, K is the sum of 1 - d, and an
    anchor's loss is the mean over its positives, weighted by their labels. With prior 0 and one
    positive it is InfoNCE.

    Args:
        side: a direction of ITC.
        labels: ``(B, N)``, rows sum to 1.
        own: settings.
    """
    sim, negative, degree = _full(side.sim), _negatives(side, labels), degrees(labels)
    # Sums are of e^(similarity - top); the estimate is a difference, so no logarithms before it.
    top = without(sim, side.dropped).amax(dim=1, keepdim=True).detach()
    scaled = torch.exp(without(sim, side.dropped) - top)
    count = negative.sum(dim=1, keepdim=True)
    mean_negative = (scaled * negative).sum(dim=1, keepdim=True) / count.clamp(min=_SMALLEST)
    mean_positive = (scaled * degree).sum(dim=1, keepdim=True) / degree.sum(dim=1, keepdim=True)
    estimate = (mean_negative - own.prior * mean_positive) / (1.0 - own.prior)
    log_least = -1.0 / _constant(side.temperature, sim) - top
    above = estimate > log_least.exp().clamp(min=_SMALLEST)
    log_estimate = torch.where(above, torch.where(above, estimate, 1.0).log(), log_least)
    losses = F.softplus(top + log_estimate + count.log() - sim)
    return (labels * losses).sum(dim=1).mean()


@dataclass(frozen=True)
class _RinceRule(Checked):
    """Settings of the noise-robust form."""

    exponent: float = option(
        0.5,
        "q, robustness to false positives: near 0 InfoNCE, 1 a symmetric loss",
        source="RINCE",
        low=0,
        high=1,
        above=True,
        also=("q",),
    )
    weight: float = option(
        0.01,
        "lambda, weight of the term with the negatives",
        source="RINCE",
        low=0,
        high=1,
        above=True,
        also=("lambda",),
    )


@ITC_LOSSES.register("rince", settings=_RinceRule, source="RINCE", fixed_temperature=True)
def _rince(side: ItcSide, labels: Tensor, own: _RinceRule) -> Tensor:
    """Bound the influence of false positives (RINCE).

    Chuang et al., CVPR 2022. The loss of a positive p is ``-e^(q p) / q + (lambda (e^p + sum_k
    e^k))^q / q`` over its negatives k; as q approaches 0 it becomes InfoNCE + log lambda, and at q
    = 1 it is symmetric. Negatives are weighted by 1 - d (see `degrees`), and an anchor's loss is
    the mean over its positives, weighted by their labels.

    The loss falls without bound with the temperature, which must therefore be fixed. If ``q /
    temperature`` is above 10, the exponentials would overflow in fp16, so the loss of all pairs is
    multiplied by ``e^(10 - q / temperature)``.

    Args:
        side: a direction of ITC.
        labels: ``(B, N)``, rows sum to 1.
        own: settings.
    """
    sim, negative = _full(side.sim), _negatives(side, labels)
    top = without(sim, side.dropped).amax(dim=1, keepdim=True).detach()
    scaled = torch.exp(without(sim, side.dropped) - top)
    among = scaled + (scaled * negative).sum(dim=1, keepdim=True)
    # The sum can underflow to 0, whose logarithm is infinite.
    log_sum = top + among.clamp(min=_SMALLEST).log() + math.log(own.weight)
    largest = 1.0 / _constant(side.temperature, sim)
    shift = (largest - _LARGEST_EXPONENT / own.exponent).clamp(min=0.0)
    # expm1, because the difference of two exponentials near 1 loses its digits for a small q.
    second, first = (torch.expm1(own.exponent * (one - shift)) for one in (log_sum, sim))
    losses = (second - first) / own.exponent
    if side.dropped is not None:
        losses = losses.masked_fill(side.dropped, 0.0)
    return (labels * losses).sum(dim=1).mean()


def _negatives(side: ItcSide, labels: Tensor) -> Tensor:
    """Return the weight ``(B, N)`` of every candidate as a negative, 0 where it is dropped."""
    negative = 1.0 - degrees(labels)
    return negative if side.dropped is None else negative.masked_fill(side.dropped, 0.0)


def _full(sim: Tensor) -> Tensor:
    """Return similarities in float32 if they have half precision, and as they are otherwise."""
    return sim.to(torch.promote_types(sim.dtype, torch.float32))


def _constant(temperature: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(temperature, dtype=like.dtype, device=like.device).detach()
