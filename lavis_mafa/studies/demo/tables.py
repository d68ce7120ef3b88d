"""Tables of the compared systems: means over seeds, spreads, and differences to one system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_mafa.pages.report import Table
from lavis_mafa.studies.demo.page import GROUPS, SHARES
from lavis_mafa.studies.spread import Figures, Spread, differences_to, spreads_of

TRAINING = {"ITC temperature": {"temperature": "at the end"}}
HEADLINES = {
    "txt_r1": "TR@1",
    "img_r1": "IR@1",
    "valid_txt_r1": "any TR@1",
    "valid_img_r1": "any IR@1",
    "txt_map_r": "TR mAP@R",
    "img_map_r": "IR mAP@R",
    "itm_auc": "ITM AUC",
}
PRECISE = ("itm_auc", "temperature")  # numbers around 0 to 1 and no percentages


def tables_of(figures: Figures, titles: Mapping[str, str], reference: str) -> list[Table]:
    """Tables of ``mean ± sd``: all figures of all systems, and their differences to one."""
    tables = []
    spreads = spreads_of(figures)
    for title, columns in [*GROUPS.items(), *TRAINING.items()]:
        scale = 100.0 if columns is SHARES else 1.0
        tables.append(_table(title, columns, spreads, titles, scale=scale))
    if reference in figures:
        title = f"Difference to {titles[reference]} with the same seed"
        differences = differences_to(figures, reference)
        tables.append(_table(title, HEADLINES, differences, titles, sign="+"))
    return tables


def _table(
    title: str,
    columns: Mapping[str, str],
    spreads: Mapping[str, Mapping[str, Spread]],
    titles: Mapping[str, str],
    **form: Any,
) -> Table:
    rows: list[list[Any]] = []
    for system, own in spreads.items():
        told = [
            own[key].told(3 if key in PRECISE else 1, **form) if key in own else None
            for key in columns
        ]
        rows.append([titles[system], max(spread.n for spread in own.values()), *told])
    return Table(title, ["system", "n", *columns.values()], rows)
