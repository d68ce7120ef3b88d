"""Con-D's self-check before an analysis, and its table in reports."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from lavis_mafa.judges.self_check import (
    LEAST_AUC,
    LEAST_FOUND,
    SKIP,
    SelfCheck,
    drawn_samples,
    mode_of,
    on_all_ranks,
    self_check,
)
from lavis_mafa.tools.analysed_pairs import AnalysedPairs, Judge
from lavis_mafa.tools.charts import Cell, Table

_OPTION = "--self-check"
TITLE = "Con-D self-check"
NOTE = (
    "Own pairs are images with their own captions, random pairs images with the captions of other "
    f"images, without labels. An AUC below {LEAST_AUC:g}, or random pairs above the highest "
    "threshold at more than a third of the rate of own pairs, means that the discriminator cannot "
    f"tell matching pairs from others. Fewer than {LEAST_FOUND:.0%} of own pairs above it mean "
    "that the discriminator finds hardly any false negative. Passing is no proof of the opposite: "
    "hard negatives are harder."
).replace("%", " %")


def check_judges(
    loaded: AnalysedPairs, thresholds: Sequence[float], args: argparse.Namespace
) -> dict[str, SelfCheck]:
    """Check every judge of a command; all ranks must call this function.

    Images are processed as the command will process them.

    Args:
        thresholds: in use.
        args: with ``self_check`` (None: each config's own) and ``seed``.

    Returns:
        The checks by name, without those that are skipped.

    Raises:
        PoorDiscriminatorError: on all ranks, if one fails that is to be refused.
    """
    found = {}
    for name, judge in loaded.judges.items():
        cfg = loaded.configs[name]
        mode = args.self_check or mode_of(cfg)
        if mode == SKIP or judge.con_d is None:
            continue

        def check(name: str = name, judge: Judge = judge, cfg: Any = cfg) -> SelfCheck:
            drawn = drawn_samples(len(loaded.data), cfg, args.seed)
            return self_check(judge.con_d, judge.batches(drawn), thresholds, name, args.seed)

        found[name] = on_all_ranks(check)
        found[name].settle(mode, _OPTION)
    return found


def self_check_tables(checks: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Return the table of self-checks; [] if there are none.

    Args:
        checks: `SelfCheck.content` by name of the discriminator.
    """
    if not checks:
        return []
    columns = ["discriminator", "own and random pairs", "AUC", "threshold"]
    columns += ["own above %", "random above %", "verdict"]
    rows: list[list[Cell]] = []
    for name, check in checks.items():
        verdict = verdict_of(check)
        auc = None if check["auc"] is None else f"{check['auc']:.3f}"
        for at in check["above"] or [{}]:
            shares = (at.get(key) for key in ("own", "random"))
            percent = [None if share is None else f"{100 * share:.1f}" for share in shares]
            rows.append([name, check["pairs"], auc, at.get("threshold"), *percent, verdict])
    return [Table(TITLE, columns, rows, NOTE)]


def verdict_of(check: Mapping[str, Any]) -> str:
    """Return the problems that a self-check found, or that there are none.

    Args:
        check: `SelfCheck.content`.
    """
    return "; ".join(check["problems"]) or ("passed" if check["above"] else "not possible")
