"""Labels by a person: the draw, the page and its CSV, and precision and recall by it."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, needs_browser
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_cases import judged_file, page_data, save_labels
from PIL import Image
from shard_files import write_rows

from lavis_mafa.cli import main
from lavis_mafa.data.pairs import PairSource
from lavis_mafa.tools.judged_pairs import Judged
from lavis_mafa.tools.label_page import _draw, _write_label_page
from lavis_mafa.tools.label_quality import COLUMNS, _read_labels

EVIL = """</script><script>document.title = "x"</script><img src=x onerror=a()> {{data}} & '"""


class ColourData:
    """Images of one colour; image 13 is broken, and the third caption is an HTML injection."""

    def show(self, number):
        if number == 13:
            raise OSError("broken")
        return Image.new("RGB", (40 + number, 30), (number * 5 % 256, 90, 120)), ""

    def source(self, number):
        captions = {3: EVIL, 4: "=cmd()", 5: 'a "b",\nc'}
        name = f"images/{number}.png"
        return PairSource(name, captions.get(number, f"caption {number}"), name)


def judged(probability, **others):
    numbers = np.arange(len(probability))
    return judged_file(numbers, np.roll(numbers, -3), con_d=probability, **others)


# The draw


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([0, 0.05, 0.1, 0.35, 0.5, 0.55, 0.8, 1.0, np.nan]), min_size=1),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.5, 0.8]),
)
def test_drawn_pairs_are_allowed_and_spread_over_the_tenths(probability, count, above):
    p = np.array(probability, np.float32)
    allowed = ~np.isnan(p) if above == 0 else p > np.float32(above)
    if not allowed.any():
        with pytest.raises(ValueError, match="none of the"):
            _draw(p, count, above, 0)
        return
    rows = _draw(p, count, above, 0)
    assert len(set(rows)) == len(rows) == min(count, allowed.sum()) and allowed[rows].all()
    edges = np.arange(1, 10).astype(np.float32) / np.float32(10)
    drawn, size = (
        np.bincount(np.searchsorted(edges, one), minlength=10) for one in (p[rows], p[allowed])
    )
    # Only an exhausted tenth has two or more fewer than the largest.
    assert all(d >= drawn.max() - 1 for d, s in zip(drawn, size, strict=True) if d < s)


@pytest.mark.parametrize("above", [-0.1, 1.0, 0.55, float("nan")])
def test_a_threshold_within_a_tenth_is_refused(above):
    with pytest.raises(ValueError, match=r"expected 0, 0\.1, "):
        _draw(np.array([0.9], np.float32), 1, above, 0)


def test_the_draw_is_uniform_within_a_tenth_and_depends_on_the_seed():
    p = np.array([0.95] * 6 + [0.15] * 6, np.float32)
    times_drawn = np.zeros(12)
    for seed in range(600):
        np.add.at(times_drawn, _draw(p, 4, 0.0, seed), 1)
    assert np.all(np.abs(times_drawn - 200) < 60)
    assert np.array_equal(_draw(p, 5, 0.5, 3), _draw(p, 5, 0.5, 3))


# The page


def test_page_is_complete_and_safe(tmp_path):
    pairs, path = judged([0.98765] * 30), tmp_path / "labels.html"
    assert _write_label_page(path, pairs, ColourData(), range(30)) == 29
    text, data = path.read_text(), page_data(path)
    ids = [pair["cells"][0] for pair in data["pairs"]]
    assert ids == [f"{k}_{(k + 3) % 30}" for k in range(30) if k != 13]
    for pair in data["pairs"]:
        image, text_number = map(int, pair["cells"][0].split("_"))
        assert pair["cells"][1:3] == [
            f"images/{image}.png",
            ColourData().source(text_number).caption,
        ]
        assert data["images"][pair["picture"]].startswith("data:image/")
    assert len(re.findall("<script", text)) == 2 and not re.search(r"(src|href)=[\"']?http", text)
    script = text.split("<script>")[1].split("</script>")[0]
    expected = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{expected}'" in text and "default-src 'none'" in text
    pairs.image[:] = 5
    _write_label_page(path, pairs, ColourData(), range(3))
    assert len(page_data(path)["images"]) == 1  # an image of several pairs is embedded once
    pairs.image[:] = 13
    with pytest.raises(ValueError, match="none of the drawn pairs can be read"):
        _write_label_page(path, pairs, ColourData(), range(3))


def test_command_loads_the_judged_data(tmp_path, caplog):
    root = Path(__file__).parents[2]
    about = {
        "cfg_path": str(root / "projects/mafa/train/albef_toy.yaml"),
        "options": ["model.mafa.con_d.arch=oracle"],
    }
    judged([0.2] * 5 + [0.7] * 5, about=about).save(tmp_path / "judged.npz")
    output = tmp_path / "labels.html"
    command = ["label", "page", str(tmp_path), "--output", str(output)]
    assert main([*command, "--count", "3", "--above", "0.5"]) == 0
    pairs = page_data(output)["pairs"]
    assert len(pairs) == 3 and all(int(pair["cells"][0].split("_")[0]) >= 5 for pair in pairs)
    assert main([*command, "--name", "other"]) == 1
    assert "no discriminator 'other'" in caplog.text
    judged([0.9], about={"low": 0.5}).save(tmp_path / "judged.npz")
    assert main(command) == 1
    assert "does not record its config" in caplog.text


def test_pairs_of_texts_are_labelled_until_their_data_change(tmp_path, caplog):
    rows = [{"question": f"q{k}", "answer": f"a{k}"} for k in range(12)]
    data = write_rows(tmp_path / "pairs.csv", rows)
    np.save(tmp_path / "one.npy", np.eye(12, dtype=np.float32) + 0.1)
    given = ["--data", data, "--text-keys", "question", "answer", "--output", tmp_path]
    given += ["--encoder", tmp_path / "one.npy", tmp_path / "one.npy"]
    assert main(list(map(str, ["mine", *given]))) == 0
    command = ["label", "page", str(tmp_path), "--output", str(tmp_path / "labels.html")]
    assert main(command) == 0
    found = page_data(tmp_path / "labels.html")
    assert found["images"] == [] and len(found["pairs"]) == len(Judged.load(tmp_path))
    for pair in found["pairs"]:
        image, text = pair["cells"][0].split("_")
        assert pair["cells"][1:3] == [f"q{image}", f"a{text}"] and pair["picture"] is None
    for changed in (rows[::-1], rows[:6]):
        write_rows(data, changed)
        for again in (command, ["report", str(tmp_path)]):
            assert main(again) == 1
            assert "is about data that have changed since: judge them again" in caplog.text
            caplog.clear()


@needs_browser
def test_keys_label_the_pairs_and_the_csv_is_read(tmp_path):
    pairs = judged(np.linspace(0.05, 0.95, 8))
    path = tmp_path / "labels.html"
    _write_label_page(path, pairs, ColourData(), range(8))
    with Browser() as browser:
        browser.open(path)
        browser.press("y")
        assert browser.evaluate("document.getElementById('caption').textContent") == "=cmd()"
        for key in ("n", "y", "Backspace", "n", "y"):
            browser.press(key)
        browser.press("n", control=True)  # a shortcut of the browser is no label
        browser.click("#no_match")
        browser.click("#save")
        saved = browser.downloaded()
        labels = saved.read_text(encoding="utf-8")
        for key in "nnnnnn":  # more than there are pairs
            browser.press(key)
        assert "8 of 8 pairs are labelled, not yet" in browser.evaluate("document.body.innerText")
        assert browser.evaluate("document.title") == "Do the two match?"
        assert browser.errors == [] and browser.outside() == []
    (tmp_path / "labels.csv").write_text(labels, newline="")
    header, *rows = csv.reader(labels.splitlines(keepends=True))
    assert tuple(header) == COLUMNS
    assert [row[:3] for row in rows[:3]] == [
        ["0_3", "images/0.png", EVIL],
        ["1_4", "images/1.png", "'=cmd()"],
        ["2_5", "images/2.png", 'a "b",\nc'],
    ]
    answers = ["match", "no match", "no match", "match", "no match"]
    assert [row[4] for row in rows] == answers
    found, matches, probability = _read_labels(tmp_path / "labels.csv", pairs)
    assert found.tolist() == list(range(5))
    assert matches.tolist() == [answer == "match" for answer in answers]
    assert probability == pytest.approx(pairs.probability["con_d"][:5])


# The labels


def quality(folder, pairs, *more):
    """Return the status of `label quality` of pairs with ``labels.csv`` in a folder."""
    pairs.save(folder / "judged.npz")
    return main(["label", "quality", str(folder), "--labels", str(folder / "labels.csv"), *more])


def cells_of(printed, name, threshold):
    """Return the cells of a row of the printed table."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()]
    return next(row for row in rows if row[:2] == [name, threshold])


def test_labels_are_weighted_to_all_pairs(tmp_path, capsys):
    # Many certain negatives, few others: without weights the sample would seem half valid.
    probability = np.r_[np.full(900, 0.05), np.full(100, 0.95), np.nan].astype(np.float32)
    pairs = judged(probability)
    pairs.probability["other"] = 1 - probability
    rows = _draw(probability, 100, 0.0, 0)
    assert (probability[rows] > 0.5).sum() == 50
    # 5 of the 50 improbable pairs match: a tenth of 900.
    matching = {*rows[probability[rows] > 0.5], *rows[probability[rows] < 0.5][:5]}
    answers = [(row, "match" if row in matching else "no match") for row in rows]
    save_labels(tmp_path / "labels.csv", pairs, answers)
    assert quality(tmp_path, pairs) == 0
    printed = capsys.readouterr().out
    # called 10 %, precision 1, lift 1 / .19, recall 100 / 190
    row = cells_of(printed, "con_d", "0.5")
    assert (row[3], row[4], row[6], row[7]) == ("10.0", "100.0", "5.263", "52.6")
    row = cells_of(printed, "other", "0.5")  # calls the 900, of which 90 match
    assert (row[3], row[4], row[7]) == ("90.0", "10.0", "47.4")
    assert "by people, for 100 of 1,000 pairs" in printed
    # The highest threshold that still is above the improbable pairs.
    assert (
        "Advice: a threshold of 0.5 for con_d. Above it 50 pairs have a precision of 100.0 %"
        in (printed)
    )
    assert "No threshold of other reaches a precision of 80 %; the highest is 19.0 %" in printed


def test_pairs_of_tenths_without_labels_are_named(tmp_path, capsys):
    pairs = judged([0.05] * 6 + [0.95] * 4)
    save_labels(tmp_path / "labels.csv", pairs, [(6, "match"), (7, "no match")])
    assert quality(tmp_path, pairs) == 0
    printed = capsys.readouterr().out
    assert "by people, for 2 of 4 pairs" in printed
    assert "6 pairs are in tenths without a label (the lowest label is above 0.9)" in printed


GOOD = "0_3,a.jpg,a caption,0.5,match\n"


@pytest.mark.parametrize(
    "rows, message",
    [
        (GOOD + "0_4,a.jpg,c,0.5,match\n", "line 3: the pair 0_4 was not judged"),
        (GOOD + "1_4,a.jpg,c,0.5,maybe\n", "line 3: the label is 'maybe', expected one of match"),
        (GOOD + "1_4,a.jpg,c,0.5,\n", "line 3: the label is '', expected"),
        (GOOD + "2_5,a.jpg,c,0.5,match\n" + GOOD, "line 4: the pair 0_3 has another label above"),
        (GOOD + "00_03,a.jpg,c,0.5,match\n", "line 3: the pair 0_3 has another label above"),
        (GOOD + "1-Apr,a.jpg,c,0.5,match\n", "line 3: the pair id is '1-Apr', expected"),
        (GOOD + "-1_4,a.jpg,c,0.5,match\n", "line 3: the pair id is '-1_4'"),
        (GOOD + "9999999999_4,a.jpg,c,0.5,match\n", "line 3: the pair id is"),
        (GOOD + "1_4,a.jpg,c,match\n", "line 3: 4 cells, expected 5"),
        (GOOD + "\n", "line 3: 0 cells, expected 5"),
        (GOOD + "1_4,a.jpg,c,half,match\n", "line 3: could not convert string to float"),
        (GOOD + "1_4,a.jpg,c,nan,match\n", "has other probabilities than the judged pairs"),
        (GOOD + "1_4,a.jpg,c,0.6,match\n", "has other probabilities than the judged pairs"),
        (GOOD + '1_4,a.jpg,"c,0.5,match\n', "line 3: unexpected end of data"),
        (GOOD + "1_4,\udcff,c,0.5,match\n", "'utf-8' codec"),
        ("", "has no labels"),
    ],
)
def test_wrong_rows_are_refused(tmp_path, caplog, rows, message):
    content = ",".join(COLUMNS) + "\n" + rows
    (tmp_path / "labels.csv").write_bytes(content.encode(errors="surrogateescape"))
    assert quality(tmp_path, judged([0.5] * 9)) == 1
    assert message in caplog.text and "labels.csv" in caplog.text
