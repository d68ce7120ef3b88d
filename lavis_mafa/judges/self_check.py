"""Check that Con-D tells own pairs from random ones, before its verdicts change any label.

Without labels: nearly every own pair (an image with its own caption) matches and nearly no random
pair (an image with the caption of another image) does. A Con-D that cannot separate these cannot
separate hard negatives from false ones either. The reverse does not hold: random pairs are easy, so
a Con-D that passes may still be poor on hard negatives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lavis_mafa.algorithm.binary import area_under_roc
from lavis_mafa.algorithm.discriminator import Discriminator, judge_in_turn
from lavis_mafa.algorithm.intervals import wilson
from lavis_mafa.io.processes import is_main_process
from lavis_mafa.judges.con_d_settings import ConDSettings

_WARN, _REFUSE, SKIP = "warn", "refuse", "skip"  # values of ``self_check``
# Chance is .5, and ITM heads reach .95 after a short training already. Not higher, since a perfect
# Con-D reaches 1 - v / 2 where a share v of random pairs is valid.
LEAST_AUC = 0.75
# Of random to own pairs above the highest threshold. Nearly all own and nearly no random pairs are
# valid, so this is about the ratio of wrong to right labels.
_MOST_RANDOM = 1 / 3
# Of own pairs above the highest threshold. What matches must be above it to be found, so this is
# about the share of the false negatives that it can find at best.
LEAST_FOUND = 0.05
IMAGES = 32  # of a mini-batch that is judged at once
MEANING = (
    "It may relabel true negatives as positives, or find hardly any false negative. "
    "Of a model, check that checkpoint, image size, image processor and tokenizer are those it was "
    "trained with, and fine-tune it for retrieval, best on grouped hard negatives; to compare "
    "captions, use a sentence encoder, or other units (docs/con_d.md, Self-check)"
)


class PoorDiscriminatorError(RuntimeError):
    """Con-D failed its self-check, and ``self_check`` is ``refuse``."""


@dataclass(frozen=True)
class SelfCheck:
    """Probabilities of own and of random pairs, and what follows from them.

    Attributes:
        name: of the discriminator, for messages.
        own: ``(P,)`` probabilities that images match their own captions.
        random: ``(P,)`` the same of the images and captions of other, random pairs.
        thresholds: in use, ascending; pairs above the highest become positives.
        seconds: time that the check took.
    """

    name: str
    own: NDArray[Any]
    random: NDArray[Any]
    thresholds: tuple[float, ...]
    seconds: float = 0.0

    @cached_property
    def auc(self) -> float | None:
        """The probability that an own pair scores above a random one, 0 to 1; None without pairs
        or if a score is not finite."""
        scores = np.concatenate([self.own, self.random])
        if not len(self.own) or not np.isfinite(scores).all():
            return None
        return area_under_roc(scores, np.arange(len(scores)) < len(self.own))

    @property
    def _above(self) -> list[tuple[float, float, float]]:
        """Each threshold with the shares of own and of random pairs above it, 0 to 1."""
        return [
            (
                threshold,
                float((self.own > threshold).mean()),
                float((self.random > threshold).mean()),
            )
            for threshold in (self.thresholds if len(self.own) else ())
        ]

    @property
    def problems(self) -> list[str]:
        """What is wrong with the discriminator, one sentence each; [] if it passes."""
        if not len(self.own):
            return []
        if self.auc is None:
            return ["some of its probabilities are not finite"]
        found = []
        if self.auc < LEAST_AUC:
            found.append(
                f"an own pair scores above a random pair with a probability (AUC) of only "
                f"{self.auc:.2f}, expected at least {LEAST_AUC:g} (chance: 0.5)"
            )
        threshold, own, random = self._above[-1]
        # The ends of the intervals: a single pair of few is not evidence.
        low, _ = wilson(random * len(self.random), len(self.random))
        _, most_own = wilson(own * len(self.own), len(self.own))
        if low > own * _MOST_RANDOM:
            found.append(
                f"{random:.1%} of random pairs are above {threshold:g}, more than a third of the "
                f"{own:.1%} of own pairs"
            )
        if most_own < LEAST_FOUND:
            found.append(
                f"only {own:.1%} of own pairs are above {threshold:g}, expected at least "
                f"{LEAST_FOUND:.0%}: what matches is not found"
            )
        return found

    @property
    def line(self) -> str:
        """One line with all figures."""
        if not len(self.own):
            return f"Con-D self-check of {self.name}: not possible, the data show a single image"
        auc = "unknown" if self.auc is None else f"{self.auc:.3f}"
        shares = [
            f"above {threshold:g}: own {own:.1%}, random {random:.1%}"
            for threshold, own, random in reversed(self._above)
        ]
        return (
            f"Con-D self-check of {self.name}: AUC {auc} of {len(self.own)} own against "
            f"{len(self.random)} random pairs; {'; '.join(shares)} ({self.seconds:.1f} s)"
        )

    @property
    def warning(self) -> str:
        """What is wrong, what it means and how to mend it; "" if nothing is."""
        if not self.problems:
            return ""
        return f"Con-D ({self.name}) fails its self-check: {'; '.join(self.problems)}. {MEANING}"

    def content(self) -> dict[str, Any]:
        """Return the figures as plain values, for JSON files and reports."""
        return {
            "pairs": len(self.own),
            "auc": self.auc,
            "above": [
                {"threshold": threshold, "own": own, "random": random}
                for threshold, own, random in self._above
            ],
            "problems": self.problems,
        }

    def scalars(self) -> dict[str, float]:
        """Return the figures by name, for the loggers."""
        found = {} if self.auc is None else {"auc": self.auc}
        for threshold, own, random in self._above:
            found |= {f"own_above_{threshold:g}": own, f"random_above_{threshold:g}": random}
        return found

    def settle(self, mode: str, how: str = "set model.mafa.con_d.self_check to {}") -> None:
        """Log the figures on the main process, and warn or raise if the discriminator is poor.

        Args:
            mode: `_WARN` or `_REFUSE`.
            how: how the user sets a mode, for messages.

        Raises:
            PoorDiscriminatorError: if something is wrong and ``mode`` is `_REFUSE`; on all ranks.
        """
        if is_main_process():
            logging.info("%s", self.line)
        if not self.problems:
            return
        if mode == _REFUSE:
            raise PoorDiscriminatorError(
                f"{self.warning}. To use it nevertheless, {how.format(_WARN)}"
            )
        if is_main_process():
            logging.warning("%s. To stop in this case, %s", self.warning, how.format(_REFUSE))


def mode_of(cfg: Mapping[str, Any]) -> str:
    """Return ``self_check`` of a ``model.mafa.con_d`` config."""
    return str(cfg.get("self_check", ConDSettings.self_check))


def drawn_samples(size: int, cfg: Mapping[str, Any], seed: int) -> list[NDArray[Any]]:
    """Draw the samples whose images and captions are judged, in mini-batches.

    Args:
        size: number of samples in the data.
        cfg: of Con-D, with ``self_check_pairs``.
        seed: of the draw.

    Returns:
        Distinct sample numbers, in mini-batches of about `IMAGES`.
    """
    count = min(size, int(cfg.get("self_check_pairs", ConDSettings.self_check_pairs)))
    drawn = np.random.default_rng((seed, 5)).choice(size, count, replace=False)
    return np.array_split(drawn, -(-count // IMAGES))


def random_partners(
    image_ids: NDArray[Any], generator: np.random.Generator, group_ids: NDArray[Any] | None = None
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Draw for each of B samples another one with a different image and group, uniformly.

    Args:
        image_ids: ``(B,)``.
        group_ids: ``(B,)``, -1 for a sample in no group; None: there are none.

    Returns:
        Rows of the samples that have such a partner, and rows of their partners.
    """
    other = np.asarray(image_ids)[:, None] != np.asarray(image_ids)[None, :]
    if group_ids is not None:  # their pairs may well match
        other &= (group_ids[:, None] != group_ids[None, :]) | (group_ids < 0)[:, None]
    # The highest of independent uniform numbers is each candidate with equal probability.
    drawn = np.where(other, generator.random(other.shape), -1.0).argmax(axis=1)
    rows = np.flatnonzero(other.any(axis=1))
    return rows, drawn[rows]


def self_check(
    con_d: Discriminator,
    batches: Iterable[Mapping[str, Any]],
    thresholds: Sequence[float],
    name: str,
    seed: int = 0,
) -> SelfCheck:
    """Judge the own pairs and as many random pairs of some mini-batches.

    Args:
        con_d: the discriminator.
        batches: as training or an analysis gives them to it, with ``image_id``; the samples of
            each are a random draw, so that partners within a mini-batch are random pairs.
        thresholds: in use.
        name: of the discriminator.
        seed: of the random pairs.
    """
    began = time.monotonic()
    generator = np.random.default_rng((seed, 6))
    parts: list[NDArray[Any]] = [np.empty((2, 0))]
    for samples in batches:
        ids = torch.as_tensor(samples["image_id"]).cpu().numpy()
        groups = samples.get("group_id")
        if groups is not None:
            groups = torch.as_tensor(groups).cpu().numpy()
        rows, partners = random_partners(ids, generator, groups)
        if "load_error" in samples:
            readable = np.array([not error for error in samples["load_error"]])[rows]
            rows, partners = rows[readable], partners[readable]
        if not len(rows):
            continue
        image_of, text_of = np.concatenate([rows, rows]), np.concatenate([rows, partners])
        device = getattr(samples["image"], "device", "cpu")
        with torch.no_grad():
            probability = judge_in_turn(
                con_d,
                dict(samples),
                torch.from_numpy(image_of).to(device),
                torch.from_numpy(text_of).to(device),
            )
        parts.append(probability.float().cpu().numpy().reshape(2, -1))
    own, random = np.concatenate(parts, axis=1)
    used = tuple(sorted({float(threshold) for threshold in thresholds}))
    return SelfCheck(name, own, random, used, time.monotonic() - began)
