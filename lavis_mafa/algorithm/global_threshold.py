"""One learned threshold per anchor: the top share of the whole data set is false (GloFND).

Balmaseda et al., "Discovering Global False Negatives On the Fly for Self-supervised Contrastive
Learning", ICML 2025 (arXiv 2502.20612). The threshold of anchor i solves

    min over v of  v r + E_j max(s_ij - v, 0),

whose subgradient in v is ``r - P(s_ij > v)``; its minimum is the (1 - r) quantile of the anchor's
scores with all candidates of the data set. Every mini-batch gives an unbiased estimate of it, and
the threshold takes a step of Adam, as in the authors' code (github.com/vibalcam/GloFND).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lavis_mafa.algorithm.mining import DIRECTIONS, MiningRule
from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.rules import KEPT, POSITIVE, RULES, ScoredPairs

MOST_SORTED = 2**22  # maximum number of scores per call of quantile
BETAS, EPS = (0.9, 0.98), 1e-8  # of Adam


@dataclass(frozen=True)
class _GlobalThreshold(Checked):
    """How the thresholds of `_GlobalThresholds` are learned."""

    share: float = option(
        0.001,
        "r: share of the data set that is false for an anchor",
        source="GloFND",
        low=0,
        above=True,
        high=0.5,
    )
    rate: float = option(
        0.05, "Adam's learning rate, in units of the score", source="GloFND", low=0, above=True
    )
    start_epoch: int = option(
        1, "first epoch whose verdicts use the thresholds; they are learned from epoch 0 on", low=0
    )


@RULES.register("global_threshold", settings=_GlobalThreshold, source="GloFND", needs_all=True)
class _GlobalThresholds(nn.Module):
    """Call a pair positive if it scores above its anchor's learned threshold.

    Buffers of images and of texts by ``loaded_index`` are equal on all ranks and saved in
    checkpoints: thresholds ``(N,)`` and Adam's two moments ``(2, N)``. An anchor's first threshold
    is the (1 - r) quantile of its first mini-batch. No pair is ambiguous.

    Args:
        own: see `_GlobalThreshold`.
    """

    state_of_run = True  # a checkpoint of another run must not set it
    i2t: Tensor
    t2i: Tensor

    def __init__(self, own: _GlobalThreshold) -> None:
        super().__init__()
        self.own = own
        self._bounds: dict[str, Tensor] = {}
        self.allocate(0)

    def allocate(self, size: int) -> None:
        """Allocate thresholds for samples 0 to ``size`` - 1; NaN: not seen yet."""
        for name in DIRECTIONS:
            device = getattr(self, name).device if hasattr(self, name) else None
            self.register_buffer(name, torch.full((size,), float("nan"), device=device))
            self.register_buffer(f"{name}_moments", torch.zeros(2, size, device=device))

    @torch.no_grad()
    def observe(
        self,
        scores: tuple[Tensor, Tensor],
        positives: Tensor,
        index: Tensor | None,
        epoch: int | None,
    ) -> None:
        """Take one step with every anchor's threshold, using the mini-batches of all ranks.

        Args:
            scores: ``(B, C)`` in both directions, from -1 to 1.
            positives: ``(B, C)`` bool, known positives, which are ignored.
            index: ``(B,)`` numbers of the anchors' samples in the data set.
            epoch: number of the epoch, from 0 on.

        Raises:
            ValueError: if the epoch is unknown, or a sample has no number or one that `allocate`
                did not prepare for.
        """
        if not self.training:  # rows of an evaluation set have no thresholds: none is judged
            for name, score in zip(DIRECTIONS, scores, strict=True):
                self._bounds[name] = torch.full_like(score[:, 0], float("nan"))
            return
        if index is None or (len(index) and int(index.max()) >= len(self.i2t)):
            raise ValueError(
                f"connections.rule: global_threshold keeps a threshold for each of {len(self.i2t)} "
                f"samples, got {'no loaded_index' if index is None else int(index.max())}; give "
                "samples['loaded_index'], and call allocate(number of samples) before training"
            )
        if epoch is None:
            raise ValueError(
                "connections.rule: global_threshold needs the number of the epoch, from 0 on; give "
                "it as samples['epoch']"
            )
        together = Ranks(True)
        places = together.gather(index)
        for name, score in zip(DIRECTIONS, scores, strict=True):
            known: Tensor = getattr(self, name)
            score = score.float().masked_fill(positives, float("nan"))
            before = known[index]
            unseen = before.isnan()
            if bool(unseen.any()):
                before[unseen] = _quantiles(score[unseen], 1 - self.own.share)
            above = (score > before[:, None]).sum(dim=1) / (~positives).sum(dim=1)
            # An anchor without a negative gives 0 / 0; it learns nothing.
            gradient = (self.own.share - above).nan_to_num(float("inf"))
            self._step(name, places, together.gather(torch.stack([before, gradient])[None]), epoch)
            bounds = known[index]
            verdicts = epoch >= self.own.start_epoch
            self._bounds[name] = bounds if verdicts else torch.full_like(bounds, float("nan"))

    def _step(self, name: str, places: Tensor, gathered: Tensor, epoch: int) -> None:
        """Take Adam's step of the thresholds at ``places`` ``(M,)``.

        Args:
            gathered: ``(ranks, 2, B)`` thresholds and gradients, infinite where nothing is learned.
        """
        known, moments = getattr(self, name), getattr(self, f"{name}_moments")
        before, gradient = gathered.transpose(0, 1).flatten(1)
        old = moments[:, places]
        # A sample may occur twice, as the replacement of an unreadable one. Take its larger
        # threshold and smaller gradient, so that all ranks store the same in any order of writing.
        known.scatter_reduce_(0, places, before, "amax", include_self=False)
        moments[0].scatter_reduce_(0, places, gradient, "amin", include_self=False)
        before, gradient = known[places], moments[0, places]
        betas = torch.tensor(BETAS, device=old.device)[:, None]
        new = betas * old + (1 - betas) * torch.stack([gradient, gradient**2])
        # As in the authors' code, by the number of epochs, not of the sample's own steps.
        mean, square = new / (1 - betas ** (epoch + 1))
        after = (before - self.own.rate * mean / (square.sqrt() + EPS)).clamp(-1.0, 1.0)
        learns = after.isfinite()
        known[places] = torch.where(learns, after, before)
        moments[:, places] = torch.where(learns, new, old)

    def forward(self, pairs: ScoredPairs, rule: MiningRule) -> Tensor:
        """Return the states ``(R,)`` of nominations; see `lavis_mafa.algorithm.rules`."""
        # A comparison with NaN is False.
        found = pairs.score > self._bounds[pairs.direction][pairs.anchor]
        return torch.where(found, POSITIVE, KEPT)


def _quantiles(rows: Tensor, share: float) -> Tensor:
    """Return the quantile of every row ``(R, C)``, ignoring NaN; NaN for a row of NaN only."""
    # Several versions of torch refuse more than 16 million numbers at a time.
    parts = torch.split(rows, max(1, MOST_SORTED // max(1, rows.shape[1])))
    return torch.cat([part.nanquantile(share, dim=1) for part in parts])
