"""One learned threshold per anchor: the top share of the whole data set is false (GloFND).

Balmaseda et al., "Discovering Global False Negatives On the Fly for Self-supervised Contrastive
Learning", ICML 2025 (arXiv 2502.20612). The threshold of anchor i solves

    min over v of  v r + E_j max(s_ij - v, 0),

whose subgradient in v is ``r - P(s_ij > v)``; its minimum is the (1 - r) quantile of the anchor's
scores with all candidates of the data set. Every mini-batch gives an unbiased estimate of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lavis_mafa.algorithm.mining import DIRECTIONS, MiningRule
from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.rules import KEPT, POSITIVE, RULES, ScoredPairs

MOST_SORTED = 2**22  # scores at a time


@dataclass(frozen=True)
class GlobalThreshold(Checked):
    """How the thresholds of `GlobalThresholds` are learned."""

    share: float = option(
        0.001,
        "r: share of the data set that is false for an anchor",
        source="GloFND",
        low=0,
        above=True,
        high=0.5,
    )
    rate: float = option(
        0.05, "step size of the thresholds, in units of the score", source="GloFND", low=0,
        above=True,
    )  # fmt: skip
    start_epoch: int = option(
        1, "first epoch whose verdicts use the thresholds; they are learned from epoch 0 on", low=0
    )


@RULES.register("global_threshold", settings=GlobalThreshold, source="GloFND", needs_all=True)
class GlobalThresholds(nn.Module):
    """Call a pair positive if it scores above its anchor's learned threshold.

    Thresholds are buffers ``(N,)`` of images and of texts by ``loaded_index``, equal on all ranks
    and saved in checkpoints. An anchor's first threshold is the (1 - r) quantile of its first
    mini-batch. No pair is ambiguous.

    Args:
        own: see `GlobalThreshold`.
    """

    state_of_run = True  # of the run's samples: another run's checkpoint does not give it
    i2t: Tensor
    t2i: Tensor

    def __init__(self, own: GlobalThreshold) -> None:
        super().__init__()
        self.own = own
        self._bounds: dict[str, Tensor] = {}
        self.allocate(0)

    @classmethod
    def problems_of(cls, cfg: Any) -> Iterator[tuple[str, str, bool]]:
        """Yield what a config says of itself that may not be meant; see `lavis_mafa.problems`."""
        key = "model.mafa.global_threshold.share"
        share, size = cfg[key], cfg["run.batch_size_train"]
        if share is None or not size or cfg["model.negative_all_rank"] or not cfg.training:
            return
        if 1 < size and share * (size - 1) < 1:
            why = (
                f"{share:g} of a mini-batch of {size} is less than one candidate: the first "
                "thresholds lie at the most similar one, and as each is moved once an epoch, by "
                "model.mafa.global_threshold.rate, up to one candidate of every anchor is called "
                f"false for many epochs ({1 / (size - 1):.2g} of them)"
            )
            yield key, why, True

    def allocate(self, size: int) -> None:
        """Prepare for the samples 0 to ``size`` - 1; NaN: not seen yet."""
        for name in DIRECTIONS:
            device = getattr(self, name).device if hasattr(self, name) else None
            self.register_buffer(name, torch.full((size,), float("nan"), device=device))

    @torch.no_grad()
    def observe(
        self,
        scores: tuple[Tensor, Tensor],
        positives: Tensor,
        index: Tensor | None,
        epoch: int | None,
    ) -> None:
        """Take a step of every anchor's threshold, with the mini-batches of all ranks.

        Args:
            scores: ``(B, C)`` of both directions.
            positives: ``(B, C)`` bool, known positives, which are left out.
            index: ``(B,)`` numbers of the anchors' samples in the data set.
            epoch: of the run; None counts as one with verdicts.

        Raises:
            ValueError: if the samples have no number, or none that `allocate` prepared for.
        """
        if index is None or (len(index) and int(index.max()) >= len(self.i2t)):
            raise ValueError(
                f"connections.rule: global_threshold keeps a threshold for each of {len(self.i2t)} "
                f"samples, got {'no loaded_index' if index is None else int(index.max())}; give "
                "samples['loaded_index'], and call allocate(number of samples) before training"
            )
        together = Ranks(True)
        verdicts = epoch is None or epoch >= self.own.start_epoch
        for name, score in zip(DIRECTIONS, scores, strict=True):
            known: Tensor = getattr(self, name)
            score = score.float().masked_fill(positives, float("nan"))
            before = known[index]
            unseen = before.isnan()
            if bool(unseen.any()):
                before[unseen] = _quantiles(score[unseen], 1 - self.own.share)
            above = (score > before[:, None]).sum(dim=1) / (~positives).sum(dim=1)
            after = before - self.own.rate * (self.own.share - above)
            # An anchor without a negative learns nothing: 0 / 0 above.
            after = torch.where(after.isnan(), known[index], after)
            # Samples may occur twice, as replacements of unreadable ones: the larger threshold, so
            # that every rank stores the same whatever the order of writing.
            places, values = together.gather(index), together.gather(after)
            known.scatter_reduce_(0, places, values, "amax", include_self=False)
            bounds = known[index]
            self._bounds[name] = bounds if verdicts else torch.full_like(bounds, float("nan"))

    def forward(self, pairs: ScoredPairs, rule: MiningRule) -> Tensor:
        """Return states ``(R,)`` of nominations; see `lavis_mafa.algorithm.rules.thresholds`."""
        # Nothing is above NaN.
        found = pairs.score > self._bounds[pairs.direction][pairs.anchor]
        return torch.where(found, POSITIVE, KEPT)


def _quantiles(rows: Tensor, share: float) -> Tensor:
    """Return the quantile of every row ``(R, C)`` without its NaN; NaN of a row without numbers."""
    # Several versions of torch refuse more than 16 million numbers at a time.
    parts = torch.split(rows, max(1, MOST_SORTED // max(1, rows.shape[1])))
    return torch.cat([part.nanquantile(share, dim=1) for part in parts])
