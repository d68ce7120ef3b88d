"""The page of results loads nothing, has no script, and shows every string as text."""

from __future__ import annotations

import base64
import io
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, needs_browser
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lavis_mafa.tools.charts import Bars, Table, format_number
from lavis_mafa.tools.report_page import ShownPair, write_report

EVIL = """</script><script>alert("x")</script><!-- {{data}} & 'q' "><img src=x onerror=a()>"""
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Collect a page's elements and texts; fail where tags are not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.cells: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if "td" in self.open or "th" in self.open:
            self.cells[-1] += data

    @property
    def images(self):
        return [attributes["src"] for tag, attributes in self.tags if tag == "img"]


def random_image(seed: int, size: tuple[int, int] = (24, 16)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write_page(tmp_path: Path, **parts) -> Page:
    given = {"title": "A run", "headline": "It ran.", **parts}
    path = write_report(tmp_path / "report.html", **given)
    return Page(path.read_text(encoding="utf-8"))


def report_arguments(text: str) -> dict:
    """Return arguments in which every caller-given string is ``text``."""
    return {
        "title": text,
        "headline": text,
        "pairs": [ShownPair(random_image(1), text, text, text, True)],
        "bars": [Bars(text, {text: 1.0})],
        "tables": [Table(text, [text, "n"], [[text, 1.0], [text, 2.0]], text)],
        "notes": [text],
    }


def test_given_strings_do_not_become_markup(tmp_path):
    harmless = write_page(tmp_path, **report_arguments("a caption"))
    attacked = write_page(tmp_path, **report_arguments(EVIL))
    assert [tag for tag, _ in attacked.tags] == [tag for tag, _ in harmless.tags]
    assert [list(names) for _, names in attacked.tags] == [list(n) for _, n in harmless.tags]
    assert attacked.cells.count(EVIL) == harmless.cells.count("a caption") == 3


def test_page_loads_nothing_and_has_no_script(tmp_path):
    page = write_page(tmp_path, **report_arguments("x"))
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "script")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "action", "data"):
                assert value.startswith("data:image/"), (tag, name, value)
    policy = next(a["content"] for _, a in page.tags if "http-equiv" in a)
    assert "default-src 'none'" in policy and "script-src" not in policy


def test_a_page_needs_only_a_title_and_a_sentence(tmp_path):
    page = write_page(tmp_path / "new" / "folder", notes=["data/\udcff.jpg"])
    assert page.texts.count("A run") == 2  # the title element and the heading
    assert "data/?.jpg" in page.texts  # a file name that is not UTF-8
    assert page.cells == page.images == []
    first = write_report(tmp_path / "one.html", **report_arguments("x")).read_bytes()
    assert write_report(tmp_path / "two.html", **report_arguments("x")).read_bytes() == first
    with pytest.raises(ValueError, match="is a folder, expected the name of a page"):
        write_report(tmp_path, title="t", headline="h")


def test_pairs_and_bars_are_shown(tmp_path):
    drawing = Image.new("RGBA", (40, 30), (250, 0, 0, 255))
    photograph = random_image(5, (700, 350)).resize((1400, 700))
    pairs = [
        ShownPair(drawing, "a dog", "a cat", "P = 0.9, positive", True),
        ShownPair(photograph, "a car", "a bus", "P = 0.1, negative", False),
        ShownPair(None, "a tree", "a leaf", "P = 0.5, ambiguous"),
    ]
    bars = [Bars("AUC", {"a": 0.75, "b": 1.0}, 0.5, 1.0)]
    page = write_page(tmp_path, pairs=iter(pairs), bars=bars)
    first, second = (
        Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))) for uri in page.images
    )
    assert first.format == "PNG" and first.size == (40, 30)
    assert first.getpixel((3, 3)) == (250, 0, 0)
    assert second.format == "JPEG" and second.size == (192, 96)
    assert photograph.size == (1400, 700)  # the caller's image is not changed
    assert {"a dog", "its own caption: a cat", "P = 0.5, ambiguous"} <= set(page.texts)
    assert "P = 0.9, positive; by the truth a match" in page.texts
    assert "P = 0.1, negative; by the truth no match" in page.texts
    widths = [attributes["style"] for tag, attributes in page.tags if tag == "i"]
    assert widths == ["width:50.0%", "width:100.0%"] and "0.750" in page.texts


# Numbers and tables


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (-0.0, "0"),
        (99.96, "100"),
        (12345.6, "12,346"),
        (1e-5, "1.00e-05"),
        (7, "7"),
        (209_000_000, "209,000,000"),
        ("0.12345", "0.12345"),
        (True, "True"),
        (math.nan, "nan"),
        (np.float32(0.1), "0.100"),
    ],
)
def test_format_number(value, text):
    assert format_number(value) == text


@given(st.floats(-1e300, 1e300))
def test_format_number_keeps_three_digits(value):
    text = format_number(value).replace(",", "")
    assert len(text) <= 10
    if abs(value) > 1e-300:  # a smaller float has fewer digits itself
        assert float(text) == pytest.approx(value, rel=0.0051)


@needs_browser
def test_a_browser_shows_the_page(tmp_path):
    path = write_report(tmp_path / "report.html", **report_arguments(EVIL))
    with Browser() as browser:
        browser.set_size(375, 667, phone=True)
        browser.open(path)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 375
        assert browser.evaluate("document.title") == EVIL
        assert browser.evaluate("document.querySelector('.pairs img').naturalWidth") == 24
        assert browser.evaluate("document.querySelector('.bars i').offsetWidth") > 50
        assert browser.errors == [] and browser.outside() == []
