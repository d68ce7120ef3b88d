"""The report as a reader meets it: opened from disk in a real browser, by mouse, touch and keys."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
import torch
from browser import Browser, needs_browser
from PIL import Image

from lavis_mafa.algorithm.mining import AMBIGUOUS, KEPT, POSITIVE, STATE_NAMES, MiningRule
from lavis_mafa.pages.charts import Curve, Series, Table
from lavis_mafa.pages.report import Judgements, Mined, write_report

pytestmark = needs_browser

EVIL = "<script>alert(1); document.title = 'taken'</script><img src=x onerror=alert(2)>"
COUNT, LOW, HIGH = 60, 0.5, 0.8
NAMES = ("ours", "theirs")


def probabilities() -> dict[str, np.ndarray]:
    """Two discriminators' float32 probabilities, many of them exactly at places of the grid."""
    rng = np.random.default_rng(0)
    drawn = rng.beta(0.5, 0.7, 5000)
    ours = np.where(rng.random(5000) < 0.5, drawn.round(3), drawn)
    return {"ours": ours.astype(np.float32), "theirs": np.sqrt(drawn).astype(np.float32)}


def truths() -> np.ndarray:
    return np.random.default_rng(1).choice([1, 0, -1], 5000, p=[0.4, 0.5, 0.1])


def state_names(p, low: float, high: float) -> list[str]:
    states = MiningRule(low=low, high=high).states(torch.tensor(p, dtype=torch.float32))
    return [STATE_NAMES[int(s)] for s in states]


def mined(place: int) -> Mined:
    p = float(np.float32(place / COUNT))
    pixels = np.random.default_rng(place).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    return Mined(
        direction=("i2t", "t2i")[place % 2],
        anchor_image=Image.fromarray(pixels),
        anchor_caption=f"a dog on beach number{place:03d}",
        mined_image=None if place == 0 else Image.fromarray(pixels[::-1].copy()),
        mined_caption=EVIL if place == COUNT - 1 else "two children run",
        probability=p,
        truth=[True, False, None][place % 3],
        epoch=place % 4,
        state=state_names([p], LOW, HIGH)[0],
        anchor_index=1000 + place,
        mined_index=2000 + place,
    )


def a_page(folder, judged=True):
    curve = Curve(
        "Loss",
        "step",
        "loss",
        [Series(n, [0, 1, 2], [3.0, 2.0, k]) for k, n in enumerate(("itc", "itm"))],
    )
    return write_report(
        folder / "report.html",
        title="A run",
        tables=[
            Table(
                "Figures",
                ["name", *(f"column {k}" for k in range(12))],
                [["a long name of a figure", *[1.5] * 12]],
            )
        ],
        curves=[curve],
        connections=[mined(place) for place in range(COUNT)],
        judged=[Judgements(name, p, truths()) for name, p in probabilities().items()]
        if judged
        else (),
        thresholds=(LOW, HIGH),
        settings={"data": {"a_very_long_key_of_a_setting": "/a/very/long/path/" * 8}},
    )


@pytest.fixture(scope="module")
def browser():
    with Browser(1200, 900) as opened:
        yield opened


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return a_page(tmp_path_factory.mktemp("page"))


@pytest.fixture
def page(browser, path):
    browser.set_size(1200, 900)
    browser.errors.clear()
    browser.requests.clear()
    browser.open(path)
    yield browser
    assert browser.errors == [] and browser.outside() == []


def outcome(page) -> dict[str, list[str]]:
    rows = page.evaluate(
        "[...document.querySelectorAll('#outcome tr[data-state]')].map("
        "(row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return {row[0]: row[1:] for row in rows}


def expected(p: np.ndarray, truth: np.ndarray, low: float, high: float) -> dict[str, list[str]]:
    """The table by `MiningRule`, the code that trains."""
    states = MiningRule(low=low, high=high).states(torch.from_numpy(p)).numpy()
    told = {}
    for state in (POSITIVE, AMBIGUOUS, KEPT):
        rows = states == state
        known = [f"{(rows & (truth == t)).sum():,}" for t in (1, 0)]
        share = f"{100 * rows.sum() / len(p):.1f} %"
        told[STATE_NAMES[state]] = [f"{rows.sum():,}", share, *known]
    return told


def quality(p, truth, high) -> str:
    above = p > np.float32(high)
    precision = (truth[above] == 1).sum() / (truth[above] >= 0).sum()
    recall = (above & (truth == 1)).sum() / (truth == 1).sum()
    return f"precision {100 * precision:.1f} %, recall {100 * recall:.1f} %"


def middle(page, selector: str) -> tuple[float, float]:
    return tuple(
        page.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
    )


def across_plot(page, p: float) -> float:
    return page.evaluate(
        "(() => { const r = document.getElementById('plot').getBoundingClientRect();"
        f"return r.x + {p} * r.width; }})()"
    )


def drag(page, which: str, to: float, touch: bool = False) -> None:
    x, y = middle(page, f".handle.{which}")
    end = across_plot(page, to)
    path = [x + (end - x) * k / 5 for k in range(6)]
    if touch:
        send = "Input.dispatchTouchEvent"
        page.command(send, type="touchStart", touchPoints=[{"x": x, "y": y}])
        for at in path:
            page.command(send, type="touchMove", touchPoints=[{"x": at, "y": y}])
        page.command(send, type="touchEnd", touchPoints=[])
        return
    held = {"y": y, "button": "left", "buttons": 1, "clickCount": 1}
    page.command("Input.dispatchMouseEvent", type="mousePressed", x=x, **held)
    for at in path:
        page.command("Input.dispatchMouseEvent", type="mouseMoved", x=at, **held)
    page.command("Input.dispatchMouseEvent", type="mouseReleased", x=end, **held)


def value(page, which: str) -> float:
    return float(page.evaluate(f"document.getElementById('{which}-value').textContent"))


def choose(page, selector: str, text: str) -> None:
    page.evaluate(
        f"(() => {{ const s = document.querySelector({json.dumps(selector)});"
        f"s.value = [...s.options].find((o) => o.text === {json.dumps(text)}).value;"
        "s.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )


def cards(page) -> list[dict]:
    return page.evaluate(
        "[...document.querySelectorAll('#cards > li')].map((li) => ({"
        "state: li.querySelector('.top b').textContent,"
        "p: Number(li.querySelector('.meter b').textContent),"
        "text: li.textContent }))"
    )


def status(page) -> str:
    return page.evaluate("document.getElementById('status').textContent")


def shot(page, selector: str) -> Image.Image:
    page.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView()")
    box = page.evaluate(
        f"(() => {{ const r = document.querySelector({json.dumps(selector)})"
        ".getBoundingClientRect();"
        "return [r.x + scrollX, r.y + scrollY, r.width, r.height]; })()"
    )
    clip = dict(zip(("x", "y", "width", "height"), box, strict=True), scale=1)
    data = page.command("Page.captureScreenshot", format="png", clip=clip)["data"]
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


# What is drawn


def test_curves_and_pictures_are_really_drawn(page):
    boxes = page.evaluate(
        "[...document.querySelectorAll('.chart > svg path.line')].map((p) => {"
        "const r = p.getBoundingClientRect(); return [r.width, r.height]; })"
    )
    assert len(boxes) == 2 and all(width > 100 and height > 20 for width, height in boxes)
    # Two lines, grid, text and what lies between them: a blank box would have one colour.
    assert len(shot(page, ".chart > svg").getcolors(1 << 20)) > 20
    assert len(shot(page, "#plot").getcolors(1 << 20)) > 5
    page.until("[...document.images].every((i) => i.complete)")
    widths = page.evaluate("[...document.images].map((i) => i.naturalWidth)")
    assert len(widths) == 48 and set(widths) == {80}
    assert len(shot(page, "#cards li img").getcolors(1 << 20)) > 500


def test_a_card_without_a_picture_says_so(page):
    choose(page, "#order", "probability, lowest first")
    first = cards(page)[0]
    assert "no picture" in first["text"] and first["p"] == 0


def test_a_caption_stays_text(page):
    assert page.evaluate("document.title") == "A run"
    assert page.evaluate("document.scripts.length") == 2
    assert page.evaluate("document.querySelectorAll('#cards script').length") == 0
    assert EVIL in cards(page)[0]["text"]
    assert page.evaluate("document.querySelectorAll('[onerror]').length") == 0


# Thresholds


def test_the_first_counts_are_the_runs_own(page):
    p = probabilities()["ours"]
    assert outcome(page) == expected(p, truths(), LOW, HIGH)
    assert quality(p, truths(), HIGH) in page.evaluate(
        "document.getElementById('quality').textContent"
    )
    assert page.evaluate("document.getElementById('own').disabled")


@pytest.mark.parametrize("touch", [False, True])
@pytest.mark.parametrize(("which", "to"), [("high", 0.653), ("low", 0.31), ("high", 0.2)])
def test_dragging_a_line_counts_anew(page, which, to, touch):
    page.set_size(1200, 900, touch)
    drag(page, which, to, touch)
    low, high = value(page, "low"), value(page, "high")
    assert (low if which == "low" else high) == pytest.approx(to, abs=0.002)
    assert low == min(high, LOW) if which == "high" else high == HIGH  # low gives way to high
    p = probabilities()["ours"]
    assert outcome(page) == expected(p, truths(), low, high)
    assert quality(p, truths(), high) in page.evaluate(
        "document.getElementById('quality').textContent"
    )


def test_keys_move_a_slider_by_a_step_of_the_grid(page):
    page.evaluate("document.getElementById('high').focus()")
    for key, high in (("ArrowRight", 0.801), ("ArrowLeft", 0.8), ("ArrowLeft", 0.799)):
        page.press(key)
        assert value(page, "high") == high
        assert outcome(page) == expected(probabilities()["ours"], truths(), LOW, high)
    page.press("Home")
    assert value(page, "high") == value(page, "low") == 0.001
    page.click("#own")
    assert (value(page, "low"), value(page, "high")) == (LOW, HIGH)


def test_another_discriminator(page):
    choose(page, "#source", "theirs")
    assert outcome(page) == expected(probabilities()["theirs"], truths(), LOW, HIGH)


def test_the_cards_own_histogram_follows_what_is_chosen(page):
    choose(page, "#source", "the connections chosen below")
    p = np.array([mined(k).probability for k in range(COUNT)], np.float32)
    truth = np.array([[1, 0, -1][k % 3] for k in range(COUNT)])
    assert outcome(page) == expected(p, truth, LOW, HIGH)
    choose(page, "#direction", "text → image")
    assert outcome(page) == expected(p[1::2], truth[1::2], LOW, HIGH)


def test_without_judgements_the_cards_are_counted(browser, tmp_path):
    browser.open(a_page(tmp_path, judged=False))
    p = np.array([mined(k).probability for k in range(COUNT)], np.float32)
    truth = np.array([[1, 0, -1][k % 3] for k in range(COUNT)])
    assert outcome(browser) == expected(p, truth, LOW, HIGH)
    drag(browser, "low", 0.3)
    assert outcome(browser) == expected(p, truth, value(browser, "low"), HIGH)


def test_states_of_the_cards_follow_the_thresholds(page):
    choose(page, "#state", "ambiguous")
    p = [mined(k).probability for k in range(COUNT)]
    count = state_names(p, LOW, HIGH).count("ambiguous")
    assert status(page).startswith(f"{count} of {COUNT}")
    drag(page, "low", 0.25)
    states = state_names(p, value(page, "low"), HIGH)
    assert states.count("ambiguous") > count
    assert status(page).startswith(f"{states.count('ambiguous')} of {COUNT}")
    assert {card["state"] for card in cards(page)} == {"ambiguous"}
    page.click("#own")
    assert status(page).startswith(f"{count} of {COUNT}")


# Search and order


def test_search_by_words_and_numbers(page):
    page.click("#search")
    for letter in "beach number007":
        page.press(letter)
    assert status(page).startswith(f"1 of {COUNT}") and "number007" in cards(page)[0]["text"]
    page.click("#controls button[type=reset]")
    page.until(f"document.getElementById('status').textContent.startsWith('{COUNT} of')")
    page.click("#search")
    for letter in "1042":
        page.press(letter)
    assert "number042" in cards(page)[0]["text"] and len(cards(page)) == 1


def test_orders(page):
    probabilities_shown = [card["p"] for card in cards(page)]
    assert probabilities_shown == sorted(probabilities_shown, reverse=True)
    choose(page, "#order", "nearest to the threshold high")
    near = [abs(card["p"] - HIGH) for card in cards(page)]
    assert near == pytest.approx(sorted(near), abs=2e-3) and near[0] < 0.01
    choose(page, "#order", "number of the anchor")
    assert [f"number{k:03d}" in card["text"] for k, card in enumerate(cards(page))] == [True] * 24
    page.click("[data-turn='1']")
    assert "page 2 of 3" in status(page) and "number024" in cards(page)[0]["text"]


# On a phone


def test_nothing_overflows_on_a_phone(page):
    page.set_size(360, 740, phone=True)
    page.reload()
    assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth")
    # What can be touched is as big as a finger needs it.
    sizes = page.evaluate(
        "[...document.querySelectorAll('button, select, input, .handle')].map((e) => {"
        "const r = e.getBoundingClientRect(); return [e.id || e.className, r.width, r.height]; })"
        ".filter(([, width]) => width > 0)"
    )
    assert all(width >= 40 and height >= 40 for _, width, height in sizes), sizes
    page.set_size(1200, 900)
