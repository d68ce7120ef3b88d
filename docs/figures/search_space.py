"""Draw search_space.svg from the recorded results: three systems over the search space M."""

from __future__ import annotations

import json
from pathlib import Path

from lavis_mafa.io.files import write_text
from lavis_mafa.pages.charts import Curve, Series, curves_svg
from lavis_mafa.studies.spread import Spread

HERE = Path(__file__).resolve().parent
RECORDED = HERE.parent / "results/compare_fresh.json"
SYSTEMS = ("GRIT-VLP", "ECM", "MAFA")
PARTS = {8: ", M = train / 8", 2: ", M = train / 2", 1: ""}  # divisor of the data: end of the name
FIGURES = {
    "false_negative_rate": "false among the picked (percent)",
    "false_negative_rate_in_itm": "false negatives in ITM (percent)",
    "any_r1": "R@1, any valid pair (percent)",
}


def svg() -> str:
    """Return the figure: false negatives and retrieval for each search space, mean and spread."""
    recorded = json.loads(RECORDED.read_text("utf-8"))
    pairs, rows = recorded["parameters"]["train_size"], recorded["rows"]
    curves = []
    for column, label in FIGURES.items():
        curve = Curve("", x_label="search space M (pairs)", y_label=label, log_x=True)
        for system in SYSTEMS:
            series = Series(system)
            for divisor, end in PARTS.items():
                spread = Spread(**rows[system + end]["spread"][column])
                series.x.append(pairs // divisor)
                series.y.append(spread.mean)
                series.spread.append(spread.sd)
            curve.series.append(series)
        curves.append(curve)
    drawn = curves_svg(curves)
    assert drawn is not None
    return drawn


if __name__ == "__main__":
    write_text(HERE / "search_space.svg", svg())
