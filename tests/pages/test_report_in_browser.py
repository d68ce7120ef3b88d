"""Check the report in a real browser: opened from disk, with mouse, touch and keys."""

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
from lavis_mafa.pages.report_page import Judgements, Mined, write_report

pytestmark = needs_browser

EVIL = "<script>alert(1); document.title = 'taken'</script><img src=x onerror=alert(2)>"
COUNT, LOW, HIGH = 60, 0.5, 0.8
NAMES = ("ours", "theirs")


def probabilities() -> dict[str, np.ndarray]:
    """Draw two discriminators' float32 probabilities, many exactly on the threshold grid."""
    rng = np.random.default_rng(0)
    drawn = rng.beta(0.5, 0.7, 5000)
    ours = np.where(rng.random(5000) < 0.5, drawn.round(3), drawn)
    return {"ours": ours.astype(np.float32), "theirs": np.sqrt(drawn).astype(np.float32)}


def truths() -> np.ndarray:
    return np.random.default_rng(1).choice([1, 0, -1], 5000, p=[0.4, 0.5, 0.1])


def state_names(p, low: float, high: float) -> list[str]:
    states = MiningRule(low=low, high=high).states(torch.tensor(p, dtype=torch.float32))
    return [STATE_NAMES[int(s)] for s in states]


def make_mined(index: int) -> Mined:
    p = float(np.float32(index / COUNT))
    pixels = np.random.default_rng(index).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    return Mined(
        direction=("i2t", "t2i")[index % 2],
        anchor_image=Image.fromarray(pixels),
        anchor_caption=f"a dog on beach number{index:03d}",
        mined_image=None if index == 0 else Image.fromarray(pixels[::-1].copy()),
        mined_caption=EVIL if index == COUNT - 1 else "two children run",
        probability=p,
        truth=[True, False, None][index % 3],
        epoch=index % 4,
        state=state_names([p], LOW, HIGH)[0],
        anchor_index=1000 + index,
        mined_index=2000 + index,
    )


def make_report(folder, judged=True):
    curve = Curve(
        "Loss",
        "step",
        "loss",
        [Series(n, [0, 1, 2], [3.0, 2.0, k]) for k, n in enumerate(("itc", "itm"))],
    )
    return write_report(
        folder / "report.html",
        title="A run",
        headline="It ran.",
        tables=[
            Table(
                "Figures",
                ["name", *(f"column {k}" for k in range(12))],
                [["a long name of a figure", *[1.5] * 12]],
            )
        ],
        curves=[curve],
        connections=[make_mined(index) for index in range(COUNT)],
        judged=[Judgements.of(name, p, truths()) for name, p in probabilities().items()]
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
    return make_report(tmp_path_factory.mktemp("page"))


@pytest.fixture
def page(browser, path):
    browser.set_size(1200, 900)
    browser.errors.clear()
    browser.requests.clear()
    browser.open(path)
    yield browser
    assert browser.errors == [] and browser.outside() == []


def outcome_table(page) -> dict[str, list[str]]:
    rows = page.evaluate(
        "[...document.querySelectorAll('#outcome tr[data-state]')].map("
        "(row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return {row[0]: row[1:] for row in rows}


def expected_outcome(
    p: np.ndarray, truth: np.ndarray, low: float, high: float
) -> dict[str, list[str]]:
    """Count the table by `MiningRule`, as in training."""
    states = MiningRule(low=low, high=high).states(torch.from_numpy(p)).numpy()
    table = {}
    for state in (POSITIVE, AMBIGUOUS, KEPT):
        rows = states == state
        known = [f"{(rows & (truth == t)).sum():,}" for t in (1, 0)]
        share = f"{100 * rows.sum() / len(p):.1f} %"
        table[STATE_NAMES[state]] = [f"{rows.sum():,}", share, *known]
    return table


def expected_quality(p, truth, high) -> str:
    above = p > np.float32(high)
    precision = (truth[above] == 1).sum() / (truth[above] >= 0).sum()
    recall = (above & (truth == 1)).sum() / (truth == 1).sum()
    base_rate = (truth == 1).sum() / (truth >= 0).sum()
    rates = f"precision {100 * precision:.1f} %, base rate {100 * base_rate:.1f} %"
    return f"{rates}, recall {100 * recall:.1f} %"


def centre_of(page, selector: str) -> tuple[float, float]:
    return tuple(
        page.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
    )


def x_in_plot(page, p: float) -> float:
    return page.evaluate(
        "(() => { const r = document.getElementById('plot').getBoundingClientRect();"
        f"return r.x + {p} * r.width; }})()"
    )


def drag(page, which: str, to: float, touch: bool = False) -> None:
    x, y = centre_of(page, f".handle.{which}")
    end = x_in_plot(page, to)
    path = [x + (end - x) * k / 5 for k in range(6)]
    if touch:
        touch_event = "Input.dispatchTouchEvent"
        page.command(touch_event, type="touchStart", touchPoints=[{"x": x, "y": y}])
        for position in path:
            page.command(touch_event, type="touchMove", touchPoints=[{"x": position, "y": y}])
        page.command(touch_event, type="touchEnd", touchPoints=[])
        return
    button = {"y": y, "button": "left", "buttons": 1, "clickCount": 1}
    page.command("Input.dispatchMouseEvent", type="mousePressed", x=x, **button)
    for position in path:
        page.command("Input.dispatchMouseEvent", type="mouseMoved", x=position, **button)
    page.command("Input.dispatchMouseEvent", type="mouseReleased", x=end, **button)


def threshold_value(page, which: str) -> float:
    return float(page.evaluate(f"document.getElementById('{which}-value').textContent"))


def select_option(page, selector: str, text: str) -> None:
    page.evaluate(
        f"(() => {{ const s = document.querySelector({json.dumps(selector)});"
        f"s.value = [...s.options].find((o) => o.text === {json.dumps(text)}).value;"
        "s.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )


def shown_cards(page) -> list[dict]:
    return page.evaluate(
        "[...document.querySelectorAll('#cards > li')].map((li) => ({"
        "state: li.querySelector('.top b').textContent,"
        "p: Number(li.querySelector('.meter b').textContent),"
        "text: li.textContent }))"
    )


def status_text(page) -> str:
    return page.evaluate("document.getElementById('status').textContent")


def screenshot(page, selector: str) -> Image.Image:
    page.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView()")
    box = page.evaluate(
        f"(() => {{ const r = document.querySelector({json.dumps(selector)})"
        ".getBoundingClientRect();"
        "return [r.x + scrollX, r.y + scrollY, r.width, r.height]; })()"
    )
    clip = dict(zip(("x", "y", "width", "height"), box, strict=True), scale=1)
    data = page.command("Page.captureScreenshot", format="png", clip=clip)["data"]
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


# Rendering


def test_curves_and_images_are_rendered(page):
    page.until("[...document.images].every((i) => i.complete)")
    boxes = page.evaluate(
        "[...document.querySelectorAll('.chart > img')].map((i) => "
        "[i.naturalWidth, i.getBoundingClientRect().height])"
    )
    assert len(boxes) == 1 and min(boxes[0]) > 100
    # With two lines, grid and text there are many colours; a blank box would have one.
    assert len(screenshot(page, ".chart > img").getcolors(1 << 20)) > 20
    assert len(screenshot(page, "#plot").getcolors(1 << 20)) > 5
    widths = page.evaluate(
        "[...document.querySelectorAll('#cards img')].map((i) => i.naturalWidth)"
    )
    assert len(widths) == 48 and set(widths) == {80}
    assert len(screenshot(page, "#cards li img").getcolors(1 << 20)) > 500


def test_card_without_an_image_shows_a_note(page):
    select_option(page, "#order", "probability, lowest first")
    first = shown_cards(page)[0]
    assert "no picture" in first["text"] and first["p"] == 0


def test_caption_is_not_interpreted_as_markup(page):
    assert page.evaluate("document.title") == "A run"
    assert page.evaluate("document.scripts.length") == 2
    assert page.evaluate("document.querySelectorAll('#cards script').length") == 0
    assert EVIL in shown_cards(page)[0]["text"]
    assert page.evaluate("document.querySelectorAll('[onerror]').length") == 0


# Thresholds


def test_first_counts_use_the_runs_thresholds(page):
    p = probabilities()["ours"]
    assert outcome_table(page) == expected_outcome(p, truths(), LOW, HIGH)
    assert expected_quality(p, truths(), HIGH) in page.evaluate(
        "document.getElementById('quality').textContent"
    )
    assert page.evaluate("document.getElementById('own').disabled")


@pytest.mark.parametrize("touch", [False, True])
@pytest.mark.parametrize(("which", "to"), [("high", 0.653), ("low", 0.31), ("high", 0.2)])
def test_dragging_a_threshold_updates_the_counts(page, which, to, touch):
    page.set_size(1200, 900, touch)
    drag(page, which, to, touch)
    low, high = threshold_value(page, "low"), threshold_value(page, "high")
    assert (low if which == "low" else high) == pytest.approx(to, abs=0.002)
    assert low == min(high, LOW) if which == "high" else high == HIGH  # low follows high
    p = probabilities()["ours"]
    assert outcome_table(page) == expected_outcome(p, truths(), low, high)
    assert expected_quality(p, truths(), high) in page.evaluate(
        "document.getElementById('quality').textContent"
    )


def test_keys_move_a_slider_by_one_grid_step(page):
    page.evaluate("document.getElementById('high').focus()")
    for key, high in (("ArrowRight", 0.801), ("ArrowLeft", 0.8), ("ArrowLeft", 0.799)):
        page.press(key)
        assert threshold_value(page, "high") == high
        assert outcome_table(page) == expected_outcome(probabilities()["ours"], truths(), LOW, high)
    page.press("Home")
    assert threshold_value(page, "high") == threshold_value(page, "low") == 0.001
    page.click("#own")
    assert (threshold_value(page, "low"), threshold_value(page, "high")) == (LOW, HIGH)


def test_another_discriminator_can_be_selected(page):
    select_option(page, "#source", "theirs")
    assert outcome_table(page) == expected_outcome(probabilities()["theirs"], truths(), LOW, HIGH)


def test_histogram_of_cards_follows_the_selection(page):
    select_option(page, "#source", "the connections chosen below")
    p = np.array([make_mined(k).probability for k in range(COUNT)], np.float32)
    truth = np.array([[1, 0, -1][k % 3] for k in range(COUNT)])
    assert outcome_table(page) == expected_outcome(p, truth, LOW, HIGH)
    select_option(page, "#direction", "text → image")
    assert outcome_table(page) == expected_outcome(p[1::2], truth[1::2], LOW, HIGH)


def test_cards_are_counted_without_judgements(browser, tmp_path):
    browser.open(make_report(tmp_path, judged=False))
    p = np.array([make_mined(k).probability for k in range(COUNT)], np.float32)
    truth = np.array([[1, 0, -1][k % 3] for k in range(COUNT)])
    assert outcome_table(browser) == expected_outcome(p, truth, LOW, HIGH)
    drag(browser, "low", 0.3)
    assert outcome_table(browser) == expected_outcome(
        p, truth, threshold_value(browser, "low"), HIGH
    )


def test_card_states_follow_the_thresholds(page):
    select_option(page, "#state", "ambiguous")
    p = [make_mined(k).probability for k in range(COUNT)]
    count = state_names(p, LOW, HIGH).count("ambiguous")
    assert status_text(page).startswith(f"{count} of {COUNT}")
    drag(page, "low", 0.25)
    states = state_names(p, threshold_value(page, "low"), HIGH)
    assert states.count("ambiguous") > count
    assert status_text(page).startswith(f"{states.count('ambiguous')} of {COUNT}")
    assert {card["state"] for card in shown_cards(page)} == {"ambiguous"}
    page.click("#own")
    assert status_text(page).startswith(f"{count} of {COUNT}")


# Search and order


def test_search_by_words_and_numbers(page):
    page.click("#search")
    for letter in "beach number007":
        page.press(letter)
    assert (
        status_text(page).startswith(f"1 of {COUNT}")
        and "number007" in shown_cards(page)[0]["text"]
    )
    page.click("#controls button[type=reset]")
    page.until(f"document.getElementById('status').textContent.startsWith('{COUNT} of')")
    page.click("#search")
    for letter in "1042":
        page.press(letter)
    assert "number042" in shown_cards(page)[0]["text"] and len(shown_cards(page)) == 1


def test_orders_sort_the_cards(page):
    probabilities_shown = [card["p"] for card in shown_cards(page)]
    assert probabilities_shown == sorted(probabilities_shown, reverse=True)
    select_option(page, "#order", "nearest to the threshold high")
    distances = [abs(card["p"] - HIGH) for card in shown_cards(page)]
    assert distances == pytest.approx(sorted(distances), abs=2e-3) and distances[0] < 0.01
    select_option(page, "#order", "number of the anchor")
    assert [f"number{k:03d}" in card["text"] for k, card in enumerate(shown_cards(page))] == [
        True
    ] * 24
    page.click("[data-turn='1']")
    assert "page 2 of 3" in status_text(page) and "number024" in shown_cards(page)[0]["text"]


# On a phone


def test_nothing_overflows_on_a_phone_screen(page):
    page.set_size(360, 740, phone=True)
    page.reload()
    assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth")
    # Touch targets are at least 40 pixels wide and high.
    sizes = page.evaluate(
        "[...document.querySelectorAll('button, select, input, .handle')].map((e) => {"
        "const r = e.getBoundingClientRect(); return [e.id || e.className, r.width, r.height]; })"
        ".filter(([, width]) => width > 0)"
    )
    assert all(width >= 40 and height >= 40 for _, width, height in sizes), sizes
    page.set_size(1200, 900)
