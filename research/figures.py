"""Draw the figures of the docs from the recorded results into ``docs/figures``."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pandas as pd

from lavis_mafa.io.files import ROOT, write_text
from research.curves import Curve, curves_svg
from research.studies.spread import differences_to, frame_of, spreads_of

# For search_space.svg: the divisor of the data's size, and the suffix of the row's name.
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
    for name, curves in FIGURES.items():
        write_text(ROOT / "docs/figures" / name, curves_svg(curves()))
        print(f"written: docs/figures/{name}")


def _content_of(name: str) -> Any:
    return json.loads((ROOT / f"docs/results/{name}.json").read_text(encoding="utf-8"))


def _figures_of(name: str) -> pd.DataFrame:
    """Return recorded results by row and seed."""
    return frame_of({row: own["seeds"] for row, own in _content_of(name)["rows"].items()})


def search_space() -> list[Curve]:
    """Return charts of false negatives and retrieval of three systems by search space M."""
    pairs = _content_of("compare_fresh")["parameters"]["train_size"]
    spreads = spreads_of(_figures_of("compare_fresh"))
    x: list[float] = [pairs // part for part in _PARTS]
    curves = []
    for column, label in _LABELS.items():
        curve = Curve(x_label="search space M (pairs)", y_label=label, log_x=True)
        for system in ("GRIT-VLP", "ECM", "MAFA"):
            own = [spreads[system + end][column] for end in _PARTS.values()]
            curve.series.append((system, x, own))
        curves.append(curve)
    return curves


def three_data_sets() -> list[Curve]:
    """Return charts of false negatives in ITM, and of R@1 compared with ALBEF-base, on three
    sets."""
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
    left = Curve(y_label="false negatives in ITM (percent)", places=_SYSTEMS)
    right = Curve(y_label="R@1, any valid pair, minus ALBEF-base's", places=_SYSTEMS)
    for number, (name, of_system) in enumerate(data_sets.items()):
        shift = _APART * (number - (len(data_sets) - 1) / 2)
        x = [place + shift for place in range(1, len(_SYSTEMS) + 1)]
        false, gains = [], []
        for system in _SYSTEMS:
            figures = of_system[system]
            false.append(spreads_of(figures)[system]["false_negative_rate_in_itm"])
            gains.append(differences_to(figures, _BASE)[system]["r1"])
        left.series.append((name, x, false))
        right.series.append((name, x, gains))
    return [left, right]


FIGURES = {"search_space.svg": search_space, "three_data_sets.svg": three_data_sets}
