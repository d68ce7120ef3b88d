"""Con-D's self-checks that the runs of a study logged, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lavis_mafa.analysis.self_check import NOTE, TITLE, verdict_of
from lavis_mafa.models.con_d.self_check import MEANING
from lavis_mafa.pages.charts import Cell, Table
from lavis_mafa.runners.con_d_check import RECORD
from lavis_mafa.runners.run_log import read_log
from lavis_mafa.studies.plan import Plan
from lavis_mafa.studies.spread import Spread

CONTENT = ("name", "pairs", "auc", "above", "problems")  # of a record: `SelfCheck.content`
NAMED = 4  # rows that a warning names, at most

# Records by row and seed.
Checks = Mapping[str, Mapping[int, Mapping[str, Any]]]


def self_checks_of(plan: Plan) -> Checks:
    """Return the self-check of every completed run that has one, by row and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row, by_seed in plan.of.items():
        for seed, jobs in by_seed.items():
            for job in jobs.values():
                records = read_log(job.folder, RECORD) if job.done else []
                if records:  # of several, the last counts: the run may have been restarted
                    check = {key: records[-1].get(key) for key in CONTENT}
                    found.setdefault(row, {})[seed] = check
    return found


def self_checks_table(checks: Checks) -> list[Table]:
    """Return the table of the self-checks, ``mean ± sd`` over seeds; [] if there are none.

    The shares are those above the highest threshold, since pairs above it become positives. The
    note begins with a warning for every row whose Con-D fails.
    """
    columns = ["row", "n", "AUC", "threshold", "own above %", "random above %", "verdict"]
    table = Table(TITLE, columns)
    for row, by_seed in checks.items():
        highest = [check["above"][-1] if check["above"] else {} for check in by_seed.values()]
        cells: list[Cell] = [_text([check["auc"] for check in by_seed.values()], 3)]
        # Thresholds that were calibrated for each seed differ.
        cells.append(" ".join({f"{at['threshold']:g}": None for at in highest if at}) or None)
        for key in ("own", "random"):
            cells.append(_text([100 * at[key] if at else None for at in highest], 1))
        table.rows.append([row, len(by_seed), *cells, _verdict(by_seed)])
    table.note = "\n\n".join([*_warnings(checks), NOTE])
    return [table] if table.rows else []


def _text(values: Sequence[float | None], digits: int) -> str | None:
    spread = Spread.of(values)
    return spread.text(digits) if spread else None


def _verdict(by_seed: Mapping[int, Mapping[str, Any]]) -> str:
    failed = [seed for seed, check in by_seed.items() if check["problems"]]
    if not failed:
        return "; ".join(dict.fromkeys(map(verdict_of, by_seed.values())))
    return "fails" if len(by_seed) == 1 else f"fails with {_seeds(failed)}"


def _warnings(checks: Checks) -> list[str]:
    """Return a warning for each group of rows whose Con-Ds fail in the same way."""
    groups: dict[str, list[str]] = {}
    for row, by_seed in checks.items():
        seeds: dict[str, list[int]] = {}
        for seed, check in by_seed.items():
            if check["problems"]:
                seeds.setdefault(verdict_of(check), []).append(seed)
        parts = [f"with {_seeds(own)}, {problems}" for problems, own in seeds.items()]
        if parts:
            groups.setdefault("; ".join(parts), []).append(row)
    found = []
    for problems, rows in groups.items():
        more = [f"{len(rows) - NAMED} more rows"] if len(rows) > NAMED else []
        names = _listed([*rows[:NAMED], *more])
        found.append(f"Warning: Con-D of {names} fails its self-check: {problems}. {MEANING}.")
    return found


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {_listed([str(seed) for seed in seeds])}"


def _listed(names: Sequence[str]) -> str:
    """Return names as a text: "a", "a and b" or "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
