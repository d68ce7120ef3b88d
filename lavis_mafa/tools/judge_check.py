"""The table of Con-D's self-checks in reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_mafa.judges.self_check import LEAST_AUC, LEAST_FOUND
from lavis_mafa.tools.charts import Cell, Table

TITLE = "Con-D self-check"
NOTE = (
    "Own pairs are images with their own captions, random pairs images with the captions of other "
    f"images, without labels. An AUC below {LEAST_AUC:g}, or random pairs above the highest "
    "threshold at more than a third of the rate of own pairs, means that the discriminator cannot "
    f"tell matching pairs from others. Fewer than {LEAST_FOUND:.0%} of own pairs above it mean "
    "that the discriminator finds hardly any false negative. Passing is no proof of the opposite: "
    "hard negatives are harder."
).replace("%", " %")


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
        verdict = _verdict(check)
        auc = None if check["auc"] is None else f"{check['auc']:.3f}"
        for at in check["above"] or [{}]:
            shares = (at.get(key) for key in ("own", "random"))
            percent = [None if share is None else f"{100 * share:.1f}" for share in shares]
            rows.append([name, check["pairs"], auc, at.get("threshold"), *percent, verdict])
    return [Table(TITLE, columns, rows, NOTE)]


def _verdict(check: Mapping[str, Any]) -> str:
    """Return the problems that a self-check found, or that there are none.

    Args:
        check: `SelfCheck.content`.
    """
    return "; ".join(check["problems"]) or ("passed" if check["above"] else "not possible")
