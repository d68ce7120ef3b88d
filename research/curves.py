"""Line charts as plain data, drawn as SVG by matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lavis_mafa.pages.charts import as_number

_WIDTH, _HEIGHT = 4.8, 3.0  # of a chart, inches
_MARKED = 80  # a series with more points than this is a bare line
_HUGE = 1e100  # beyond this a value is not drawn: axis arithmetic would overflow
COLOURS = ("#2b7cc4", "#d2691e", "#2a9246", "#9a55d6", "#c23f7e", "#8f7a12")
_INK = "#808890"  # of axes and text: readable on light and on dark pages
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lavis_mafa",  # equal charts are equal bytes
    "text.parse_math": False,  # a dollar sign in a name is no formula
    "font.size": 9,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
}


@dataclass
class Series:
    """One line of a curve: one y for each x, None for a gap.

    ``spread`` holds half the height of each point's error bar; None: no bar.
    """

    name: str
    x: list[float] = field(default_factory=list)
    y: list[float | None] = field(default_factory=list)
    spread: list[float | None] = field(default_factory=list)


@dataclass
class Curve:
    """A line chart. Values that are not finite, or on a logarithmic axis not above zero, are gaps.

    Attributes:
        log_x: logarithmic axis, with its ticks where the data are.
        bounds: what y can be, such as ``(0, 1)`` for shares: the axis does not go beyond.
        places: names of x = 1, 2, ... where x is no number; points are then not joined by lines.
    """

    title: str
    x_label: str = ""
    y_label: str = ""
    series: list[Series] = field(default_factory=list)
    note: str = ""
    log_x: bool = False
    bounds: tuple[float, float] | None = None
    places: list[str] = field(default_factory=list)


def curves_svg(curves: Sequence[Curve]) -> str | None:
    """Return curves side by side as an SVG file; None if there is nothing to draw.

    Raises:
        ValueError: if a series' ``x`` and ``y`` differ in length.
    """
    every = [(curve, _lines(curve)) for curve in curves]
    drawn = [(curve, lines) for curve, lines in every if any(ys for _, ys, _ in lines)]
    if not drawn:
        return None
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_SETTINGS):
        figure = Figure((_WIDTH * len(drawn), _HEIGHT), layout="constrained")
        for place, (curve, lines) in enumerate(drawn, 1):
            _draw(figure.add_subplot(1, len(drawn), place), curve, lines)
        file = io.StringIO()
        figure.savefig(
            file,
            format="svg",
            facecolor="white",
            metadata={"Date": None, "Creator": None},
        )
    return file.getvalue()


def _lines(curve: Curve) -> list[tuple[list[float], list[float], list[float]]]:
    """Return x, y (NaN for a gap) and error bars of each series; [] for one without values."""
    lines = []
    for one in curve.series:
        xs = [_drawable(x, curve.log_x) for x in one.x]
        ys = [_drawable(y) for y in one.y]
        spread = [s or 0.0 for s in one.spread]
        known = any(not math.isnan(x + y) for x, y in zip(xs, ys, strict=True))
        lines.append((xs, ys, spread) if known else ([], [], []))
    return lines


def _drawable(value: object, log: bool = False) -> float:
    number = as_number(value)
    usable = number is not None and abs(number) < _HUGE and (not log or number > 1 / _HUGE)
    return float(number) if usable and number is not None else math.nan


def _draw(axes: Any, curve: Curve, lines: Sequence[tuple[Any, Any, Any]]) -> None:
    for place, (one, (xs, ys, spread)) in enumerate(zip(curve.series, lines, strict=True)):
        style = {
            "color": COLOURS[place % len(COLOURS)],
            "linestyle": "none" if curve.places else ("-", "--")[place // len(COLOURS) % 2],
            "marker": "o" if len(xs) <= _MARKED else "",
            "markersize": 3,
            "label": one.name.removeprefix("_"),  # matplotlib hides names that begin with _
        }
        axes.errorbar(xs, ys, yerr=spread or None, **style)
    axes.set_xlabel(curve.x_label)
    axes.set_ylabel(curve.y_label)
    if all(x == round(x) for xs, _, _ in lines for x in xs if not math.isnan(x)):
        axes.xaxis.get_major_locator().set_params(integer=True)
    if curve.log_x:
        axes.set_xscale("log")
        ticks = sorted({x for xs, _, _ in lines for x in xs if not math.isnan(x)})
        axes.set_xticks(ticks, [f"{x:,.10g}" for x in ticks])
        axes.minorticks_off()
    if curve.bounds is not None:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, curve.bounds[0]), min(high, curve.bounds[1]))
    if curve.places:
        names = range(1, len(curve.places) + 1)
        axes.set_xticks(names, curve.places, rotation=35, ha="right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    if any(one.name for one in curve.series):
        axes.legend(frameon=False, fontsize=8)
