"""Draw search_space.svg: three systems by the search space M in one world."""

from __future__ import annotations

from research.curves import Curve, Series
from research.figures.recorded import content_of, drawn, figures_of
from research.studies.spread import Spread, spreads_of

PARTS = {8: ", M = train / 8", 2: ", M = train / 2", 1: ""}  # divisor of the data: end of the name
FIGURES = {
    "false_negative_rate": "false among the picked (percent)",
    "false_negative_rate_in_itm": "false negatives in ITM (percent)",
    "any_r1": "R@1, any valid pair (percent)",
}


def _one_world() -> str:
    """Return the figure: false negatives and retrieval for each search space, mean and spread."""
    pairs = content_of("compare_fresh")["parameters"]["train_size"]
    spreads = spreads_of(figures_of("compare_fresh"))
    curves = []
    for column, label in FIGURES.items():
        curve = Curve("", x_label="search space M (pairs)", y_label=label, log_x=True)
        for system in ("GRIT-VLP", "ECM", "MAFA"):
            own = {pairs // part: spreads[system + end][column] for part, end in PARTS.items()}
            curve.series.append(_series(system, own))
        curves.append(curve)
    return drawn(curves)


def _series(name: str, spreads: dict[float, Spread]) -> Series:
    y: list[float | None] = [one.mean for one in spreads.values()]
    return Series(name, list(spreads), y, [one.sd for one in spreads.values()])


SVGS = {"search_space.svg": _one_world}
