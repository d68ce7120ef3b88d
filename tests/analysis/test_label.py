"""Labelling: a fair draw, a blind page that keeps every answer, the right factor."""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, needs_browser
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lavis_mafa.analysis.judged_pairs import UNKNOWN, Judged
from lavis_mafa.analysis.quality.correction import CORRECTION, correction_of, read_correction
from lavis_mafa.analysis.quality.label_page import write_label_page
from lavis_mafa.analysis.quality.labels import LABELS, VERSION, draw, read_labels
from lavis_mafa.cli import main
from lavis_mafa.commands import label as command
from lavis_mafa.metrics.intervals import wilson
from lavis_mafa.pages.html import data_uri, fill, script_json

EVIL = """</script><script>document.title = "x"</script><img src=x onerror=a()> {{data}} & '"""


def factor_of(path):
    found = read_correction(path)
    assert found.name == "con_d"
    return found.factor, found.low, found.high


class Data:
    """Pictures of one colour; captions that tell their number, the third an attack."""

    def show(self, number):
        if number == 13:
            raise OSError("broken")
        caption = EVIL if number == 3 else f"caption {number}"
        return Image.new("RGB", (40 + number, 30), (number * 5 % 256, 90, 120)), caption

    def __len__(self):
        return 50


def judged(probability, **about) -> Judged:
    size = len(probability)
    texts = (np.arange(size) + 3) % size
    told = {"con_d": np.array(probability, np.float32)}
    none = np.full(size, UNKNOWN, np.int8)
    ones = np.ones(size, bool)
    return Judged(np.arange(size), texts, ones, ones, told, none, {"low": 0.5, **about})


def page_data(path: Path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.S)[1])


def save(path: Path, given: Judged, answers, above=0.5, page="p", strata=None, **changes) -> Path:
    if strata is None:
        strata = [{"low": 0.5, "high": 1.0, "pairs": 10, "drawn": 5}]
    content = {
        "kind": LABELS,
        "version": VERSION,
        "page": page,
        "judged": given.digest,
        "name": "con_d",
        "drawn": {"above": above, "count": 5, "seed": 0, "strata": strata},
        "labels": [
            {"image": int(given.image[row]), "text": int(given.text[row]), "answer": a}
            for row, a in answers
        ],
    }
    path.write_text(json.dumps({**content, **changes}))
    return path


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
    # As equal as the strata's sizes allow: only a stratum that is used up has less than the most
    # have, but for one.
    most = max(s["drawn"] for s in strata)
    assert all(s["drawn"] >= most - 1 for s in strata if s["drawn"] < s["pairs"])


@pytest.mark.parametrize("above", [-0.1, 1.0, float("nan")])
def test_what_is_no_threshold_is_refused(above):
    with pytest.raises(ValueError, match="expected at least 0 and below 1"):
        draw(np.array([0.9], np.float32), 1, above, 0)


def test_every_pair_is_as_likely_and_the_seed_decides():
    p = np.array([0.9] * 6 + [0.1] * 6, np.float32)
    seen = np.zeros(12)
    for seed in range(600):
        np.add.at(seen, draw(p, 2, 0.5, seed)[0], 1)
    assert not seen[6:].any() and np.all(np.abs(seen[:6] - 200) < 60)
    assert np.array_equal(draw(p, 5, 0.5, 3)[0], draw(p, 5, 0.5, 3)[0])


# The page as a file


def test_page_is_blind_whole_and_safe(tmp_path):
    probability = np.linspace(0.4, 0.98765, 30)
    given = judged(probability)
    path = tmp_path / "labels.html"
    shown = write_label_page(path, given, Data(), count=30, seed=1)
    text = path.read_text()
    data = page_data(path)
    called = {
        (i, t) for i, t, p in zip(given.image, given.text, probability, strict=True) if p > 0.5
    }
    readable = {(i, t) for i, t in called if 13 not in (i, t)}
    assert {(i, t) for i, t, *_ in data["pairs"]} == readable and len(readable) == shown
    for _, written, place, caption in data["pairs"]:
        assert caption == (EVIL if written == 3 else f"caption {written}")
        assert data["images"][place].startswith("data:image/")
    assert data["head"]["judged"] == given.digest
    assert set(data["head"]) == {"kind", "version", "page", "judged", "name", "drawn"}
    assert all(len(pair) == 4 for pair in data["pairs"])
    assert not re.search(r"0\.9876|probability", text)
    assert len(re.findall("<script", text)) == 2 and not re.search(r"(src|href)=[\"']?http", text)
    script = text.split("<script>")[1].split("</script>")[0]
    expected = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{expected}'" in text and "default-src 'none'" in text


def test_page_id_names_the_draw(tmp_path):
    given = judged([0.9] * 30)
    ids = []
    for seed in (0, 0, 1):
        write_label_page(tmp_path / "a.html", given, Data(), count=5, seed=seed)
        ids.append(page_data(tmp_path / "a.html")["head"]["page"])
    assert ids[0] == ids[1] != ids[2]


def test_an_image_of_two_pairs_is_embedded_once(tmp_path):
    given = judged([0.9, 0.9, 0.9])
    given.image[:] = 5
    write_label_page(tmp_path / "a.html", given, Data(), count=3)
    data = page_data(tmp_path / "a.html")
    assert len(data["pairs"]) == 3 and len(data["images"]) == 1


def test_an_image_is_made_small():
    uri = data_uri(Image.new("RGB", (900, 300)), 100)
    with Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))) as image:
        assert image.size == (100, 33)


def test_filling_is_one_pass_and_json_ends_no_script():
    assert fill("<script>1</script>{{a}}{{b}}", {"a": "{{b}}", "b": "2"}).endswith("{{b}}2")
    assert "<" not in script_json({"x": EVIL}) and json.loads(script_json(EVIL)) == EVIL


# The correction factor


def test_factor_is_the_share_of_yes(tmp_path):
    given = judged([0.9] * 10)
    answers = [(k, "yes") for k in range(5)] + [(5, "no"), (6, "unsure")]
    path = save(tmp_path / "labels.json", given, answers)
    assert factor_of(path) == pytest.approx((5 / 6, *wilson(5, 6)))
    assert correction_of([read_labels(path)]).n == 6


def test_several_people_on_one_page_count_once_a_pair(tmp_path, capsys):
    given = judged([0.9] * 10)
    one = save(tmp_path / "one.json", given, [(0, "yes"), (1, "yes"), (2, "no"), (3, "no")])
    two = save(tmp_path / "two.json", given, [(0, "yes"), (1, "no"), (2, "no"), (3, "unsure")])
    output = tmp_path / "correction.json"
    assert main(["label", "correct", str(one), str(two), "--output", str(output)]) == 0
    content = json.loads(output.read_text())
    assert content["factor"] == pytest.approx((1 + 0.5 + 0 + 0) / 4) and content["n"] == 4
    (both,) = content["agreement"]
    # Of three pairs: yes yes, yes no, no no: 2/3 agreed, by chance 2/3 * 1/3 + 1/3 * 2/3.
    assert both["pairs"] == 3 and both["agreed"] == pytest.approx(2 / 3)
    assert both["kappa"] == pytest.approx((2 / 3 - 4 / 9) / (1 - 4 / 9))
    assert [p["unsure"] for p in content["people"]] == [0, 1]
    assert factor_of(output) == pytest.approx((content["factor"], *wilson(1.5, 4)))
    assert "37.5 %" in capsys.readouterr().out


def test_by_probability_and_weighted(tmp_path):
    given = judged([0.05] * 10 + [0.55] * 20 + [0.95] * 10, cfg_path="x")
    rows, strata = draw(given.probability_by(None), 12, None, 0)
    told = ["yes" if given.probability_by(None)[row] > 0.9 else "no" for row in rows]
    path = save(tmp_path / "l.json", given, zip(rows, told, strict=True), None, strata=strata)
    with pytest.raises(ValueError, match="--judged"):
        read_correction(path)
    given.save(tmp_path / "judged.npz")
    output = tmp_path / "c.json"
    command = ["label", "correct", str(path), "--judged", str(tmp_path), "--output", str(output)]
    assert main(command) == 0
    content = json.loads(output.read_text())
    # Four of each stratum were drawn: the twenty weigh twice what the ten do.
    assert content["factor"] == pytest.approx(10 / 30)
    assert [b["n"] for b in content["bins"]] == [4, 0, 0, 0, 0, 4, 0, 0, 0, 4]
    assert [content["bins"][k]["yes"] for k in (0, 1, 5, 9)] == [0, None, 0, 1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kind": "other"}, "has kind 'other'"),
        ({"version": 2}, "has version 2"),
        ({"labels": [{"image": 0, "text": 3, "answer": "maybe"}]}, "maybe"),
        ({"labels": [{"image": 0, "answer": "yes"}]}, "no 'text'"),
        ({"labels": [{"image": -1, "text": 3, "answer": "yes"}]}, "-1, expected int"),
        ({"labels": [{"image": True, "text": 3, "answer": "yes"}]}, "True, expected int"),
        ({"labels": [{"image": 0, "text": 3, "answer": "yes"}] * 2}, "two answers"),
        (
            {"labels": [{"image": 0, "text": 3, "answer": "unsure"}]},
            "no match was answered yes or no",
        ),
        ({"labels": None}, "damaged"),
        ({"drawn": {"strata": []}}, "no 'above'"),
        ({"page": 5}, "5, expected str"),
    ],
)
def test_damaged_labels_are_refused(tmp_path, changes, message):
    path = save(tmp_path / "labels.json", judged([0.9] * 9), [(0, "yes")], **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_correction(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"factor": 1.2},
        {"low": 0.9},
        {"n": 0},
        {"factor": "a"},
        {"factor": True},
        {"high": None},
        {"name": 3},
    ],
)
def test_damaged_corrections_are_refused(tmp_path, changes):
    path = tmp_path / "correction.json"
    good = {"kind": CORRECTION, "version": 1, "factor": 0.8, "low": 0.7, "high": 0.9, "n": 9}
    good |= {"name": "con_d", "above": 0.5}
    path.write_text(json.dumps(good))
    assert factor_of(path) == (0.8, 0.7, 0.9)
    path.write_text(json.dumps({**good, **changes}))
    with pytest.raises(ValueError, match="is damaged"):
        read_correction(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="label page"):
        read_correction(tmp_path / "none.json")
    for text in ("[1]", "{}", "no json"):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match="a.json"):
            read_correction(tmp_path / "a.json")


def test_labels_of_two_draws_are_not_mixed(tmp_path):
    one = save(tmp_path / "1.json", judged([0.9] * 9), [(0, "yes")])
    two = save(tmp_path / "2.json", judged([0.9] * 8), [(0, "yes")])
    with pytest.raises(ValueError, match="judged"):
        correction_of([read_labels(one), read_labels(two)])


def test_command_reads_the_data_that_was_judged(tmp_path):
    root = Path(__file__).parents[2]
    about = {
        "cfg_path": str(root / "projects/mafa/train/albef_toy.yaml"),
        "options": ["model.mafa.con_d.arch=oracle"],
    }
    judged([0.2] * 5 + [0.7] * 5, **about).save(tmp_path / "judged.npz")
    output = tmp_path / "labels.html"
    command = ["label", "page", str(tmp_path), "--output", str(output)]
    assert main([*command, "--count", "3"]) == 0
    pairs = page_data(output)["pairs"]
    assert len(pairs) == 3 and all(image >= 5 for image, *_ in pairs)
    assert main([*command, "--all"]) == 0
    assert len(page_data(output)["pairs"]) == 10
    assert main([*command, "--all", "--above", "0.3"]) == 1
    far = judged([0.9], **about)
    far.image[0] = 10**6
    far.save(tmp_path / "judged.npz")
    assert main(command) == 1


def test_page_needs_to_know_the_data(tmp_path):
    judged([0.9]).save(tmp_path / "judged.npz")
    args = argparse.Namespace(
        part="page", judged=tmp_path, all=False, above=None, count=1, image_size=99, cfg_path=None
    )
    with pytest.raises(ValueError, match="--cfg-path"):
        command.run(args)


# The page in a browser


@pytest.fixture(scope="module")
def chromium():
    with Browser() as browser:
        yield browser


@pytest.fixture
def page(tmp_path, chromium):
    path = tmp_path / "labels.html"
    write_label_page(path, judged([0.9] * 8), Data(), count=8, seed=4)
    chromium.requests.clear()
    chromium.errors.clear()
    for old in chromium.downloads.iterdir():
        old.unlink()
    chromium.set_size(1000, 800)
    chromium.open(path)
    chromium.evaluate("localStorage.clear()")
    chromium.reload()
    yield chromium, page_data(path)
    assert chromium.errors == []
    assert chromium.outside() == []


def saved(browser) -> dict:
    for old in browser.downloads.iterdir():
        old.unlink()
    browser.click("#save")
    return json.loads(browser.downloaded().read_text())


def told(content) -> list[tuple[int, int, str]]:
    return [(one["image"], one["text"], one["answer"]) for one in content["labels"]]


def expected(data, *answers) -> list[tuple[int, int, str]]:
    pairs = [pair[:2] for pair in data["pairs"]]
    return [(*pair, a) for pair, a in zip(pairs, answers, strict=False) if a]


@needs_browser
def test_pressed_keys_are_what_is_saved(page, tmp_path):
    browser, data = page
    for key in "ynyu":
        browser.press(key)
    content = saved(browser)
    assert told(content) == expected(data, "yes", "no", "yes", "unsure")
    assert {key: content[key] for key in data["head"]} == data["head"]
    assert all(one["seconds"] >= 0 for one in content["labels"])
    path = tmp_path / "labels.json"
    path.write_text(json.dumps(content))
    assert factor_of(path) == pytest.approx((2 / 3, *wilson(2, 3)))


@needs_browser
def test_captions_are_text(page):
    browser, data = page
    place = next(k for k, pair in enumerate(data["pairs"]) if pair[1] == 3)
    for _ in range(place):
        browser.press("ArrowRight")
    assert browser.evaluate("document.getElementById('caption').textContent") == EVIL
    assert browser.evaluate("document.querySelectorAll('img, script').length") == 3
    assert browser.evaluate("document.title") == "Does the text describe the image?"


@needs_browser
def test_back_changes_undo_and_skipping(page):
    browser, data = page
    browser.press("y")
    browser.press("ArrowRight")  # the second is skipped
    browser.press("n")
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    browser.press("u")  # the second; the next open one is the fourth
    assert "Pair 4 of 8 · 3 answered" in browser.evaluate("document.body.innerText")
    browser.press("z")
    assert told(saved(browser)) == expected(data, "yes", None, "no")
    assert "Pair 2 of 8" in browser.evaluate("document.body.innerText")
    browser.press("ArrowLeft")
    browser.press("n")  # instead of yes
    assert told(saved(browser)) == expected(data, "no", None, "no")
    browser.press("z", "Control")
    assert told(saved(browser)) == expected(data, "yes", None, "no")


@needs_browser
def test_closing_loses_nothing(page):
    browser, data = page
    for key in "yn":
        browser.press(key)
    browser.reload()
    assert "Pair 3 of 8 · 2 answered" in browser.evaluate("document.body.innerText")
    browser.press("u")
    assert told(saved(browser)) == expected(data, "yes", "no", "unsure")


@needs_browser
def test_load_takes_answers_of_this_page_only(page, tmp_path):
    browser, data = page
    for key in "ynu":
        browser.press(key)
    content = saved(browser)
    browser.click("#clear")
    browser.until("document.querySelector('#save').disabled")
    mine, other, broken = (tmp_path / name for name in ("mine.json", "other.json", "broken.json"))
    mine.write_text(json.dumps(content))
    other.write_text(json.dumps({**content, "page": "another"}))
    broken.write_text("{")
    for path, message in ((broken, "is not a file"), (other, "another page"), (mine, "Loaded 3")):
        browser.choose_file("#load", path)
        browser.until(f"document.getElementById('status').textContent.includes('{message}')")
    assert told(saved(browser)) == told(content)
    browser.press("z")
    assert browser.evaluate("document.querySelector('#save').disabled")
    browser.press("z")  # of clearing
    assert told(saved(browser)) == told(content)


@needs_browser
def test_a_held_key_and_shortcuts_of_the_browser_are_no_answers(page):
    browser, data = page
    browser.press("n", "Control")
    event = {"key": "y", "windowsVirtualKeyCode": 89, "text": "y"}
    browser.command("Input.dispatchKeyEvent", type="keyDown", **event)
    for _ in range(3):
        browser.command("Input.dispatchKeyEvent", type="keyDown", autoRepeat=True, **event)
    assert told(saved(browser)) == expected(data, "yes")


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
    assert told(saved(browser)) == expected(data, "no", "yes")


@needs_browser
def test_all_answered_asks_to_save(page):
    browser, data = page
    for _ in data["pairs"]:
        browser.press("y")
    status = "document.getElementById('status').textContent"
    assert "save the answers" in browser.evaluate(status)
    assert len(saved(browser)["labels"]) == 8
    assert "Saved 8" in browser.evaluate(status)
