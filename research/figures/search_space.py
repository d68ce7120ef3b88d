"""Draw the figures of the search space M.

search_space.svg has three systems in one world, search_space_worlds.svg two systems in all worlds.
"""

from __future__ import annotations

from lavis_mafa.pages.charts import Curve, Series
from research.figures.recorded import content_of, drawn, figures_of
from research.studies.spread import Spread, differences_to, spreads_of

BASE = "ALBEF-base"
PARTS = {8: ", M = train / 8", 2: ", M = train / 2", 1: ""}  # divisor of the data: end of the name
FIGURES = {
    "false_negative_rate": "false among the picked (percent)",
    "false_negative_rate_in_itm": "false negatives in ITM (percent)",
    "any_r1": "R@1, any valid pair (percent)",
}
# Recorded results by the name of the world and the size of its mini-batches.
WORLDS = {
    "clustered, mini-batches of 32": "compare_fresh",
    "clustered, mini-batches of 16": "compare_16",
    "dense, mini-batches of 64": "compare_dense",
    "sparse, mini-batches of 64": "compare_sparse",
    "sparse, mini-batches of 16": "compare_sparse_16",
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


def _all_worlds() -> str:
    """Return the figure: R@1 minus that of ALBEF-base with the same seed, mean and spread."""
    gains = {world: differences_to(figures_of(file), BASE) for world, file in WORLDS.items()}
    curves = []
    for system in ("GRIT-VLP", "ECM"):
        label = f"R@1 of {system} minus ALBEF-base's"
        curve = Curve("", x_label="search space M (percent of the data)", y_label=label, log_x=True)
        for world, rows in gains.items():
            own = {100 / part: rows[system + end]["any_r1"] for part, end in PARTS.items()}
            curve.series.append(_series(world, own))
        curves.append(curve)
    return drawn(curves)


def _series(name: str, spreads: dict[float, Spread]) -> Series:
    y: list[float | None] = [one.mean for one in spreads.values()]
    return Series(name, list(spreads), y, [one.sd for one in spreads.values()])


SVGS = {"search_space.svg": _one_world, "search_space_worlds.svg": _all_worlds}
