"""Line charts: gaps, logarithmic axes, bounds, and names as text."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from research.curves import COLOURS, Curve, Series, curves_svg


def chart_of(series, **options):
    svg = curves_svg([Curve("c", series=[series], **options)])
    return ElementTree.fromstring(svg)


def lines_of(chart: ElementTree.Element) -> list[list[list[float]]]:
    """Return the points of each line: the paths of matplotlib's groups line2d with that colour."""
    found = []
    for path in chart.iter("{http://www.w3.org/2000/svg}path"):
        coloured = any(colour in path.get("style", "") for colour in COLOURS)
        if coloured and "clip-path" in path.attrib:
            points = re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))
            found.append([[float(x), float(y)] for x, y in points])
    return found


def texts_of(chart: ElementTree.Element) -> list[str]:
    return ["".join(one.itertext()) for one in chart.iter("{http://www.w3.org/2000/svg}text")]


def test_missing_value_interrupts_a_line():
    chart = chart_of(Series("loss", [0, 1, 2, 3, 4, 5], [4.0, 3.0, None, math.nan, 0.0, 1.0]))
    paths = [path.get("d", "") for path in chart.iter("{http://www.w3.org/2000/svg}path")]
    (line,) = lines_of(chart)
    assert sum(d.count("M") == 2 and d.count("L") == 2 for d in paths) == 1
    (x0, y0), (x1, y1), (x4, y4), _ = line
    assert x4 - x0 == pytest.approx(4 * (x1 - x0), abs=0.3)
    assert y4 - y0 == pytest.approx(4 * (y1 - y0), abs=0.3) and y4 > y0  # zero is at the bottom


def test_log_axis_spaces_factors_evenly():
    chart = chart_of(Series("a", [64, 640, 6400], [1, 2, 3]), log_x=True)
    (line,) = lines_of(chart)
    first, second, third = (x for x, _ in line)
    assert third - second == pytest.approx(second - first, abs=0.2) and first < second
    assert {"64", "640", "6,400"} <= set(texts_of(chart))


def test_names_in_a_chart_are_text():
    """Neither formulas of matplotlib nor markup."""
    names = ["costs $a and $b", "<b>bold</b>", "a\\frac"]
    series = [Series(name, [0, 1], [1.0, 2.0]) for name in names]
    svg = curves_svg([Curve("c", "<i>", "$x", series)])
    assert svg is not None and "<b>" not in svg and "<i>" not in svg
    texts = texts_of(ElementTree.fromstring(svg))
    assert {"costs $a and $b", "<b>bold</b>", "a\\frac", "<i>", "$x"} <= set(texts)
    assert curves_svg([Curve("c", "<i>", "$x", series)]) == svg, "equal charts are equal bytes"


def test_places_are_named_and_not_joined():
    series = Series("a", [1, 2], [0.5, 0.6], [0.1, None])
    chart = chart_of(series, places=["one <", "two"])
    assert {"one <", "two"} <= set(texts_of(chart))
    assert not any(len(one) == 2 and one[0][0] != one[1][0] for one in lines_of(chart))


def test_curves_without_values_are_not_drawn():
    assert curves_svg([Curve("c"), Curve("c", series=[Series("s", [1], [None])])]) is None
