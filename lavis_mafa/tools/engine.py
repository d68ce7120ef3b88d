"""Mine a data set: encode its samples, pick hard negatives, judge them, and return a table.

`count` and `mine` are two readings of the table. They share the search for candidates,
`lavis_mafa.algorithm.corpus_mining`, with `mine_hard_negatives`, whose features are of any encoder.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lavis_mafa.judges.self_check import SelfCheck
from lavis_mafa.tools.corpus_features import Features, make_features
from lavis_mafa.tools.hard_negatives import HardNegatives, Sampling, hard_negatives_of
from lavis_mafa.tools.judge_check import check_judges
from lavis_mafa.tools.judged_pairs import Judged
from lavis_mafa.tools.judging import build_judges, judge_all
from lavis_mafa.tools.model_and_data import ModelAndData, data_source
from lavis_mafa.tools.neighbours import find_neighbours


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


def mine(
    loaded: ModelAndData,
    args: argparse.Namespace,
    con_ds: Mapping[str, Mapping[str, Any]],
    thresholds: tuple[float, ...],
    wanted: Sequence[tuple[Sampling, int]],
    top_k: int = 1,
    new_only: bool = False,
) -> Mined:
    """Judge the hard negatives of samples; all ranks must call this function.

    Only the features are saved, in the folder ``features`` of ``args.output``: a rerun encodes only
    what is missing, and judges again.

    Args:
        con_ds: configs of the discriminators by name.
        thresholds: ascending, the lowest and highest are recorded.
        wanted: samplings with their seeds.
        top_k: hard negatives of an anchor in a mini-batch.
        new_only: pick no pair that the data have, whatever the config says.
    """
    # Built first: a missing checkpoint is reported before hours are spent on features.
    judges = build_judges(loaded, con_ds)
    checks = check_judges(loaded, judges, con_ds, thresholds, args)
    features = make_features(loaded, np.arange(len(loaded.data)), args.output / "features")
    about = data_source(
        args,
        low=thresholds[0],
        high=thresholds[-1],
        self_check={name: check.content() for name, check in checks.items()},
    )
    negatives = []
    for sampling, seed in wanted:
        if sampling.neighbours is None:
            found = hard_negatives_of(loaded, features, sampling, seed, top_k, new_only)
        else:
            about["neighbours"] = {"neighbours": sampling.neighbours, "index": "exact"}
            found = find_neighbours(loaded, features, sampling.neighbours, new_only)
        negatives.append(found)
    judged = judge_all(loaded, features, negatives, judges)
    judged.about = about
    return Mined(features, negatives, judged, checks)
