"""Mine a data set: encode its samples, pick hard negatives, judge them, and return a table.

`count` and `mine` are two readings of the table. They share the search for candidates,
`lavis_mafa.algorithm.corpus_mining`, with `mine_hard_negatives`, whose features are of any encoder.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.data.known_truth import known_pairs
from lavis_mafa.judges.self_check import SelfCheck
from lavis_mafa.tools.analysed_pairs import AnalysedPairs
from lavis_mafa.tools.corpus import Corpus
from lavis_mafa.tools.corpus_features import Features, make_features
from lavis_mafa.tools.hard_negatives import (
    HardNegatives,
    Sampling,
    find_neighbours,
    hard_negatives_of,
)
from lavis_mafa.tools.judge_check import check_judges
from lavis_mafa.tools.judged_pairs import UNKNOWN, Judged, pair_keys


@dataclass
class Mined:
    """The table of judged pairs and what it was made from.

    Attributes:
        negatives: of each sampling, in order.
        checks: self-checks by name of the discriminator.
    """

    features: Features
    negatives: list[HardNegatives]
    judged: Judged
    checks: dict[str, SelfCheck]


def load(args: argparse.Namespace) -> AnalysedPairs:
    """Build what a command analyses: from files of pairs, or from a config of LAVIS.

    Judges are built first: a missing checkpoint is reported before hours are spent on features.
    """
    if args.data:
        from lavis_mafa.tools.from_files import load_files

        return load_files(args)
    from lavis_mafa.tools.judging import load_judged

    return load_judged(args)


def mine(
    loaded: AnalysedPairs,
    args: argparse.Namespace,
    thresholds: tuple[float, ...],
    wanted: Sequence[Sampling],
    top_k: int = 1,
    new_only: bool = False,
) -> Mined:
    """Judge the hard negatives of samples; all ranks must call this function.

    Only the features are saved, in the folder ``features`` of ``args.output``: a rerun encodes only
    what is missing, and judges again.

    Args:
        thresholds: ascending, the lowest and highest are recorded.
        wanted: samplings, with the seed of ``args``.
        top_k: hard negatives of an anchor in a mini-batch.
        new_only: pick no pair that the data have, whatever the config says.

    Raises:
        ValueError: if too many samples cannot be read.
    """
    checks = check_judges(loaded, thresholds, args)
    features = make_features(loaded, np.arange(len(loaded.data)), args.output / "features")
    _require_readable(loaded, features)
    about: dict[str, Any] = {**loaded.about, "low": thresholds[0], "high": thresholds[-1]}
    about["self_check"] = {name: check.content() for name, check in checks.items()}
    negatives = []
    for sampling in wanted:
        if sampling.neighbours is None:
            found = hard_negatives_of(loaded, features, sampling, args.seed, top_k, new_only)
        else:
            about["neighbours"] = {"neighbours": sampling.neighbours, "index": "exact"}
            found = find_neighbours(loaded, features, sampling.neighbours, new_only)
        negatives.append(found)
    judged = judge_all(loaded, features, negatives)
    judged.about = about
    return Mined(features, negatives, judged, checks)


def _require_readable(loaded: AnalysedPairs, features: Features) -> None:
    lost = features.unreadable
    if len(lost) > loaded.most_unreadable * len(loaded.data):
        listed = "\n  ".join(error for _, error in lost[:20])
        raise ValueError(
            f"the pictures of {len(lost)} of {len(loaded.data)} pairs cannot be read, at most "
            f"{loaded.most_unreadable:.0%} may be missing: repair the data, or correct --images, "
            f"and remove the folder features of --output; the first:\n  {listed}"
        )


def judge_all(
    loaded: AnalysedPairs, features: Features, negatives: Sequence[HardNegatives]
) -> Judged:
    """Judge all distinct pairs of hard negatives; all ranks must call this function."""
    size = len(loaded.data)
    # Sorted in place, a pair's occurrences from its text before those from its image.
    keys = np.concatenate(
        [2 * pair_keys(one.image, one.text, size) + one.from_image for one in negatives]
    )
    keys.sort()
    begins = np.diff(keys // 2, prepend=-1) > 0
    by_text, by_image = keys[begins] % 2 == 0, keys[np.roll(begins, -1)] % 2 == 1
    image, text = np.divmod(keys[begins] // 2, size)
    del keys, begins
    probability = {}
    for name, judge in loaded.judges.items():
        probability[name] = np.asarray(judge.probability(features, image, text), np.float32)
    return Judged(image, text, by_image, by_text, probability, _truth_of(loaded.data, image, text))


def _truth_of(data: Corpus, image: NDArray[Any], text: NDArray[Any]) -> NDArray[Any]:
    """Return the ground truth ``(P,)`` int8 of pairs; `UNKNOWN` where the data do not know it."""
    if data.truth is None:
        return np.full(len(image), UNKNOWN, np.int8)
    truth = np.asarray(data.truth(image, text)).astype(np.int8)
    return np.where(known_pairs(data.truth, image, text), truth, UNKNOWN).astype(np.int8)
