"""Mine a data set: encode its samples, pick hard negatives, judge them, and return a table.

`count` and `mine` are two readings of the table. They share the search for candidates,
`lavis_mafa.algorithm.corpus_mining`, with `mine_hard_negatives`, whose features are of any encoder.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lavis_mafa.judges.self_check import SelfCheck
from lavis_mafa.tools.analysed_pairs import AnalysedPairs
from lavis_mafa.tools.corpus_features import Features, make_features
from lavis_mafa.tools.hard_negatives import HardNegatives, Sampling, find_hard_negatives
from lavis_mafa.tools.judged_pairs import Judged
from lavis_mafa.tools.judging import check_judges, judge_all
from lavis_mafa.training.termination import REQUEUE, Terminated, Termination


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
    from lavis_mafa.tools.model_and_data import load_judged

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
        Terminated: on a termination signal or Ctrl-C.
    """
    folder = args.output / "features"
    with _ending_resumable(folder):
        checks = check_judges(loaded, thresholds, args)
        features = make_features(loaded, np.arange(len(loaded.data)), folder)
        _require_readable(loaded, features)
        negatives = [
            find_hard_negatives(loaded, features, one, args.seed, top_k, new_only) for one in wanted
        ]
        judged = judge_all(loaded, features, negatives)
    judged.about = {**loaded.about, "low": thresholds[0], "high": thresholds[-1]}
    judged.about["self_check"] = {name: check.content() for name, check in checks.items()}
    for sampling in wanted:
        if sampling.neighbours is not None:
            judged.about["neighbours"] = {"neighbours": sampling.neighbours, "index": "exact"}
    return Mined(features, negatives, judged, checks)


@contextmanager
def _ending_resumable(folder: Path) -> Iterator[None]:
    """Say after a termination signal what a rerun need not do again."""
    termination = Termination()
    try:
        with termination, termination.raise_at_once():
            yield
    except Terminated:
        raise Terminated(
            f"terminated by {termination.signal_name}, exit status {REQUEUE}: rerun the same "
            f"command to resume; {folder} keeps the samples that are encoded, and no verdicts"
        ) from None


def _require_readable(loaded: AnalysedPairs, features: Features) -> None:
    lost = features.unreadable
    if len(lost) > loaded.most_unreadable * len(loaded.data):
        listed = "\n  ".join(error for _, error in lost[:20])
        raise ValueError(
            f"the pictures of {len(lost)} of {len(loaded.data)} pairs cannot be read, at most "
            f"{loaded.most_unreadable:.0%} may be missing: repair the data, or correct --images, "
            f"and remove the folder features of --output; the first:\n  {listed}"
        )
