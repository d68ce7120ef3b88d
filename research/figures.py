"""Draw the figures of the docs from the recorded results into ``docs/figures``."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from lavis_mafa.io.files import ROOT, write_text
from research.studies.spread import Spread, frame_of, gains_of, spreads_of

_COLOURS = ("#2b7cc4", "#d2691e", "#2a9246")
_INK = "#808890"  # of axes and text: readable on light and on dark pages
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lavis_mafa",  # equal figures are equal bytes
    "font.size": 9,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
}
# Of search_space.svg: the divisor of the data's size, and the end of the row's name.
_PARTS = {8: ", M = train / 8", 2: ", M = train / 2", 1: ""}
_LABELS = {
    "false_negative_rate": "false among the picked (percent)",
    "false_negative_rate_in_itm": "false negatives in ITM (percent)",
    "any_r1": "R@1, any valid pair (percent)",
}
# For three_data_sets.svg.
_BASE, _RANDOM_ECM = "ALBEF-base", "ALBEF-base + ECM"
_SYSTEMS = [_BASE, _RANDOM_ECM, "GRIT-VLP", "ECM", "MAFA"]
_APART = 0.16  # offsets of the data sets' marks at one system


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments, since all figures are drawn."""


def run(args: argparse.Namespace) -> None:
    """Draw all figures."""
    for name in FIGURES:
        write_text(ROOT / "docs/figures" / name, figure_svg(name))
        print(f"written: docs/figures/{name}")


def figure_svg(name: str) -> str:
    """Return a figure of the docs as an SVG file."""
    draw, count = FIGURES[name]
    with rc_context(_SETTINGS):
        figure = Figure((4.8 * count, 3.0), layout="constrained")
        draw(figure.subplots(1, count))
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", alpha=0.3)
            axes.legend(frameon=False, fontsize=8)
        file = io.StringIO()
        figure.savefig(
            file, format="svg", facecolor="white", metadata={"Date": None, "Creator": None}
        )
    return file.getvalue()


def _mark(axes: Any, name: str, x: Sequence[float], spreads: Sequence[Any], line: str) -> None:
    """Mark means with their standard deviations, in the next colour."""
    axes.errorbar(
        x,
        [one.mean for one in spreads],
        yerr=[one.sd or 0.0 for one in spreads],
        color=_COLOURS[len(axes.containers)],
        linestyle=line,
        marker="o",
        markersize=3,
        label=name,
    )


def _content_of(name: str) -> Any:
    return json.loads((ROOT / f"docs/results/{name}.json").read_text(encoding="utf-8"))


def _figures_of(name: str) -> pd.DataFrame:
    """Return recorded results by row and seed."""
    return frame_of({row: own["seeds"] for row, own in _content_of(name)["rows"].items()})


def _search_space(panels: Any) -> None:
    """Draw three systems by the search space M in one world: false negatives and retrieval."""
    pairs = _content_of("compare_fresh")["parameters"]["train_size"]
    spreads = spreads_of(_figures_of("compare_fresh"))
    x = [pairs // part for part in _PARTS]
    for axes, (column, label) in zip(panels, _LABELS.items(), strict=True):
        for system in ("GRIT-VLP", "ECM", "MAFA"):
            _mark(axes, system, x, [spreads[system + end][column] for end in _PARTS.values()], "-")
        axes.set(xlabel="search space M (pairs)", ylabel=label, xscale="log")
        axes.set_xticks(x, [f"{one:,}" for one in x])
        axes.minorticks_off()


def _three_data_sets(panels: Any) -> None:
    """Draw false negatives that ITM learns, and R@1 compared with ALBEF-base, on three sets."""
    ten, more = _figures_of("compare_ten"), _figures_of("compare_ten_more")
    dense, ucm = _figures_of("compare_dense"), _figures_of("ucm")
    ucm = ucm.rename(index={"random + ECM": _RANDOM_ECM}, level="row")
    for figures in (ten, more, dense):
        figures["r1"] = figures["any_r1"]
    ucm["r1"] = (ucm["valid_txt_r1"] + ucm["valid_img_r1"]) / 2
    data_sets = {
        "toy world: clustered": {**dict.fromkeys(_SYSTEMS, ten), _RANDOM_ECM: more},
        "toy world: dense": dict.fromkeys(_SYSTEMS, dense),
        "aerial photographs: UCM-Captions": dict.fromkeys(_SYSTEMS, ucm),
    }
    left, right = panels
    for number, (name, of_system) in enumerate(data_sets.items()):
        x = [place + _APART * (number - 1) for place in range(1, len(_SYSTEMS) + 1)]
        false, gains = [], []
        for system, figures in of_system.items():
            false.append(spreads_of(figures)[system]["false_negative_rate_in_itm"])
            gains.append(Spread.of(gains_of(figures, system, _BASE, "r1")))
        _mark(left, name, x, false, "none")
        _mark(right, name, x, gains, "none")
    left.set_ylabel("false negatives in ITM (percent)")
    right.set_ylabel("R@1, any valid pair, minus ALBEF-base's")
    for axes in panels:
        axes.set_xticks(range(1, len(_SYSTEMS) + 1), _SYSTEMS, rotation=35, ha="right")


FIGURES = {"search_space.svg": (_search_space, 3), "three_data_sets.svg": (_three_data_sets, 2)}
