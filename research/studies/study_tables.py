"""Format the tables of a study: figures, claims and a paper's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lavis_mafa.tools.charts import Cell, Table
from research.studies.plan import written
from research.studies.results import Results
from research.studies.spread import (
    LEVEL,
    Spread,
    Spreads,
    gains_of,
    holm,
    spread_of_gain,
    spreads_of,
)
from research.studies.study_parts import Column, Row, Study

OURS, ROWS, CLAIMS = "Results", "The rows", "Claims"
_VERDICTS = {"holds": "hold", "does not hold": "do not hold", "open": "are open"}


def tables_of(results: Results) -> list[Table]:
    """Return the tables of our figures (``mean ± sd`` over seeds), the claims and the paper's
    numbers."""
    study, spreads, tables = results.study, spreads_of(results.figures), list[Table]()
    grouped = {name for names in study.file.tables.values() for name in names}
    others = [column.name for column in study.columns if column.name not in grouped]
    for title, names in {**study.file.tables, OURS: others}.items():
        columns = [column for column in study.columns if column.name in names]
        if columns:
            tables.append(_table(study, title, columns, spreads))
    found = [*tables, _claims(results), _paper(study)]
    return [table for table in found if table.rows]


def _table(study: Study, title: str, columns: Sequence[Column], spreads: Spreads) -> Table:
    titles = list(dict.fromkeys(title for row in study.rows for title in row.cells))
    table = Table(title, [*titles, "n", *(column.title for column in columns)])
    for row in study.rows:
        own = spreads.get(row.name, {})
        count = max((spread.n for spread in own.values()), default=0)
        cells: list[Cell] = [*(row.cells.get(title, "") for title in titles), count]
        for column in columns:
            spread = own.get(column.name)
            cells.append(spread.text(column.digits) if spread else None)
        table.rows.append(cells)
    return table


def _claims(results: Results) -> Table:
    """Return, for every claim, the paired difference, its 95 % interval and a verdict.

    A claim about several figures has a line for each, and the largest p-value of all.
    """
    columns = ["claim", "source", "figure", "gain", "95 % interval", "p", "from, to", "seeds"]
    table = Table(CLAIMS, [*columns, "verdict"])
    catalogue, p_values = results.study.catalogue, dict[str, float]()
    lines: list[tuple[str, Spread, list[Cell], list[Cell]]] = []
    for claim in results.study.file.claims:
        for name in claim.columns:
            column, lower = catalogue[name], claim.better == "lower"
            gains = gains_of(results.figures, claim.row, claim.than, name, lower)
            mine, theirs = (results.by_image.get(row, {}) for row in (claim.row, claim.than))
            spread = spread_of_gain(gains, mine, theirs, name, lower)
            if spread is None:
                continue
            levels = [
                results.figures.xs(row, level="row").loc[gains.index, name].mean()
                for row in (claim.than, claim.row)
            ]
            shown: list[Cell] = [claim.claim, claim.source or None, column.title]
            shown += [f"{spread.mean:+.{column.digits}f}", spread.interval_text(column.digits)]
            more: list[Cell] = [", ".join(f"{level:.{column.digits}f}" for level in levels)]
            more.append(f"{int((gains > 0).sum())} of {len(gains)}")
            lines.append((claim.claim, spread, shown, more))
            # A single seed gives NaN, which stays NaN.
            p_values[claim.claim] = np.maximum(p_values.get(claim.claim, 0.0), spread.p_value)
    corrected = holm(p_values)
    for name, spread, shown, more in lines:
        p = corrected.get(name)
        says = verdict(spread.mean, p)
        table.rows.append([*shown, None if p is None else f"{p:.2g}", *more, says])
    table.note = _note_on_claims(results, len(corrected))
    return table


def _note_on_claims(results: Results, count: int) -> str:
    text = (
        "Gain: difference with the same seed, positive if the claim is right. From, to: the means "
        f"of both rows. p: two-sided, corrected for the {count} claims (Holm). With p at most "
        f"{LEVEL:g} a claim holds if the gain is positive and does not hold if it is negative; "
        "otherwise it is open. "
    )
    if any(results.by_image.values()):
        text += "Intervals and p are for other seeds and other test images."
    else:
        text += "Intervals and p are for other seeds with the same test images."
    used = {name for claim in results.study.file.claims for name in claim.columns}
    ranges = [one for name, one in results.study.catalogue.items() if name in used and one.range]
    for one in ranges:
        chance, ceiling = one.range
        text += f" {one.title}: chance {chance:g}, ceiling {ceiling:g}."
    return text


def verdict(gain: float, p_value: float | None) -> str:
    """Return whether a claim holds, by its gain and the corrected p-value."""
    if p_value is None or p_value > LEVEL:
        return "open"
    return "holds" if gain > 0 else "does not hold"


def outcome(results: Results) -> str:
    """Describe how many of the claims hold."""
    if results.figures.empty:
        return "No run is complete yet."
    claims = list({row[0]: row[-1] for row in _claims(results).rows}.values())
    found = [f"{claims.count(word)} {words}" for word, words in _VERDICTS.items()]
    return f"Of {len(claims)} claims, {found[0]}, {found[1]}, and {found[2]}." if claims else ""


def _paper(study: Study) -> Table:
    paper = study.file.paper
    table = Table(f"The paper's numbers: {study.file.source}")
    if paper is None:
        return table
    table.columns, table.note = paper.columns, paper.about
    digits = [_decimals(column) for column in zip(*paper.rows, strict=True)]
    for row in paper.rows:
        shown = [
            f"{value:.{n}f}" if isinstance(value, int | float) else value
            for value, n in zip(row, digits, strict=True)
        ]
        table.rows.append(shown)
    return table


def _decimals(values: Sequence[Any]) -> int:
    texts = [str(value) for value in values if isinstance(value, float)]
    return max((len(text.partition(".")[2]) for text in texts), default=0)


def rows_table(results: Results) -> Table:
    """Return a table of each row's options, and of the folder of its first seed if known."""
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
    """Return the options of a row, as a user types them."""
    return " ".join(f"{key}={written(value)}" for key, value in row.options.items())
