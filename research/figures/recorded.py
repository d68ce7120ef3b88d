"""Recorded results, and the figures of the docs that are drawn from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from lavis_mafa.io.files import ROOT
from research.curves import Curve, curves_svg
from research.studies.spread import frame_of


def content_of(name: str) -> Any:
    """Return the recorded results of this name."""
    return json.loads((ROOT / f"docs/results/{name}.json").read_text(encoding="utf-8"))


def figures_of(name: str) -> pd.DataFrame:
    """Return the figures of recorded results by row and seed."""
    return frame_of({row: own["seeds"] for row, own in content_of(name)["rows"].items()})


def drawn(curves: Sequence[Curve]) -> str:
    """Return curves side by side as an SVG file."""
    svg = curves_svg(curves)
    assert svg is not None
    return svg
