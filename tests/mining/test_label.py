"""Labelling by people: random draw, blind page that keeps answers, and the correction factor."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import zlib
from pathlib import Path

import judged_cases
import numpy as np
import pytest
from browser import Browser, needs_browser
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_cases import page_data
from PIL import Image

from lavis_mafa.cli import main
from lavis_mafa.metrics.intervals import wilson
from lavis_mafa.mining.judged_pairs import INVALID, UNKNOWN, VALID
from lavis_mafa.mining.quality.annotator_labels import draw, read_labels
from lavis_mafa.mining.quality.correction import correction_by_truth, correction_of
from lavis_mafa.mining.quality.label_page import _write_label_page

EVIL = """</script><script>document.title = "x"</script><img src=x onerror=a()> {{data}} & '"""


def factor_of(path):
    found = correction_of([read_labels(path)])
    assert found.name == "con_d"
    return found.factor, found.low, found.high


class ColourData:
    """Images of one colour; captions contain the sample's number, the third is an HTML
    injection.
    """

    def show(self, number):
        if number == 13:
            raise OSError("broken")
        caption = EVIL if number == 3 else f"caption {number}"
        return Image.new("RGB", (40 + number, 30), (number * 5 % 256, 90, 120)), caption

    def source(self, number):
        return None, self.show(number)[1]

    def __len__(self):
        return 50


def judged_file(probability, **about):
    numbers = np.arange(len(probability))
    texts = (numbers + 3) % len(numbers)
    return judged_cases.judged_file(numbers, texts, None, {"low": 0.5, **about}, con_d=probability)


def save_labels(path, judged, answers, *more, **changes):
    """Write answers by rows of the judged file."""
    named = [(judged.image[row], judged.text[row], answer) for row, answer in answers]
    return judged_cases.save_labels(path, judged.digest, named, *more, **changes)


# Which pairs are drawn


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0, 0.05, 0.1, 0.35, 0.5, 0.55, 0.8, 1.0, np.nan]), min_size=1),
    st.integers(1, 40),
    st.sampled_from([None, 0.0, 0.5, 0.8]),
)
def test_drawn_pairs_are_allowed_and_distinct(probability, count, above):
    p = np.array(probability, np.float32)
    allowed = ~np.isnan(p) if above is None else p > np.float32(above)
    if not allowed.any():
        with pytest.raises(ValueError, match="none of the"):
            draw(p, count, above, 0)
        return
    rows, strata = draw(p, count, above, 0)
    assert len(set(rows)) == len(rows) == min(count, allowed.sum())
    assert allowed[rows].all()
    assert sum(s["drawn"] for s in strata) == len(rows)
    assert sum(s["pairs"] for s in strata) == allowed.sum()
    for k, s in enumerate(strata):
        low = -1 if above is None and k == 0 else np.float32(s["low"])
        inside = [(low < q <= np.float32(s["high"])) for q in p]
        assert (sum(inside), sum(inside[row] for row in rows)) == (s["pairs"], s["drawn"])
    # Sizes are as equal as possible: only an exhausted stratum has two or more fewer than the
    # largest.
    most = max(s["drawn"] for s in strata)
    assert all(s["drawn"] >= most - 1 for s in strata if s["drawn"] < s["pairs"])


@pytest.mark.parametrize("above", [-0.1, 1.0, float("nan")])
def test_invalid_threshold_is_rejected(above):
    with pytest.raises(ValueError, match="expected at least 0 and below 1"):
        draw(np.array([0.9], np.float32), 1, above, 0)


def test_draw_is_uniform_and_depends_on_the_seed():
    p = np.array([0.9] * 6 + [0.1] * 6, np.float32)
    times_drawn = np.zeros(12)
    for seed in range(600):
        np.add.at(times_drawn, draw(p, 2, 0.5, seed)[0], 1)
    assert not times_drawn[6:].any() and np.all(np.abs(times_drawn[:6] - 200) < 60)
    assert np.array_equal(draw(p, 5, 0.5, 3)[0], draw(p, 5, 0.5, 3)[0])


# The page as a file


def test_page_is_blind_complete_and_safe(tmp_path):
    probability = np.linspace(0.4, 0.98765, 30)
    judged = judged_file(probability)
    path = tmp_path / "labels.html"
    pair_count = _write_label_page(path, judged, ColourData(), count=30, seed=1)
    text = path.read_text()
    data = page_data(path)
    positive = {
        (i, t) for i, t, p in zip(judged.image, judged.text, probability, strict=True) if p > 0.5
    }
    readable = {(i, t) for i, t in positive if 13 not in (i, t)}
    assert {(i, t) for i, t, *_ in data["pairs"]} == readable and len(readable) == pair_count
    for _, text_number, image_index, caption in data["pairs"]:
        assert caption == (EVIL if text_number == 3 else f"caption {text_number}")
        assert data["images"][image_index].startswith("data:image/")
    assert data["head"]["judged"] == judged.digest
    assert set(data["head"]) == {"kind", "version", "page", "judged", "name", "drawn"}
    assert all(len(pair) == 4 for pair in data["pairs"])
    assert not re.search(r"0\.9876|probability", text)
    assert len(re.findall("<script", text)) == 2 and not re.search(r"(src|href)=[\"']?http", text)
    script = text.split("<script>")[1].split("</script>")[0]
    expected = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{expected}'" in text and "default-src 'none'" in text


def test_page_id_names_the_draw(tmp_path):
    judged = judged_file([0.9] * 30)
    ids = []
    for seed in (0, 0, 1):
        _write_label_page(tmp_path / "a.html", judged, ColourData(), count=5, seed=seed)
        ids.append(page_data(tmp_path / "a.html")["head"]["page"])
    assert ids[0] == ids[1] != ids[2]


def test_image_of_several_pairs_is_embedded_once(tmp_path):
    judged = judged_file([0.9, 0.9, 0.9])
    judged.image[:] = 5
    _write_label_page(tmp_path / "a.html", judged, ColourData(), count=3)
    data = page_data(tmp_path / "a.html")
    assert len(data["pairs"]) == 3 and len(data["images"]) == 1


# The correction factor


def test_factor_is_the_share_of_yes(tmp_path):
    judged = judged_file([0.9] * 10)
    answers = [(k, "yes") for k in range(5)] + [(5, "no"), (6, "unsure")]
    path = save_labels(tmp_path / "labels.json", judged, answers)
    assert factor_of(path) == pytest.approx((5 / 6, *wilson(5, 6)))
    assert correction_of([read_labels(path)]).n == 6


def quality_of(folder, judged, *labels):
    """Return the content of ``label quality`` of a judged file with labels."""
    judged.save(folder / "judged.npz")
    words = ["label", "quality", folder, "--labels", *labels, "--output", folder / "out"]
    assert main(list(map(str, words))) == 0
    return json.loads((folder / "out" / "quality.json").read_text())


def test_several_people_on_one_page_count_once_per_pair(tmp_path, capsys):
    judged = judged_file([0.9] * 10)
    answers = [(0, "yes"), (1, "yes"), (2, "no"), (3, "no")]
    first = save_labels(tmp_path / "one.json", judged, answers)
    answers = [(0, "yes"), (1, "no"), (2, "no"), (3, "unsure")]
    second = save_labels(tmp_path / "two.json", judged, answers)
    content = quality_of(tmp_path, judged, first, second)
    (one,) = content["corrections"]
    assert one["factor"] == pytest.approx((1 + 0.5 + 0 + 0) / 4) and one["n"] == 4
    assert (one["low"], one["high"]) == pytest.approx(wilson(1.5, 4))
    assert "Annotators confirm 37.5 %" in capsys.readouterr().out


def test_factor_is_weighted_by_strata_of_probability(tmp_path):
    judged = judged_file([0.05] * 10 + [0.55] * 20 + [0.95] * 10, cfg_path="x")
    rows, strata = draw(judged.probability_by(None), 12, None, 0)
    answers = ["yes" if judged.probability_by(None)[row] > 0.9 else "no" for row in rows]
    answers = list(zip(rows, answers, strict=True))
    path = save_labels(tmp_path / "l.json", judged, answers, None, strata=strata)
    with pytest.raises(ValueError, match="give the --output of the counts"):
        correction_of([read_labels(path)])
    # Four of each stratum were drawn, so the twenty weigh twice as much as the ten.
    (one,) = quality_of(tmp_path, judged, path)["corrections"]
    assert one["factor"] == pytest.approx(10 / 30)


def test_a_pair_at_the_threshold_is_no_match(tmp_path):
    """A match is strictly above, as in mining; 0.3 is not a float32 number."""
    judged = judged_file([0.3, 0.3, 0.31, 0.9], low=0.3)
    strata = [{"low": 0.0, "high": 0.6, "pairs": 3}, {"low": 0.6, "high": 1.0, "pairs": 1}]
    answers = [(0, "no"), (1, "no"), (2, "yes"), (3, "yes")]
    path = save_labels(tmp_path / "l.json", judged, answers, None, strata=strata)
    found = correction_of([read_labels(path)], judged)
    assert (found.factor, found.n, found.above) == (1.0, 2, 0.3)
    judged.truth[:] = [INVALID, INVALID, VALID, UNKNOWN]
    by_truth = correction_by_truth(judged, "con_d", 0.3)
    assert (by_truth.factor, by_truth.n) == (1.0, 1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kind": "other"}, "kind: Input should be 'lavis_mafa labels', got 'other'"),
        ({"version": 2}, "version: Input should be 1, got 2"),
        ({"labels": [{"image": 0, "text": 3, "answer": "maybe"}]}, "maybe"),
        ({"labels": [{"image": 0, "answer": "yes"}]}, "labels.0.text: Field required"),
        ({"labels": [{"image": -1, "text": 3, "answer": "yes"}]}, "labels.0.image"),
        (
            {"labels": [{"image": True, "text": 3, "answer": "yes"}]},
            "labels.0.image: Input should be a valid integer, got True",
        ),
        ({"labels": [{"image": 0, "text": 3, "answer": "yes"}] * 2}, "two answers"),
        ({"labels": None}, "labels: Input should be a valid array"),
        ({"drawn": {"strata": []}}, "drawn.above: Field required"),
        ({"page": 5}, "page: Input should be a valid string, got 5"),
        ({"labels": "yes"}, "labels: Input should be a valid array"),
        ({"labels": [{"image": 10**100, "text": 3, "answer": "yes"}]}, "labels.0.image"),
        ({"labels": [{"image": 0, "text": 3, "answer": ["yes"]}]}, "labels.0.answer"),
        ({"drawn": {"above": None, "strata": []}}, "drawn.strata"),
        *[
            ({"drawn": {"above": above, "strata": judged_cases.STRATA}}, "drawn.above")
            for above in (float("nan"), float("inf"), "0.5", 1)
        ],
        *[
            (
                {"drawn": {"above": 0.5, "strata": [{"low": low, "high": high, "pairs": 3}]}},
                "strata",
            )
            for low, high in ((float("nan"), 1.0), (0.5, 10**400), (1.0, 0.5))
        ],
    ],
)
def test_damaged_labels_are_rejected(tmp_path, changes, message):
    path = save_labels(tmp_path / "labels.json", judged_file([0.9] * 9), [(0, "yes")], **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_labels(path)
    assert str(path) in str(caught.value)


def test_answers_that_are_all_unsure_give_no_factor(tmp_path):
    path = save_labels(tmp_path / "labels.json", judged_file([0.9] * 9), [(0, "unsure")])
    with pytest.raises(ValueError, match="no match was answered yes or no"):
        correction_of([read_labels(path)])


def test_other_files_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="label page"):
        read_labels(tmp_path / "none.json")
    nested = b"[" * 3000 + b"]" * 3000
    for content in (b"[1]", b"{}", b"no json", b"3", b"null", b"", b"\xff", nested):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(ValueError, match="a.json"):
            read_labels(tmp_path / "a.json")


def test_labels_of_different_draws_are_not_mixed(tmp_path):
    first = save_labels(tmp_path / "1.json", judged_file([0.9] * 9), [(0, "yes")])
    second = save_labels(tmp_path / "2.json", judged_file([0.9] * 8), [(0, "yes")])
    with pytest.raises(ValueError, match="judged"):
        correction_of([read_labels(first), read_labels(second)])


def test_command_loads_the_judged_data(tmp_path):
    root = Path(__file__).parents[2]
    about = {
        "cfg_path": str(root / "projects/mafa/train/albef_toy.yaml"),
        "options": ["model.mafa.con_d.arch=oracle"],
    }
    judged_file([0.2] * 5 + [0.7] * 5, **about).save(tmp_path / "judged.npz")
    output = tmp_path / "labels.html"
    command = ["label", "page", str(tmp_path), "--output", str(output)]
    assert main([*command, "--count", "3"]) == 0
    pairs = page_data(output)["pairs"]
    assert len(pairs) == 3 and all(image >= 5 for image, *_ in pairs)
    assert main([*command, "--all"]) == 0
    assert len(page_data(output)["pairs"]) == 10
    assert main([*command, "--all", "--above", "0.3"]) == 1
    out_of_range = judged_file([0.9], **about)
    out_of_range.image[0] = 10**6
    out_of_range.save(tmp_path / "judged.npz")
    assert main(command) == 1


def test_page_needs_the_config_of_the_data(tmp_path, caplog):
    about = {"low": 0.5}
    judged_cases.judged_file([0], [1], None, about, con_d=[0.9]).save(tmp_path / "judged.npz")
    assert main(["label", "page", str(tmp_path)]) == 1
    assert "--cfg-path" in caplog.text


# The page in a browser


@pytest.fixture(scope="module")
def chromium():
    with Browser() as browser:
        yield browser


@pytest.fixture
def page(tmp_path, chromium, request):
    path = tmp_path / "labels.html"
    # The seed is part of the key under which the page stores answers: each test has its own.
    seed = zlib.crc32(request.node.name.encode())
    _write_label_page(path, judged_file([0.9] * 8), ColourData(), count=8, seed=seed)
    chromium.requests.clear()
    chromium.errors.clear()
    for old in chromium.downloads.iterdir():
        old.unlink()
    chromium.set_size(1000, 800)
    chromium.open(path)
    yield chromium, page_data(path)
    assert chromium.errors == []
    assert chromium.outside() == []


def save_and_read(browser) -> dict:
    for old in browser.downloads.iterdir():
        old.unlink()
    browser.click("#save")
    return json.loads(browser.downloaded().read_text())


def answers_of(content) -> list[tuple[int, int, str]]:
    return [(one["image"], one["text"], one["answer"]) for one in content["labels"]]


def expected(data, *answers) -> list[tuple[int, int, str]]:
    pairs = [pair[:2] for pair in data["pairs"]]
    return [(*pair, a) for pair, a in zip(pairs, answers, strict=False) if a]


@needs_browser
def test_pressed_keys_are_saved_as_answers(page, tmp_path):
    browser, data = page
    for key in "ynyu":
        browser.press(key)
    content = save_and_read(browser)
    assert answers_of(content) == expected(data, "yes", "no", "yes", "unsure")
    assert {key: content[key] for key in data["head"]} == data["head"]
    assert all(one["seconds"] >= 0 for one in content["labels"])
    path = tmp_path / "labels.json"
    path.write_text(json.dumps(content))
    assert factor_of(path) == pytest.approx((2 / 3, *wilson(2, 3)))


@needs_browser
def test_captions_are_shown_as_text(page):
    browser, data = page
    index = next(k for k, pair in enumerate(data["pairs"]) if pair[1] == 3)
    for _ in range(index):
        browser.press("ArrowRight")
    assert browser.evaluate("document.getElementById('caption').textContent") == EVIL
    assert browser.evaluate("document.querySelectorAll('img, script').length") == 3
    assert browser.evaluate("document.title") == "Does the text describe the image?"


@needs_browser
def test_going_back_undo_and_skipping(page):
    browser, data = page
    browser.press("y")
    browser.press("ArrowRight")  # skip the second pair
    browser.press("n")
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    browser.press("u")  # answers the second; the next unanswered one is the fourth
    assert "Pair 4 of 8 · 3 answered" in browser.evaluate("document.body.innerText")
    browser.press("z")
    assert answers_of(save_and_read(browser)) == expected(data, "yes", None, "no")
    assert "Pair 2 of 8" in browser.evaluate("document.body.innerText")
    browser.press("ArrowLeft")
    browser.press("n")  # replaces yes
    assert answers_of(save_and_read(browser)) == expected(data, "no", None, "no")
    browser.press("z", "Control")
    assert answers_of(save_and_read(browser)) == expected(data, "yes", None, "no")


def reloaded(browser, script, wanted):
    """Reload until a script has the wanted value, five times at most: Chromium may answer with the
    state before the last write to localStorage, and later correctly, if it is not asked at once."""
    for wait in (0, 0.1, 0.3, 1, 3):
        time.sleep(wait)
        browser.reload()
        if wanted(browser.evaluate(script)):
            return True
    return False


@needs_browser
def test_reload_keeps_answers(page):
    browser, data = page
    for key in "yn":
        browser.press(key)
    shown = "document.body.innerText"
    assert reloaded(browser, shown, lambda text: "Pair 3 of 8 · 2 answered" in text)
    browser.press("u")
    assert answers_of(save_and_read(browser)) == expected(data, "yes", "no", "unsure")


@needs_browser
def test_opening_the_page_writes_no_answers(page):
    browser, _ = page
    key = browser.evaluate("KEY")
    assert browser.evaluate("Object.keys(localStorage).filter((key) => key.startsWith(KEY))") == []
    stored = '{"of an older page": ["yes", 1]}'
    browser.evaluate(f"localStorage.setItem({json.dumps(key)}, {json.dumps(stored)})")
    for _ in range(3):
        assert reloaded(browser, "localStorage.getItem(KEY)", stored.__eq__)


@needs_browser
def test_load_accepts_only_answers_of_this_page(page, tmp_path):
    browser, data = page
    for key in "ynu":
        browser.press(key)
    content = save_and_read(browser)
    browser.click("#clear")
    browser.until("document.querySelector('#save').disabled")
    mine, other, broken = (tmp_path / name for name in ("mine.json", "other.json", "broken.json"))
    mine.write_text(json.dumps(content))
    other.write_text(json.dumps({**content, "page": "another"}))
    broken.write_text("{")
    for path, message in ((broken, "is not a file"), (other, "another page"), (mine, "Loaded 3")):
        browser.choose_file("#load", path)
        browser.until(f"document.getElementById('status').textContent.includes('{message}')")
    assert answers_of(save_and_read(browser)) == answers_of(content)
    browser.press("z")
    assert browser.evaluate("document.querySelector('#save').disabled")
    browser.press("z")  # undoes clearing
    assert answers_of(save_and_read(browser)) == answers_of(content)


@needs_browser
def test_held_keys_and_browser_shortcuts_are_ignored(page):
    browser, data = page
    browser.press("n", "Control")
    event = {"key": "y", "windowsVirtualKeyCode": 89, "text": "y"}
    browser.command("Input.dispatchKeyEvent", type="keyDown", **event)
    for _ in range(3):
        browser.command("Input.dispatchKeyEvent", type="keyDown", autoRepeat=True, **event)
    assert answers_of(save_and_read(browser)) == expected(data, "yes")


@needs_browser
def test_buttons_on_a_phone(page):
    browser, data = page
    browser.set_size(375, 667, phone=True)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 375
    bottom = "document.querySelector('#answers').getBoundingClientRect().bottom"
    assert browser.evaluate(bottom) <= 667
    for choice in ("no", "yes"):
        browser.click(f"#{choice}")
    browser.click("#back")
    pressed = "document.querySelector('#yes').getAttribute('aria-pressed')"
    assert browser.evaluate(pressed) == "true"
    assert answers_of(save_and_read(browser)) == expected(data, "no", "yes")


@needs_browser
def test_complete_page_asks_to_save(page):
    browser, data = page
    for _ in data["pairs"]:
        browser.press("y")
    status = "document.getElementById('status').textContent"
    assert "save the answers" in browser.evaluate(status)
    assert len(save_and_read(browser)["labels"]) == 8
    assert "Saved 8" in browser.evaluate(status)
