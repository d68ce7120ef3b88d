"""The share of a discriminator's matches that people confirm (MAFA Appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lavis_mafa.metrics.binary import weighted_share
from lavis_mafa.mining.judged_pairs import UNKNOWN, VALID, Judged
from lavis_mafa.mining.quality.annotator_labels import Labels, consistent, pooled, weights


class NoAnsweredMatchError(ValueError):
    """No pair that the discriminator calls a match was answered yes or no."""


@dataclass
class Correction:
    """Share of a discriminator's matches that annotators confirm (0.83 in MAFA Appendix B).

    Attributes:
        factor: 0 to 1; low, high: its 95 % Wilson interval.
        n: number of pairs answered yes or no.
        name, above: the discriminator, and its threshold for a match.
    """

    factor: float
    low: float
    high: float
    n: int
    name: str
    above: float


def correction_of(labels: Sequence[Labels], judged: Judged | None = None) -> Correction:
    """Compute the correction from the labels of one or several annotators.

    Several answers for the same pair count as one draw. Labels that were drawn from all pairs
    require ``judged`` and are weighted.

    Raises:
        ValueError: if labels cannot be pooled, or no pair was answered yes or no.
    """
    first = consistent(labels)
    hits, weight, above = np.array(list(pooled(labels).values())), None, first.above
    if above is None:
        if judged is None:
            raise ValueError(
                "these labels were drawn from all pairs, not only from matches: give the --output "
                "of the counts that `lavis-mafa label page` read"
            )
        rows, hits, weight = weights(labels, judged)
        above = judged.thresholds[0]
        called = judged.probability_by(first.name)[rows] > above
        hits, weight = hits[called], weight[called]
    factor, low, high = weighted_share(hits, weight)
    if factor is None:
        raise NoAnsweredMatchError("no match was answered yes or no")
    return Correction(factor, low, high, len(hits), first.name, above)


def correction_by_truth(judged: Judged, name: str, above: float) -> Correction | None:
    """Compute the correction of a discriminator from the truth of some pairs.

    Args:
        above: threshold for a match.

    Returns:
        None if the truth of no match is known.
    """
    matches = judged.probability_by(name) > above
    truth = judged.truth[matches & (judged.truth != UNKNOWN)]
    factor, low, high = weighted_share(truth == VALID)
    return None if factor is None else Correction(factor, low, high, len(truth), name, above)
