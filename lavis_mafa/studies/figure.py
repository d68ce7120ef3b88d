"""The figure of a study: its columns over what varies, as SVG and as curves of the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from lavis_mafa.io.files import atomic_write
from lavis_mafa.pages.report import Curve, Series
from lavis_mafa.studies.parts import ROW, Column, Study
from lavis_mafa.studies.spread import Spread

WIDE = 10.0  # values that many times apart stand on a logarithmic axis
INCHES, NAMES = 3.6, 1.0  # of a column, and for the names of rows below it

Spreads = Mapping[str, Mapping[str, Spread]]  # by row and column


@dataclass
class Line:
    """Points that belong together: a place on the x axis and what was measured there."""

    name: str
    points: list[tuple[float, Spread]]


def lines_of(study: Study, spreads: Spreads, column: Column) -> tuple[list[Line], list[str]]:
    """The lines of one column, and names of the places 1, 2, ... where x is no number.

    With ``row`` as x every row has a place; with a key that varies there is a line for all rows
    that differ in this key alone.
    """
    values = [row.values.get(study.x, row.name) for row in study.rows]
    names = list(dict.fromkeys(str(value) for value in values))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    lines: dict[str, Line] = {}
    for row, value in zip(study.rows, values, strict=True):
        others = {study.titles.get(k, k): v for k, v in row.values.items() if k != study.x}
        label = (
            ""
            if study.x == ROW
            else ", ".join(
                [*([row.base] if row.base else []), *(f"{k}={v}" for k, v in others.items())]
            )
        )
        line = lines.setdefault(label, Line(label, []))
        spread = spreads.get(row.name, {}).get(column.name)
        if spread:
            line.points.append((value if numbers else 1 + names.index(str(value)), spread))
    return [line for line in lines.values() if line.points], [] if numbers else names


def curves_of(study: Study, spreads: Spreads, columns: Mapping[str, Column]) -> list[Curve]:
    """The same for the page, means alone."""
    curves = []
    for name in study.y:
        lines, places = lines_of(study, spreads, columns[name])
        series = [
            Series(one.name or "mean", [x for x, _ in one.points], [s.mean for _, s in one.points])
            for one in lines
        ]
        note = "; ".join(f"{place}: {text}" for place, text in enumerate(places, 1))
        title = columns[name].title
        curves.append(Curve(title, _x_title(study), title, series, note=note))
    return curves


def write_figure(path: Path, study: Study, spreads: Spreads, columns: Mapping[str, Column]) -> bool:
    """Draw every column of the figure over x, means with standard deviations, as SVG.

    Returns:
        Whether there was anything to draw.
    """
    drawn = [(columns[name], *lines_of(study, spreads, columns[name])) for name in study.y]
    drawn = [one for one in drawn if one[1]]
    if not drawn:
        path.unlink(missing_ok=True)
        return False
    # The same figures give the same file; texts stay texts.
    with matplotlib.rc_context({"svg.hashsalt": study.path.stem, "svg.fonttype": "none"}):
        height = INCHES + (NAMES if drawn[0][2] else 0.0)
        figure = Figure(figsize=(INCHES * len(drawn), height), layout="constrained")
        for place, (column, lines, places) in enumerate(drawn, 1):
            _draw(figure.add_subplot(1, len(drawn), place), study, column, lines, places)
        with atomic_write(path) as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
    return True


def _draw(axes: Any, study: Study, column: Column, lines: list[Line], places: list[str]) -> None:
    for line in lines:
        points = sorted(line.points, key=lambda point: point[0])
        axes.errorbar(
            [x for x, _ in points],
            [spread.mean for _, spread in points],
            yerr=[spread.sd or 0.0 for _, spread in points],
            fmt="o" if places else "o-",
            capsize=3,
            label=_plain(line.name),
        )
    axes.set_ylabel(_plain(column.title))
    axes.grid(alpha=0.3)
    xs = [x for line in lines for x, _ in line.points]
    if places:
        axes.set_xticks(
            range(1, len(places) + 1), list(map(_plain, places)), rotation=45, ha="right"
        )
        axes.set_xlim(0.5, len(places) + 0.5)
    else:
        axes.set_xlabel(_plain(_x_title(study)))
        if min(xs) > 0 and max(xs) >= WIDE * min(xs):
            axes.set_xscale("log")
            axes.set_xticks(sorted(set(xs)), [f"{x:,g}" for x in sorted(set(xs))])
            axes.minorticks_off()
    if any(line.name for line in lines):
        axes.legend(fontsize="small")


def _plain(text: str) -> str:
    """Dollar signs would begin a formula."""
    return text.replace("$", r"\$")


def _x_title(study: Study) -> str:
    return study.titles.get(study.x, study.x)
