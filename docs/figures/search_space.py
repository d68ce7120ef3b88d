"""Draw the figures of the search space M from the recorded results.

search_space.svg has three systems in one world, search_space_worlds.svg two systems in all worlds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lavis_mafa.io.files import write_text
from lavis_mafa.pages.charts import Curve, Series, curves_svg
from lavis_mafa.studies.spread import Spread, differences_to

HERE = Path(__file__).resolve().parent
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


def one_world() -> str:
    """Return the figure: false negatives and retrieval for each search space, mean and spread."""
    results = recorded("compare_fresh")
    pairs, rows = results["parameters"]["train_size"], results["rows"]
    curves = []
    for column, label in FIGURES.items():
        curve = Curve("", x_label="search space M (pairs)", y_label=label, log_x=True)
        for system in ("GRIT-VLP", "ECM", "MAFA"):
            spreads = {
                pairs // divisor: Spread(**rows[system + end]["spread"][column])
                for divisor, end in PARTS.items()
            }
            curve.series.append(series_of(system, spreads))
        curves.append(curve)
    return drawn(curves)


def all_worlds() -> str:
    """Return the figure: R@1 minus that of ALBEF-base with the same seed, mean and spread."""
    worlds = {}
    for world, file in WORLDS.items():
        seeds = {name: row["seeds"] for name, row in recorded(file)["rows"].items()}
        worlds[world] = differences_to(seeds, BASE)
    curves = []
    for system in ("GRIT-VLP", "ECM"):
        label = f"R@1 of {system} minus ALBEF-base's"
        curve = Curve("", x_label="search space M (percent of the data)", y_label=label, log_x=True)
        for world, gains in worlds.items():
            spreads = {100 / part: gains[system + end]["any_r1"] for part, end in PARTS.items()}
            curve.series.append(series_of(world, spreads))
        curves.append(curve)
    return drawn(curves)


def recorded(file: str) -> Any:
    """Return recorded results."""
    return json.loads((HERE.parent / f"results/{file}.json").read_text("utf-8"))


def series_of(name: str, spreads: dict[float, Spread]) -> Series:
    """Return the line of spreads by x."""
    y: list[float | None] = [one.mean for one in spreads.values()]
    return Series(name, list(spreads), y, [one.sd for one in spreads.values()])


def drawn(curves: list[Curve]) -> str:
    """Return the curves side by side as an SVG file."""
    svg = curves_svg(curves)
    assert svg is not None
    return svg


SVGS = {"search_space.svg": one_world, "search_space_worlds.svg": all_worlds}

if __name__ == "__main__":
    for name, svg in SVGS.items():
        write_text(HERE / name, svg())
