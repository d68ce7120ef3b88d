"""Draw negatives by the posterior probability that they are false (FNE, Li et al., ACM MM 2023).

Similarities of positives and of hard negatives are modelled as two normal distributions. Bayes'
rule then gives the probability that a candidate of a given similarity really matches its anchor.

Similarities here are cosines, NOT divided by the temperature: margin and sampling weights are
differences of cosines, and a temperature that is learned would move the distributions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.algorithm.pickers import PICKERS, Picker, hardest, one_of
from lavis_mafa.algorithm.ranks import Ranks

# Lower bound of a standard deviation: the precision of similarities in float32.
_NARROWEST = 1e-6


@dataclass(frozen=True)
class PosteriorRule(Checked):
    """Settings of drawing negatives by the posterior probability that they are false."""

    prior: float = option(
        1e-4,
        "probability that a random pair matches",
        source="FNE",
        low=0,
        above=True,
        high=0.5,
    )
    margin: float = option(
        0.2,
        "cut-down: candidates less similar than the mean of positives minus this margin are not "
        "drawn",
        source="FNE",
        low=0,
    )
    cut_down: bool = option(
        True, "whether easy negatives are excluded by that margin", source="FNE"
    )
    minimum: int = option(
        200, "number of positives to observe before the posterior is used", source="FNE", low=0
    )
    beginning: str = option(
        "hardest",
        "negatives until then: the hardest, or sampled without posterior as in FNE's code",
        source="FNE",
        choices=("hardest", "sampled"),
    )
    suspicion: float = 1e-3  # posterior above which it replaces the similarity in a weight
    sharpness: float = 0.5  # factor in the exponent of the weights
    each_epoch: bool = option(
        True,
        "restart the distributions with every epoch, as similarities drift during training",
        source="FNE",
    )


class _RunningNormal(nn.Module):
    """A normal distribution fitted to a stream of values of all ranks.

    Count, mean and sum of squared deviations are merged by Chan's formulas in float64, so that
    neither a large offset nor the order of the values costs precision. They are buffers, so that
    they are saved in checkpoints.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("count", "mean", "squares"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def observe(self, values: Tensor) -> None:
        """Add the values of all ranks, which must all call it.

        Args:
            values: this rank's values in any shape, possibly empty.
        """
        values = values.detach().flatten().to(self.mean)
        own = torch.zeros(1, 3, dtype=torch.float64, device=self.mean.device)
        if len(values):
            mean = values.mean()
            own[0, 0], own[0, 1] = len(values), mean
            own[0, 2] = ((values - mean) ** 2).sum()
        before = torch.stack([self.count, self.mean, self.squares])[None]
        count, mean, squares = torch.cat([before, Ranks(together=True).gather(own)]).unbind(1)
        total = count.sum()
        if total == 0:
            return
        # Differences to one of the means are small, so a large common offset costs no precision.
        base = mean[count > 0][0]
        joined = base + (count * (mean - base)).sum() / total
        self.squares.copy_(squares.sum() + (count * (mean - joined) ** 2).sum())
        self.mean.copy_(joined)
        self.count.copy_(total)

    @property
    def variance(self) -> Tensor:
        """Return the unbiased variance (float64 scalar); NaN for fewer than two values."""
        spread = self.squares / (self.count - 1.0).clamp(min=1.0)
        return torch.where(self.count > 1.0, spread, math.nan)

    def log_density(self, x: Tensor) -> Tensor:
        """Return the log density at ``x`` in float64; NaN for fewer than two values."""
        deviation = self.variance.sqrt().clamp(min=_NARROWEST)
        z = (x.double() - self.mean) / deviation
        return -0.5 * z * z - deviation.log() - 0.5 * math.log(2.0 * math.pi)

    def reset(self) -> None:
        """Remove all values."""
        for value in (self.count, self.mean, self.squares):
            value.zero_()


def _posterior(
    sim: Tensor, positive: _RunningNormal, negative: _RunningNormal, prior: float
) -> Tensor:
    """Return the probability that pairs of the given similarities match (FNE, Bayes' rule).

    ``prior p+ / (prior p+ + (1 - prior) p-)``, where p+ and p- are the densities of positives and
    of negatives; with a prior of 10^-4 it is FNE's ``p+ / (p+ + (10^4 - 1) p-)``. It is computed
    from the difference of log densities, so that it is correct where both densities underflow.

    The densities of two normal distributions of different width cross twice. If positives spread
    wider, the posterior rises again far below the mean of the negatives; the cut-down excludes
    these candidates.

    Args:
        sim: any shape, cosine similarities.
        positive, negative: distributions of at least two values each.
        prior: probability that a random pair matches, above 0 and below 1.

    Returns:
        The shape of ``sim``, 0 to 1, float64.
    """
    odds = positive.log_density(sim) - negative.log_density(sim)
    return torch.sigmoid(odds + math.log(prior) - math.log1p(-prior))


def _sampling_weights(
    sim: Tensor,
    own_sim: Tensor,
    posterior: Tensor | None,
    known_positives: Tensor,
    mean_positive: Tensor | float | None,
    margin: float,
    sharpness: float = 0.5,
    suspicion: float = 1e-3,
) -> Tensor:
    """Return the weights for drawing candidates (FNE's sampling and cut-down).

    They are ``exp(-sharpness * (s - own)^2)``, replaced by ``exp(-sharpness * posterior)`` where
    the posterior is above ``suspicion``; and 0 for known positives and for easy negatives, where
    ``s <= mean_positive - margin``.

    Args:
        sim: ``(B, N)`` cosine similarities of anchors to candidates.
        own_sim: ``(B,)`` similarities of anchors to their own pairs.
        posterior: ``(B, N)`` result of `_posterior`; None while it is unknown.
        known_positives: ``(B, N)`` bool, candidates that may not be drawn.
        mean_positive: mean similarity of positives; None while it is unknown, which disables the
            cut-down.
        margin: the margin of the triplet loss.

    Returns:
        ``(B, N)`` float64, 0 to 1.
    """
    sim = sim.detach().double()
    weights = torch.exp(-sharpness * (sim - own_sim.detach().double()[:, None]) ** 2)
    if posterior is not None:
        suspected = posterior > suspicion
        weights = torch.where(suspected, torch.exp(-sharpness * posterior), weights)
    if mean_positive is not None:
        weights = weights.masked_fill(sim <= mean_positive - margin, 0.0)
    return weights.masked_fill(known_positives, 0.0)


def draw(weights: Tensor, sim: Tensor, known_positives: Tensor) -> Tensor:
    """Draw one candidate per anchor in proportion to its weights.

    If all weights of an anchor are 0, its hardest candidate is picked (FNE).

    Args:
        weights: ``(B, N)``, at least 0, 0 where ``known_positives``.
        sim: ``(B, N)`` similarities.
        known_positives: ``(B, N)`` bool, candidates that may not be picked.

    Returns:
        ``(B,)`` int64 candidate numbers, `NONE` where nothing is left to pick.
    """
    fallback = hardest(sim, known_positives)
    weights = weights.nan_to_num()  # a NaN must reach the loss, whose check names the samples
    nothing = weights.sum(dim=1) <= 0.0
    return torch.where(nothing, fallback, one_of(weights.masked_fill(nothing[:, None], 1.0)))


@PICKERS.register("posterior", settings=PosteriorRule, source="FNE")
class PosteriorPicker(nn.Module):
    """Draw negatives by the posterior probability that they are false.

    The picker estimates the two distributions of similarities from the mini-batches it observes.
    `run_step` calls `prepare`. Elsewhere, call `observe` once a step, then `pick`. Until it has
    observed ``rule.minimum`` positives, it picks as ``rule.beginning`` says.

    Its state is in buffers, so that checkpoints contain it if it is a submodule of a model.

    Args:
        rule: see `PosteriorRule`.
    """

    state_of_run = True  # these similarities belong to one run's model
    epoch: Tensor

    def __init__(self, rule: PosteriorRule | None = None) -> None:
        super().__init__()
        self.rule = rule or PosteriorRule()
        self.positive = _RunningNormal()
        self.negative = _RunningNormal()
        self.register_buffer("epoch", torch.tensor(-1))

    @property
    def _ready(self) -> bool:
        """Return whether enough positives have been observed to use the posterior."""
        return float(self.positive.count) >= max(2, self.rule.minimum)

    @torch.no_grad()
    def observe(
        self,
        sim_i2t: Tensor,
        sim_t2i: Tensor,
        positives: Tensor,
        own: Tensor | None = None,
        epoch: int | None = None,
    ) -> None:
        """Add the similarities of a mini-batch's pairs that rank first in both directions (FNE).

        The similarity of such a pair is one positive value, and its similarities to the hardest
        negatives of both directions are two negative values. A pair ranks first if it is more
        similar than all candidates that are not known positives.

        Args:
            sim_i2t, sim_t2i: ``(B, N)`` cosine similarities, not divided by the temperature; anchor
                b of both is pair b.
            positives: ``(B, N)`` bool, known positives.
            own: ``(B,)`` numbers of the anchors' own pairs among the N; None: 0 to B - 1.
            epoch: with ``rule.each_epoch`` the distributions restart when it changes.
        """
        if epoch is not None:
            if self.rule.each_epoch and int(self.epoch) != epoch:
                self.forget()
            self.epoch.fill_(epoch)
        if own is None:
            own = torch.arange(len(sim_i2t), device=sim_i2t.device)
        hard_i2t, hard_t2i = (
            sim.detach().masked_fill(positives, -math.inf).amax(dim=1) for sim in (sim_i2t, sim_t2i)
        )
        own_i2t, own_t2i = (
            sim.detach().gather(1, own[:, None]).squeeze(1) for sim in (sim_i2t, sim_t2i)
        )
        first = (own_i2t > hard_i2t) & (own_t2i > hard_t2i) & ~positives.all(dim=1)
        self.positive.observe(own_i2t[first])
        self.negative.observe(torch.stack([hard_i2t[first], hard_t2i[first]]))

    def forget(self) -> None:
        """Restart both distributions."""
        self.positive.reset()
        self.negative.reset()
        self.epoch.fill_(-1)

    def weights(self, sim: Tensor, positives: Tensor, own_sim: Tensor) -> Tensor:
        """Return `_sampling_weights` ``(B, N)`` with the distributions observed so far."""
        rule = self.rule
        known = _posterior(sim, self.positive, self.negative, rule.prior) if self._ready else None
        known_mean = rule.cut_down and bool(self.positive.count > 0)
        mean = self.positive.mean if known_mean else None
        return _sampling_weights(
            sim, own_sim, known, positives, mean, rule.margin, rule.sharpness, rule.suspicion
        )

    @torch.no_grad()
    def prepare(
        self,
        sim_i2t: Tensor,
        sim_t2i: Tensor,
        positives: Tensor,
        own: Tensor,
        temperature: Tensor | float,
        epoch: int | None,
    ) -> tuple[Picker, Picker]:
        """Observe a mini-batch in training; return its pickers, see `pickers.WithPreparation`."""
        cosines = sim_i2t * temperature, sim_t2i * temperature
        if self.training:
            self.observe(*cosines, positives, own, epoch)

        def picker(own_sim: Tensor) -> Picker:
            def pick(sim: Tensor, excluded: Tensor) -> Tensor:
                picked: Tensor = self.pick(sim * temperature, excluded, own_sim)
                return picked

            return pick

        # With momentum encoders, image-to-text and text-to-image similarities of a pair differ,
        # since one of the two features comes from the momentum encoder.
        of_images, of_texts = (cos.gather(1, own[:, None]).squeeze(1) for cos in cosines)
        return picker(of_images), picker(of_texts)

    @torch.no_grad()
    def pick(self, sim: Tensor, positives: Tensor, own_sim: Tensor) -> Tensor:
        """Draw one candidate per anchor.

        Args:
            sim: ``(B, N)`` cosine similarities, not divided by the temperature.
            positives: ``(B, N)`` bool, candidates that may not be picked.
            own_sim: ``(B,)`` similarities of anchors to their own pairs.

        Returns:
            ``(B,)`` int64 candidate numbers, `NONE` where nothing is left to pick.
        """
        if not self._ready and self.rule.beginning == "hardest":
            return hardest(sim, positives)
        return draw(self.weights(sim, positives, own_sim), sim, positives)
