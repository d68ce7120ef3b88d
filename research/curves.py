"""Line charts as plain data, drawn as SVG by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_WIDTH, _HEIGHT = 4.8, 3.0  # of a chart, inches
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
    """One line of a curve; ``spread``: half the height of each point's error bar, if any."""

    name: str
    x: list[float]
    y: list[float]
    spread: list[float | None]


@dataclass
class Curve:
    """A line chart.

    Attributes:
        log_x: logarithmic axis, with its ticks where the data are.
        places: names of x = 1, 2, ... where x is no number; points are then not joined by lines.
    """

    title: str
    x_label: str = ""
    y_label: str = ""
    series: list[Series] = field(default_factory=list)
    log_x: bool = False
    places: list[str] = field(default_factory=list)


def curves_svg(curves: Sequence[Curve]) -> str:
    """Return curves side by side as an SVG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_SETTINGS):
        figure = Figure((_WIDTH * len(curves), _HEIGHT), layout="constrained")
        for place, curve in enumerate(curves, 1):
            _draw(figure.add_subplot(1, len(curves), place), curve)
        file = io.StringIO()
        figure.savefig(
            file,
            format="svg",
            facecolor="white",
            metadata={"Date": None, "Creator": None},
        )
    return file.getvalue()


def _draw(axes: Any, curve: Curve) -> None:
    for place, one in enumerate(curve.series):
        axes.errorbar(
            one.x,
            one.y,
            yerr=[value or 0.0 for value in one.spread],
            color=COLOURS[place % len(COLOURS)],
            linestyle="none" if curve.places else "-",
            marker="o",
            markersize=3,
            label=one.name,
        )
    axes.set_xlabel(curve.x_label)
    axes.set_ylabel(curve.y_label)
    xs = sorted({x for one in curve.series for x in one.x})
    if all(x == round(x) for x in xs):
        axes.xaxis.get_major_locator().set_params(integer=True)
    if curve.log_x:
        axes.set_xscale("log")
        axes.set_xticks(xs, [f"{x:,.10g}" for x in xs])
        axes.minorticks_off()
    if curve.places:
        names = range(1, len(curve.places) + 1)
        axes.set_xticks(names, curve.places, rotation=35, ha="right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    if any(one.name for one in curve.series):
        axes.legend(frameon=False, fontsize=8)
