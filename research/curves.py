"""Draw line charts as SVG by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from research.studies.spread import Spread

_WIDTH, _HEIGHT = 4.8, 3.0  # size of a chart in inches
COLOURS = ("#2b7cc4", "#d2691e", "#2a9246", "#9a55d6", "#c23f7e", "#8f7a12")
_INK = "#808890"  # colour of axes and text, readable on light and dark pages
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lavis_mafa",  # equal charts are equal bytes
    "text.parse_math": False,  # a dollar sign in a name does not begin a formula
    "font.size": 9,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
}


@dataclass
class Curve:
    """A line chart.

    Attributes:
        series: name of each line, x, and y with its spread, the error bar.
        log_x: use a logarithmic x axis, with ticks at the data.
        places: names of x = 1, 2, ... if x is not a number; points are then not joined by lines.
    """

    x_label: str = ""
    y_label: str = ""
    series: list[tuple[str, list[float], list[Spread]]] = field(default_factory=list)
    log_x: bool = False
    places: list[str] = field(default_factory=list)


def curves_svg(curves: Sequence[Curve]) -> str:
    """Return an SVG with the charts side by side."""
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
    for place, (name, x, spreads) in enumerate(curve.series):
        axes.errorbar(
            x,
            [one.mean for one in spreads],
            yerr=[one.sd or 0.0 for one in spreads],
            color=COLOURS[place % len(COLOURS)],
            linestyle="none" if curve.places else "-",
            marker="o",
            markersize=3,
            label=name,
        )
    axes.set_xlabel(curve.x_label)
    axes.set_ylabel(curve.y_label)
    xs = sorted({x for _, places, _ in curve.series for x in places})
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
    if len(curve.series) > 1:
        axes.legend(frameon=False, fontsize=8)
