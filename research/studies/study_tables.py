"""The tables of a study: figures, paired differences, claims, self-checks and a paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lavis_mafa.judges.self_check import MEANING
from lavis_mafa.tools.charts import Cell, Table
from lavis_mafa.tools.judge_check import NOTE, TITLE, verdict_of
from research.studies.plan import written
from research.studies.results import ByRowAndSeed, Results
from research.studies.spread import (
    LEVEL,
    Spread,
    Spreads,
    corrected_p_values,
    differences_to,
    gains_of,
    spreads_of,
)
from research.studies.study_file import Column, Row, Study

OURS, ROWS, CLAIMS = "Results", "The rows", "Claims"
_VERDICTS = {"holds": "hold", "does not hold": "do not hold", "open": "are open"}
_NAMED = 4  # rows that a warning names, at most


def tables_of(results: Results) -> list[Table]:
    """Return our tables, ``mean ± sd`` over seeds, the differences to a row, and the paper's."""
    study, spreads, tables = results.study, spreads_of(results.figures), list[Table]()
    file, reference = study.file, study.file.reference
    grouped = {name for names in file.tables.values() for name in names}
    others = [column.name for column in study.columns if column.name not in grouped]
    for title, names in {**file.tables, OURS: others}.items():
        columns = [column for column in study.columns if column.name in names]
        if columns:
            tables.append(_table(study, title, columns, spreads))
        if reference and title == reference.after:
            tables += _differences(results)
    if reference and not reference.after:
        tables += _differences(results)
    found = [*tables, _claims(results), _paper(study), _self_checks(results.checks)]
    return [table for table in found if table.rows]


def _table(
    study: Study,
    title: str,
    columns: Sequence[Column],
    spreads: Spreads,
    differences: bool = False,
) -> Table:
    titles = _titles([row.cells for row in study.rows])
    table = Table(title, [*titles, "n", *(column.title for column in columns)])
    for row in study.rows:
        own = spreads.get(row.name, {})
        if differences and not own:
            continue
        count = max((spread.n for spread in own.values()), default=0)
        cells: list[Cell] = [*(row.cells.get(title, "") for title in titles), count]
        for column in columns:
            spread = own.get(column.name)
            if spread is None:
                cells.append(None)
            elif differences:
                cells.append(spread.difference_text(column.digits))
            else:
                cells.append(spread.text(column.digits))
        table.rows.append(cells)
    return table


def _differences(results: Results) -> list[Table]:
    """Return the differences to the reference row; the last columns name the significant ones."""
    study, reference = results.study, results.study.file.reference
    assert reference is not None
    differences = differences_to(results.figures, reference.row)
    if not differences:
        return []
    shown = {column.name: column for column in study.columns}
    columns = [shown[name] for name in reference.columns if name in shown]
    title = f"Difference to {reference.row} with the same seed"
    table = _table(study, title, columns, differences, differences=True)
    corrected = {one.name: corrected_p_values(differences, one.name) for one in columns}
    if not any(corrected.values()):
        return [table]
    table.columns += ["significant alone", "significant among all rows"]
    rows = [row.name for row in study.rows if differences.get(row.name)]
    for cells, row in zip(table.rows, rows, strict=True):
        own = differences[row]
        alone = [one for one in columns if one.name in own and own[one.name].p_value <= LEVEL]
        among = [one for one in alone if corrected[one.name][row] <= LEVEL]
        cells += [", ".join(one.title for one in found) or None for found in (alone, among)]
    table.note = (
        "Mean difference, and in parentheses its 95 % interval. Significant alone: the interval "
        "excludes 0, which is a two-sided paired t-test at 5 %. Significant among all rows: also "
        f"by Holm's correction for the {len(rows)} rows of a column."
    )
    return [table]


def _claims(results: Results) -> Table:
    """Return for every claim the paired difference, its 95 % interval and a verdict."""
    columns = ["claim", "source", "figure", "gain", "95 % interval", "seeds", "verdict"]
    table = Table(CLAIMS, columns)
    table.note = (
        "Gain: difference with the same seed, positive if the claim is right. It holds if the "
        "interval is above zero and does not hold if it is below; otherwise it is open."
    )
    for claim in results.study.file.claims:
        column, lower = results.study.catalogue[claim.column], claim.better == "lower"
        gains = gains_of(results.figures, claim.row, claim.than, column.name, lower)
        spread = Spread.of(gains)
        if spread is None:
            continue
        mean, interval = f"{spread.mean:+.{column.digits}f}", spread.interval_text(column.digits)
        right = f"{int((gains > 0).sum())} of {len(gains)}"
        cells = [claim.claim, claim.source or None, column.title, mean, interval, right]
        table.rows.append([*cells, verdict(spread.interval)])
    return table


def verdict(interval: tuple[float, float] | None) -> str:
    """Return whether a claim holds, by the 95 % interval of the gain."""
    if interval is None or interval[0] <= 0 <= interval[1]:
        return "open"
    return "holds" if interval[0] > 0 else "does not hold"


def outcome(results: Results) -> str:
    """Return in words how many of the claims hold."""
    if results.figures.empty:
        return "No run is complete yet."
    claims = [row[-1] for row in _claims(results).rows]
    found = [f"{claims.count(word)} {words}" for word, words in _VERDICTS.items()]
    return f"Of {len(claims)} claims, {found[0]}, {found[1]}, and {found[2]}." if claims else ""


def _paper(study: Study) -> Table:
    paper = study.file.paper
    table = Table(f"The paper's numbers: {study.file.source}")
    if paper is None:
        return table
    titles = _titles([cells for cells, _ in study.paper])
    table.columns, table.note = [*titles, *paper.columns], paper.about
    places = range(len(paper.columns))
    digits = [_decimals([numbers[k] for _, numbers in study.paper if numbers]) for k in places]
    for cells, numbers in study.paper:
        shown = [
            f"{value:.{n}f}" if isinstance(value, int | float) else value
            for value, n in zip(numbers or [None for _ in digits], digits, strict=True)
        ]
        table.rows.append([*(cells.get(title, "") for title in titles), *shown])
    return table


def _decimals(values: Sequence[Any]) -> int:
    texts = [str(value) for value in values if isinstance(value, float)]
    return max((len(text.partition(".")[2]) for text in texts), default=0)


def _titles(cells: Sequence[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(title for one in cells for title in one))


def rows_table(results: Results) -> Table:
    """Return what each row sets, and where its first seed was run if the folders are known."""
    rows, folders = results.study.rows, results.folders
    sources = ["source"] if any(row.source for row in rows) else []
    known = any(folders.values())
    table = Table(ROWS, ["row", *sources, "options", *(["folders"] if known else [])])
    for row in rows:
        cells: list[Cell] = [row.source or None] if sources else []
        cells.append(shown_options(row))
        if known:
            cells.append(" ".join(next(iter(folders[row.name].values())).values()))
        table.rows.append([row.name, *cells])
    return table


def shown_options(row: Row) -> str:
    """Return what a row sets, as a user types it."""
    return " ".join(f"{key}={written(value)}" for key, value in row.options.items())


# Con-D's self-checks


def _self_checks(checks: ByRowAndSeed) -> Table:
    """Return the table of the self-checks, ``mean ± sd`` over seeds.

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
        failed = [seed for seed, check in by_seed.items() if check["problems"]]
        says = "; ".join(dict.fromkeys(map(verdict_of, by_seed.values())))
        if failed:
            says = "fails" if len(by_seed) == 1 else f"fails with {_seeds(failed)}"
        table.rows.append([row, len(by_seed), *cells, says])
    table.note = "\n\n".join([*_warnings(checks), NOTE])
    return table


def _text(values: Sequence[float | None], digits: int) -> str | None:
    spread = Spread.of(values)
    return spread.text(digits) if spread else None


def _warnings(checks: ByRowAndSeed) -> list[str]:
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
        more = [f"{len(rows) - _NAMED} more rows"] if len(rows) > _NAMED else []
        names = _listed([*rows[:_NAMED], *more])
        found.append(f"Warning: Con-D of {names} fails its self-check: {problems}. {MEANING}.")
    return found


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {_listed([str(seed) for seed in seeds])}"


def _listed(names: Sequence[str]) -> str:
    """Return names as a text: "a", "a and b" or "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
