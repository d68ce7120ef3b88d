"""Check that the report is self-contained, escapes its input and shows the logged values."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from lavis_mafa.algorithm.mining import AMBIGUOUS, KEPT, POSITIVE, MiningRule
from lavis_mafa.pages.charts import COLOURS, Bars, Curve, Series, Table, curves_svg, format_number
from lavis_mafa.pages.report_page import Judgements, Mined, write_report

EVIL = """</script><script>alert("x")</script><!-- {{data}} & 'q' "><img src=x onerror=a()>"""
VOID = {"meta", "input", "img", "br", "link"}


class Page(HTMLParser):
    """Collect a page's elements, texts and scripts; fail where tags are not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.cells: list[str] = []
        self.scripts: list[str] = []
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
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif "td" in self.open or "th" in self.open:
            self.cells[-1] += data

    @property
    def data(self):
        return json.loads(self.scripts[0])


def random_image(seed: int, size: tuple[int, int] = (24, 16)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_mined(**changes) -> Mined:
    defaults = {
        "direction": "i2t",
        "anchor_image": random_image(1),
        "anchor_caption": "a dog",
        "mined_image": random_image(2),
        "mined_caption": "a small dog",
        "probability": 0.9,
        "truth": True,
        "epoch": 1,
        "state": "positive",
        "anchor_index": 11,
        "mined_index": 22,
    }
    return Mined(**{**defaults, **changes})


def write_page(tmp_path: Path, **parts) -> Page:
    path = write_report(
        tmp_path / "report.html", **{"title": "A run", "headline": "It ran.", **parts}
    )
    return Page(path.read_text(encoding="utf-8"))


def report_arguments(text: str) -> dict:
    """Return arguments in which every caller-given string is ``text``."""
    table = Table(text, [text, "n"], [[text, 1.0], [text, 2.0]], text, {"n": "max"})
    curve = Curve(text, text, text, [Series(text, [1, 2], [1.0, None])], text)
    mined = make_mined(anchor_caption=text, mined_caption=text, run=text)
    return {
        "title": text,
        "headline": text,
        "intro": "\n\n".join([text] * 3),
        "bars": [Bars(text, {text: 1.0})],
        "tables": [table],
        "curves": [curve, Curve(text)],
        "connections": [mined],
        "judged": [Judgements(text, np.ones((3, 2), int))],
        "notes": [text],
        "settings": {text: {text: text}},
    }


# Escaping


def test_given_strings_do_not_become_markup(tmp_path):
    harmless = write_page(tmp_path, **report_arguments("a caption"))
    attacked = write_page(tmp_path, **report_arguments(EVIL))
    assert [tag for tag, _ in attacked.tags] == [tag for tag, _ in harmless.tags]
    assert [list(names) for _, names in attacked.tags] == [list(n) for _, n in harmless.tags]
    assert len(attacked.scripts) == 2 and "<" not in attacked.scripts[0]
    assert attacked.cells.count(EVIL) == harmless.cells.count("a caption") > 0
    card = attacked.data["cards"][0]
    assert card["anchor"][1] == card["mined"][1] == card["run"] == EVIL
    assert attacked.data["judged"][0]["name"] == EVIL


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_caption_is_kept_in_the_data(tmp_path_factory, caption):
    page = write_page(tmp_path_factory.mktemp("r"), connections=[make_mined(mined_caption=caption)])
    assert page.data["cards"][0]["mined"][1] == caption
    assert len(page.scripts) == 2


def test_page_loads_nothing_external(tmp_path):
    page = write_page(tmp_path, **report_arguments("x"))
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "action", "data"):
                assert value.startswith(("#", "data:image/")), (tag, name, value)
    assert all(uri.startswith("data:image/") for uri in page.data["images"])
    policy = next(a["content"] for _, a in page.tags if "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy


# Writing


def test_title_is_sufficient(tmp_path):
    page = write_page(tmp_path / "new" / "folder")
    assert page.texts.count("A run") == 2  # the title element and the heading
    shown = {a["id"] for tag, a in page.tags if tag == "section" and "hidden" not in a}
    assert shown == set() and not any(tag == "a" for tag, _ in page.tags)
    page = write_page(tmp_path, notes=["one"], settings={"a": 1})
    shown = {a["id"] for tag, a in page.tags if tag == "section" and "hidden" not in a}
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert shown == {"notes", "settings"} and links == ["#notes", "#settings"]


def test_same_report_has_same_bytes(tmp_path):
    first = write_report(tmp_path / "one.html", **report_arguments("x")).read_bytes()
    assert write_report(tmp_path / "two.html", **report_arguments("x")).read_bytes() == first


def test_settings_are_flattened(tmp_path):
    settings_tree = {"run": {"grit": {"queue_size": 48000}, "lr": 1e-4}, "warm": None, "none": {}}
    page = write_page(tmp_path, settings={**settings_tree, "path": "data/\udcff.jpg"})
    assert page.cells[2:] == [
        *("run.grit.queue_size", "48000"),
        *("run.lr", "0.0001"),
        *("warm", "–"),
        *("none", "{}"),
        *("path", "data/?.jpg"),  # a file name that is not UTF-8
    ]


# Numbers and tables


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "–"), (0.0, "0"), (-0.0, "0"), (0.5, "0.500"), (45.234, "45.2"), (99.96, "100")),
        *((999.6, "1,000"), (12345.6, "12,346"), (1.5e7, "1.50e+07"), (1e-5, "1.00e-05")),
        *((7, "7"), (209_000_000, "209,000,000"), ("0.12345", "0.12345"), (True, "True")),
        *((math.nan, "nan"), (math.inf, "inf"), (np.float32(0.1), "0.100"), (np.int64(5), "5")),
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


def best_cells(page: Page) -> int:
    return sum("best" in (a.get("class") or "") for tag, a in page.tags if tag == "td")


def test_best_of_a_column_is_marked(tmp_path):
    rows = [["a", 1.0, math.nan], ["b", 3.0, 9.0], ["c", 3, None], ["d", None, 2.0]]
    best = {"recall": "max", "loss": "min"}
    page = write_page(tmp_path, tables=[Table("t", ["m", "recall", "loss"], rows, "", best)])
    marked = [cell for cell in page.cells if cell.startswith("★")]
    assert marked == ["★ 3.00", "★ 3", "★ 2.00"] and best_cells(page) == 3
    labels = [a.get("aria-label") for tag, a in page.tags if tag == "span" and "role" in a]
    assert labels.count("best") == 3
    assert "★: the best of its column." in " ".join(page.texts)
    single = Table("t", ["m", "r"], [["a", 1.0], ["b", None]], "", {"r": "max"})
    assert best_cells(write_page(tmp_path, tables=[single])) == 0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (Table("t", ["a", "b"], [[1]]), "has 1 cells, expected 2"),
        (Table("t", ["a"], [[1]], "", {"b": "max"}), "'b' is not in list"),
    ],
)
def test_wrong_table_is_rejected(tmp_path, table, message):
    with pytest.raises(ValueError, match=message):
        write_page(tmp_path, tables=[table])
    assert not list(tmp_path.iterdir())


# Curves


def chart_of(page: Page) -> ElementTree.Element:
    """Return the only chart of a page."""
    (image,) = (a for tag, a in page.tags if tag == "img")
    assert image["alt"]
    return ElementTree.fromstring(base64.b64decode(image["src"].split(",")[1]))


def lines_of(chart: ElementTree.Element) -> list[list[list[float]]]:
    """Return the points of each line: the paths of matplotlib's groups line2d with that colour."""
    found = []
    for path in chart.iter("{http://www.w3.org/2000/svg}path"):
        if (
            any(colour in path.get("style", "") for colour in COLOURS)
            and "clip-path" in path.attrib
        ):
            points = re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))
            found.append([[float(x), float(y)] for x, y in points])
    return found


def texts_of(chart: ElementTree.Element) -> list[str]:
    return ["".join(one.itertext()) for one in chart.iter("{http://www.w3.org/2000/svg}text")]


def chart_page(tmp_path, series: Series, **options) -> Page:
    return write_page(tmp_path, curves=[Curve("c", series=[series], **options)])


def test_missing_value_interrupts_a_line(tmp_path):
    series = Series("loss", [0, 1, 2, 3, 4, 5], [4.0, 3.0, None, math.nan, 0.0, 1.0])
    page = chart_page(tmp_path, series, x_label="step")
    chart = chart_of(page)
    paths = [path.get("d", "") for path in chart.iter("{http://www.w3.org/2000/svg}path")]
    (line,) = lines_of(chart)
    assert sum(d.count("M") == 2 and d.count("L") == 2 for d in paths) == 1
    (x0, y0), (x1, y1), (x4, y4), _ = line
    assert x4 - x0 == pytest.approx(4 * (x1 - x0), abs=0.3)
    assert y4 - y0 == pytest.approx(4 * (y1 - y0), abs=0.3) and y4 > y0  # zero is at the bottom
    cells = [*("0", "4.00", "1", "3.00", "2", "–", "3", "nan", "4", "0", "5", "1.00")]
    assert page.cells[-12:] == cells and page.cells[:2] == ["step", "loss"]


def test_log_axis_spaces_factors_evenly(tmp_path):
    chart = chart_of(chart_page(tmp_path, Series("a", [64, 640, 6400], [1, 2, 3]), log_x=True))
    (line,) = lines_of(chart)
    first, second, third = (x for x, _ in line)
    assert third - second == pytest.approx(second - first, abs=0.2) and first < second
    assert {"64", "640", "6,400"} <= set(texts_of(chart))


def test_axis_of_bounded_values_stays_in_bounds(tmp_path):
    for y in ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.2, 0.4, 0.9]):
        chart = chart_of(chart_page(tmp_path, Series("a", [64, 65, 66], y), bounds=(0.0, 1.0)))
        ticks = [float(t) for t in texts_of(chart) if re.fullmatch(r"-?\d\.\d*", t)]
        assert ticks and 0 <= min(ticks) and max(ticks) <= 1


def test_names_in_a_chart_are_text(tmp_path):
    """Neither formulas of matplotlib nor markup, and a series whose name begins with _ is named."""
    names = ["costs $a and $b", "_hidden", "<b>bold</b>", "a\\frac"]
    series = [Series(name, [0, 1], [1.0, 2.0]) for name in names]
    svg = curves_svg([Curve("c", "<i>", "$x", series)])
    assert svg is not None and "<b>" not in svg and "<i>" not in svg
    texts = texts_of(ElementTree.fromstring(svg))
    assert {"costs $a and $b", "hidden", "<b>bold</b>", "a\\frac", "<i>", "$x"} <= set(texts)
    assert curves_svg([Curve("c", "<i>", "$x", series)]) == svg, "equal charts are equal bytes"


def test_places_are_named_and_not_joined(tmp_path):
    series = Series("a", [1, 2], [0.5, 0.6], [0.1, None])
    chart = chart_of(chart_page(tmp_path, series, places=["one <", "two"]))
    assert {"one <", "two"} <= set(texts_of(chart)) and not any(
        len(line) == 2 and line[0][0] != line[1][0] for line in lines_of(chart)
    )


def test_curve_without_values_shows_a_note(tmp_path):
    empty = [Curve("c"), Curve("c", series=[Series("s", [1], [None])])]
    page = write_page(tmp_path, curves=empty)
    assert page.texts.count("No values to draw.") == 2
    assert not any(tag == "img" for tag, _ in page.tags) and curves_svg(empty) is None


def test_long_series_has_no_table(tmp_path):
    series = Series("s", list(range(10_001)), [float(x) for x in range(10_001)])
    page = chart_page(tmp_path, series)
    assert lines_of(chart_of(page)) and page.cells == []


def test_series_of_unequal_length_are_rejected(tmp_path):
    curve = Curve("Loss", series=[Series("ITC", [1, 2], [1.0])])
    with pytest.raises(ValueError, match="must have the same size"):
        write_page(tmp_path, curves=[curve])


numbers = st.floats(width=64) | st.integers(-(10**6), 10**6) | st.none()


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.floats(), numbers), max_size=8),
    st.booleans(),
)
@example([(math.inf, 1.0), (math.nan, 1.0), (0.0, 2.0)], False)
@example([(0.0, math.inf), (1.0, 1e300), (2.0, 1e-300), (2.0, -1.0)], True)
@example([(1.0, 1e99), (2.0, -1e99)], False)
def test_all_values_can_be_drawn(points, log_x):
    series = Series("s", [x for x, _ in points], [y for _, y in points])
    svg = curves_svg([Curve("c", series=[series], log_x=log_x)])
    assert svg is None or "nan" not in svg


# Connections


def test_each_distinct_image_is_embedded_once(tmp_path):
    shared = random_image(3)
    same_bytes = Image.frombytes("RGB", (16, 24), shared.tobytes())
    cards = [
        make_mined(anchor_image=shared, mined_image=random_image(4)),
        make_mined(anchor_image=shared.copy(), mined_image=shared),
        make_mined(anchor_image=random_image(4), mined_image=same_bytes),
    ]
    data = write_page(tmp_path, connections=(card for card in cards)).data
    assert len(data["images"]) == len(set(data["images"])) == 3
    indices = [(card["anchor"][0], card["mined"][0]) for card in data["cards"]]
    assert indices == [(0, 1), (0, 0), (1, 2)]


def decode_image(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))


def test_thumbnails_are_small_and_drawings_exact(tmp_path):
    drawing = Image.new("RGBA", (40, 30), (250, 0, 0, 255))
    photograph = random_image(5, (700, 350)).resize((1400, 700))
    card = make_mined(anchor_image=drawing, mined_image=photograph)
    first, second = map(decode_image, write_page(tmp_path, connections=[card]).data["images"])
    assert first.format == "PNG" and first.size == (40, 30)
    assert first.getpixel((3, 3)) == (250, 0, 0)
    assert second.format == "JPEG" and second.size == (192, 96)
    assert photograph.size == (1400, 700)  # the caller's image is not changed


def test_card_holds_the_mined_pair(tmp_path):
    mined = make_mined(
        direction="t2i",
        probability=np.float32(0.25),
        truth=np.bool_(False),
        state="negative",
        epoch=np.int64(3),
        run="MAFA",
    )
    (card,) = write_page(tmp_path, connections=[mined]).data["cards"]
    assert card == {
        **{"direction": "t2i", "state": "negative", "truth": False, "epoch": 3, "run": "MAFA"},
        **{"score": "", "p": 0.25, "anchor": [0, "a dog", 11], "mined": [1, "a small dog", 22]},
    }
    data = write_page(tmp_path, connections=[make_mined(anchor_image=None)]).data
    assert data["cards"][0]["anchor"] == [-1, "a dog", 11] and len(data["images"]) == 1


def sections_of(page):
    """Return the sections that are shown."""
    sections = [attributes for tag, attributes in page.tags if tag == "section"]
    return {attributes["id"] for attributes in sections if "hidden" not in attributes}


def test_pairs_that_another_score_judged_have_any_value_and_no_probabilities(tmp_path):
    mined = make_mined(probability=-0.25, score="similarity")
    page = write_page(tmp_path, connections=[mined])
    (card,) = page.data["cards"]
    assert (card["p"], card["score"]) == (-0.25, "similarity")
    assert sections_of(page) == {"connections"}
    both = write_page(tmp_path, connections=[mined, make_mined()])
    assert sections_of(both) == {"connections", "probabilities"}


# Judgements

THRESHOLDS = st.integers(0, 1000).map(lambda k: k / 1000)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 1, width=32) | THRESHOLDS, min_size=1, max_size=30),
    THRESHOLDS,
    THRESHOLDS,
    st.sampled_from([np.float32, np.float64]),
)
@example([0.8, 0.5, 0.0, 1.0], 0.5, 0.8, np.float32)
def test_counts_above_a_threshold_equal_the_mining_rule(values, first, second, dtype):
    low, high = max(min(first, second), 0.001), max(first, second, 0.001)
    p = np.array(values, dtype)
    truth = np.arange(len(p)) % 3 - 1
    counts = Judgements.of("d", p, truth).counts
    assert counts.shape == (3, 1000)
    states = MiningRule(low=low, high=high).states(torch.from_numpy(p)).numpy()
    cuts = [0, round(low * 1000), round(high * 1000), 1000]
    for row, value in enumerate((1, 0, -1)):
        page_counts = [counts[row, a:b].sum() for a, b in zip(cuts, cuts[1:], strict=False)]
        rule_counts = [
            ((states == s) & (truth == value)).sum() for s in (KEPT, AMBIGUOUS, POSITIVE)
        ]
        assert page_counts == rule_counts


def test_missing_judgements_are_not_counted():
    p = np.array([0.9, math.nan, 0.9, 0.9, 0, 1])
    counts = Judgements.of("d", p, np.array([1, 1, -1, 0, 0, 1])).counts
    assert counts.sum(axis=1).tolist() == [2, 2, 1] and counts[:, 899].sum() == 3
    assert counts[1, 0] == 1 and counts[0, 999] == 1
    assert Judgements.of("d", p[:0], p[:0]).counts.sum() == 0


def test_page_holds_the_judgements(tmp_path):
    judgements = [Judgements("d", np.array([[1, 2], [3, 4], [0, 0]]))]
    page = write_page(tmp_path, judged=judgements, thresholds=(0.25, 0.75))
    assert page.data["judged"] == [{"name": "d", "counts": [[1, 2], [3, 4], [0, 0]]}]
    assert page.data["thresholds"] == [0.25, 0.75]
    shown = {a["id"] for tag, a in page.tags if tag == "section" and "hidden" not in a}
    assert shown == {"probabilities"}
    with pytest.raises(ValueError, match="expected 0 <= low <= high <= 1"):
        write_page(tmp_path, thresholds=(0.8, 0.5))


# The top of the page


def test_three_pairs_that_match_come_first(tmp_path):
    """Those known to match before those that Con-D calls a match; no image or caption twice."""
    picture = [random_image(seed) for seed in range(9)]

    def mined(n, truth=True, state="positive", caption=None, p=0.9, **changes):
        own = {"anchor_image": picture[n], "mined_caption": caption or f"text {n}"}
        return make_mined(**own, truth=truth, state=state, probability=p, **changes)

    other = {"anchor_caption": "anchor's", "mined_image": picture[8]}
    cards = [
        mined(0, truth=None, p=0.99),
        mined(1, truth=False, p=0.98),
        mined(2, state="ambiguous", p=0.97),
        mined(3, p=0.85),
        mined(4, caption="text 3", p=0.84),
        mined(3, caption="another", p=0.83),
        mined(5, direction="t2i", p=0.87, **other),
    ]
    page = write_page(tmp_path, connections=cards)
    text = " ".join(" ".join(page.texts).split())
    told = "Without mining, taught as no match , and it matches. Con-D: P = "
    assert (
        f"anchor's {told}0.870 text 3 {told}0.850 text 0 "
        "Without mining, taught as no match . Con-D: P = 0.990" in text
    )
    shown = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    places = [page.data["cards"][n]["anchor"][0] for n in (3, 0)]
    places.insert(0, page.data["cards"][6]["mined"][0])
    assert shown == [page.data["images"][place] for place in places]


def test_bars_lead_and_all_else_is_folded(tmp_path):
    bars = [Bars("R@1", {"a": 30.0, "b": 75.0}, 0, 100), Bars("AUC", {"a": 0.75}, 0.5, 1)]
    parts = {"tables": [Table("t", ["x"], [[1]])], "notes": ["n"], "settings": {"k": 1}}
    page = write_page(tmp_path, bars=bars, intro="one\n\ntwo\n\nthree", **parts)
    widths = [attrs["style"] for tag, attrs in page.tags if tag == "i"]
    assert widths == ["width:30.0%", "width:75.0%", "width:50.0%"]
    details = [tag for tag, _ in page.tags if tag in ("details", "section", "nav")]
    assert details == ["details", *["section", "details"] * 6]
    assert "three" in page.texts
    plain = write_page(tmp_path, intro="one\n\ntwo\n\nthree", **parts)
    assert not [tag for tag, _ in plain.tags if tag == "details"]
