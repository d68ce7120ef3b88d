"""Logs of stopped, resumed and unfinished runs, and the page of judged pairs."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_world import arguments, call, con_d, save_model

from lavis_mafa.analysis.gallery import SampleViewer, evenly
from lavis_mafa.analysis.judged_pairs import INVALID, UNKNOWN, VALID, Judged
from lavis_mafa.analysis.judged_report import choose, report_of_judged
from lavis_mafa.analysis.run_records import read_run
from lavis_mafa.analysis.run_report import POINTS, report_of_run
from lavis_mafa.cli import main

CONFIG = {"run": {"max_epoch": 2}, "model": {"arch": "albef_mafa"}, "datasets": {"toy_scenes": {}}}


def write_log(folder, *lines):
    folder.mkdir(exist_ok=True)
    told = [one if isinstance(one, str) else json.dumps({"time": 5.0, **one}) for one in lines]
    (folder / "log.jsonl").write_text("\n".join(told))
    return folder


def step(epoch, place, number, loss, **more):
    kind = {"kind": "step", "epoch": epoch, "step": place, "global_step": number}
    return {**kind, "loss": loss, **more}


def data_of_page(path):
    text = path.read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data[1])


def test_of_what_was_done_again_the_last_counts(tmp_path):
    run = read_run(
        write_log(
            tmp_path,
            {"kind": "config", "config": {"run": {"seed": 1}}},
            step(0, 0, 1, 9.0, temperature=0.07),
            step(0, 1, 2, 8.0),
            {"kind": "epoch", "epoch": 0, "global_step": 2, "loss": 8.5},
            {"kind": "eval", "split": "val", "epoch": 0, "txt_r1": 10.0},
            step(1, 0, 3, 7.0),
            step(1, 1, 4, 6.0),
            {"kind": "epoch", "epoch": 1, "global_step": 4, "loss": 6.5},
            {"kind": "eval", "split": "val", "epoch": 1, "txt_r1": 20.0},
            {"kind": "eval", "split": "test", "epoch": "best", "txt_r1": 30.0},
            # Resumed after step 3: epoch 1 is not done any more.
            {"kind": "config", "config": CONFIG},
            {"kind": "resume", "file": "checkpoint_last.pth", "epoch": 1},
            step(1, 1, 4, 5.0, lr=0.1),
        )
    )
    assert run.columns["global_step"].tolist() == [1, 2, 3, 4] and run.steps == 4
    assert run.columns["loss"].tolist() == [9, 8, 7, 5]
    assert str(run.columns["lr"].tolist()) == "[nan, nan, nan, 0.1]"
    assert str(run.columns["temperature"].tolist()) == "[0.07, nan, nan, nan]"
    assert list(run.epochs) == [0] and list(run.evaluations) == [("val", 0)]
    assert run.config == CONFIG


def test_a_run_that_is_still_writing(tmp_path):
    folder = write_log(
        tmp_path, {"kind": "config", "config": CONFIG}, step(0, 0, 1, 2.5), '{"kind"'
    )
    path = report_of_run(read_run(folder), tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    assert "0 of 2, incomplete" in text and "2.50" in text
    empty = write_log(tmp_path / "new", "")
    assert "<h1>Training run: new" in report_of_run(
        read_run(empty), tmp_path / "new.html"
    ).read_text(encoding="utf-8")
    with pytest.raises(FileNotFoundError, match="log.jsonl does not exist"):
        read_run(tmp_path / "nowhere")


def test_connections_that_were_logged_again_count_once(tmp_path):
    write_log(tmp_path, step(0, 0, 1, 1.0))
    first = [(0, 0, 1), (0, 0, 2), (0, 4, 3), (0, 8, 4), (1, 0, 5)]
    again = [(0, 4, 3), (0, 8, 9)]  # resumed before step 4 of epoch 0
    lines = [
        {"epoch": e, "step": s, "direction": "i2t", "anchor_index": a, "mined_index": 0}
        for e, s, a in first + again
    ]
    (tmp_path / "connections.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    told = [(r["epoch"], r["step"], r["anchor_index"]) for r in read_run(tmp_path).connections]
    assert told == [(0, 0, 1), (0, 0, 2), (0, 4, 3), (0, 8, 9)]


def test_long_runs_show_means_of_windows(tmp_path):
    count = 3 * POINTS - 1  # windows of 3 steps, the last of 2; of shares 15 and 14
    lines = [
        step(0, k, k + 1, float(k), false_i2t=k % 3, picked_i2t=4, lr=0.1 if k > 5 else None)
        for k in range(count)
    ]
    path = report_of_run(read_run(write_log(tmp_path, *lines)), tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    titles = re.findall(r'<circle|<path class="line s0 d0" d="([^"]+)"', text)
    drawn = [d for d in titles if d and d != "M2 4H22"]
    assert drawn[0].count("L") == POINTS - 1  # the loss
    # In three steps 0 + 1 + 2 of 12 negatives are false: a flat line, until the last lacks a 2.
    heights = [float(y) for y in re.findall(r"[ML]\S+ ([\d.]+)", drawn[2])]
    assert len(set(heights[:-1])) == 1 and heights[-1] > heights[0]


@given(st.integers(0, 50), st.integers(1, 20))
def test_spread_is_even_and_keeps_the_order(count, limit):
    chosen = evenly(list(range(count)), limit)
    assert len(chosen) == min(count, limit) and chosen == sorted(set(chosen))
    gaps = np.diff([*chosen, count])
    assert not len(chosen) or gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize(
    "command", ["count", "mine", "report", "threshold", "label", "profile", "vision"]
)
def test_every_command_has_a_help(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = capsys.readouterr().out
    assert f"lavis-mafa {command}" in told and len(told.split()) > 40


# Captions without pictures


class Data:
    def source(self, number):
        return f"{number}.jpg", "abcde"[number]

    def show(self, number):
        if number == 3:
            raise OSError("no such file")
        return Image.new("RGB", (8, 8)), "abcde"[number]


def test_a_caption_without_its_picture():
    shown = SampleViewer(Data())
    assert [shown(k)[1] for k in range(5)] == list("abcde")
    assert shown(3)[0] is None and shown(4)[0] is not None
    assert shown.missing == 2 and shown.problem == "OSError: no such file"
    without = SampleViewer(Data(), images=False)
    assert [without(k) for k in range(5)] == [(None, c) for c in "abcde"]
    assert without(7)[1] == "(caption of sample 7)" == SampleViewer(None)(7)[1]


# Judged pairs


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1) | st.just(float("nan")), max_size=60), st.integers(1, 40))
def test_a_sample_holds_the_ends_and_what_is_near_the_thresholds(values, limit):
    p = np.array(values)
    places = choose(p, 0.5, 0.8, limit)
    there = np.nonzero(~np.isnan(p))[0]
    assert len(places) == min(limit, len(there)) and places == sorted(set(places))
    assert set(places) <= set(there.tolist())
    if len(there) and limit >= 8:
        shown = p[places]
        assert shown.max() == p[there].max() and shown.min() == p[there].min()
        distance = np.minimum(abs(p[there] - 0.5), abs(p[there] - 0.8))
        assert np.minimum(abs(shown - 0.5), abs(shown - 0.8)).min() == distance.min()
        assert ((shown > 0.5) & (shown <= 0.8)).any() == (
            (p[there] > 0.5) & (p[there] <= 0.8)
        ).any()


def judged_pairs():
    return Judged(
        image=np.array([1, 2, 3, 4]),
        text=np.array([11, 12, 13, 14]),
        from_image=np.array([True, False, True, False]),
        from_text=np.array([False, True, True, True]),
        probability={
            "one": np.array([0.9, 0.3, 0.7, np.nan], np.float32),
            "two": np.array([0.1, 0.7, 0.2, 0.8], np.float32),
        },
        truth=np.array([VALID, INVALID, UNKNOWN, VALID], np.int8),
        about={"low": 0.25, "high": 0.75},
    )


def test_the_page_of_judged_pairs(tmp_path):
    def show(number):
        return None, f"caption {number}"

    path = report_of_judged(judged_pairs(), show, tmp_path / "page.html", "Pairs")
    data = data_of_page(path)
    assert data["thresholds"] == [0.25, 0.75]
    assert [j["name"] for j in data["judged"]] == [
        f"{name}, {part}"
        for name in ("one", "two")
        for part in ("all pairs", "image → text", "text → image")
    ]
    sums = {j["name"]: [sum(row) for row in j["counts"]] for j in data["judged"]}
    assert sums["one, all pairs"] == [1, 1, 1] and sums["two, text → image"] == [1, 1, 1]
    told = {
        (c["run"], c["direction"], c["anchor"][2], c["mined"][2]): (c["p"], c["state"], c["truth"])
        for c in data["cards"]
    }
    # From the image: it is the anchor and the text's pair was mined; from the text: the reverse;
    # from both: as from the image.
    assert told == {
        ("one", "i2t", 1, 11): (0.9, "positive", True),
        ("one", "t2i", 12, 2): (0.3, "ambiguous", False),
        ("one", "i2t", 3, 13): (0.7, "ambiguous", None),
        ("two", "i2t", 1, 11): (0.1, "negative", True),
        ("two", "t2i", 12, 2): (0.7, "ambiguous", False),
        ("two", "i2t", 3, 13): (0.2, "negative", None),
        ("two", "t2i", 14, 4): (0.8, "positive", True),
    }


def test_the_command_on_what_was_mined(tmp_path, toy_train):
    model = save_model(tmp_path / "model.pth", toy_train, 0)
    more = ("--batch-size", 16, "--search-space", 48, "--threshold", 0.6)
    call(*arguments("mine", tmp_path, model, *more, "--con-d", *con_d("a", model)))
    call("report", tmp_path)
    judged, data = Judged.load(tmp_path), data_of_page(tmp_path / "judged.html")
    counts = np.array(data["judged"][0]["counts"])
    assert counts.sum() == len(judged) > 100
    _, high = data["thresholds"]
    mined = json.loads((tmp_path / "mined.json").read_text())
    assert (
        counts[:, round(high * 1000) :].sum()
        == (judged.probability_by("a") > np.float32(high)).sum()
    )
    captions = {card["mined"][1] for card in data["cards"] if card["direction"] == "i2t"}
    assert len(mined) and captions & {one["caption"] for one in mined}
    assert len(data["images"]) > 20 and min(card["anchor"][0] for card in data["cards"]) == 0


def test_the_command_on_judged_pairs_whose_config_is_gone(tmp_path):
    judged_pairs().save(tmp_path / "judged.npz")
    (tmp_path / "report.html").write_text("of the count")
    assert main(["report", str(tmp_path)]) == 0
    data = data_of_page(tmp_path / "judged.html")
    assert len(data["cards"]) == 7 and data["images"] == []
    assert (tmp_path / "report.html").read_text() == "of the count"


def test_the_best_evaluation_stays_in_sight(tmp_path):
    scores = [10.0, 40.0, *range(20, 29)]
    lines = [
        {"kind": "eval", "time": e, "split": "val", "epoch": e, "agg_metrics": score}
        for e, score in enumerate(scores)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    call("report", tmp_path)
    text = (tmp_path / "report.html").read_text()
    table = text[text.index("Evaluation of val") :]
    table = table[: table.index("</table>")]
    assert "epoch 1, best" in table and "epoch 10" in table and "epoch 4<" not in table
    assert ">40" in table and ">10<" not in table
