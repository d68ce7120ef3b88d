"""Line charts: gaps, logarithmic axes, bounds, and names as text."""

from __future__ import annotations

from xml.etree import ElementTree

from research.curves import Curve, curves_svg
from research.studies.spread import Spread


def texts_of(chart: ElementTree.Element) -> list[str]:
    return ["".join(one.itertext()) for one in chart.iter("{http://www.w3.org/2000/svg}text")]


def test_names_in_a_chart_are_text():
    """Neither formulas of matplotlib nor markup."""
    names = ["costs $a and $b", "<b>bold</b>", "a\\frac"]
    series = [(name, [0, 1], [Spread(1.0, None, 1), Spread(2.0, 0.1, 2)]) for name in names]
    svg = curves_svg([Curve("<i>", "$x", series)])
    assert "<b>" not in svg and "<i>" not in svg
    texts = texts_of(ElementTree.fromstring(svg))
    assert {"costs $a and $b", "<b>bold</b>", "a\\frac", "<i>", "$x"} <= set(texts)
    assert curves_svg([Curve("<i>", "$x", series)]) == svg, "equal charts are equal bytes"
