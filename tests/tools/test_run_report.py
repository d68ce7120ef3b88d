"""The pages of unfinished and finished runs, and of judged pairs."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_world import arguments, call, con_d

from lavis_mafa.cli import main
from lavis_mafa.data.pairs import PairSource
from lavis_mafa.tools import run_report
from lavis_mafa.tools.gallery import SampleViewer, _choose, evenly, report_of_judged
from lavis_mafa.tools.gallery import _outcome as outcome_of_judged
from lavis_mafa.tools.judged_pairs import INVALID, UNKNOWN, VALID, Judged
from lavis_mafa.tools.run_report import report


def write_log(folder, *lines):
    folder.mkdir(exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps({"time": 5.0, **line}) for line in lines]
    (folder / "log.jsonl").write_text("\n".join(texts))
    return folder


def page_of(folder):
    """Write the page of a folder and return its HTML."""
    return report(folder).read_text(encoding="utf-8")


def step(number):
    return {"kind": "step", "epoch": 0, "step": number - 1, "global_step": number, "loss": 2.5}


def test_report_of_a_running_training(tmp_path):
    config = {"run": {"max_epoch": 2}, "model": {"arch": "albef_mafa"}, "datasets": {"toy": {}}}
    folder = write_log(tmp_path, {"kind": "config", "config": config}, step(1), '{"kind"')
    text = page_of(folder)
    assert ">0 of 2<" in text and ">set run.loggers<" in text and ">toy<" in text
    assert "No epoch is complete; 1 steps are done." in text
    assert "<h1>Training run: new" in page_of(write_log(tmp_path / "new", ""))
    call("report", folder / "log.jsonl")


def test_headline_and_figures_are_of_the_last_epoch_and_evaluation(tmp_path):
    rates = {"false_negative_rate_i2t": 0.2, "false_negative_rate_t2i": 0.3}
    left = {"false_negative_rate_in_itm_i2t": 0.1, "false_negative_rate_in_itm_t2i": 0.0}
    folder = write_log(
        tmp_path,
        {"kind": "epoch", "epoch": 0, "global_step": 1, "loss": 8.5},
        {"kind": "epoch", "epoch": 1, "global_step": 2, "loss": 6.5, **rates, **left},
        {"kind": "eval", "split": "val", "epoch": 0, "agg_metrics": 31.5, "txt_r1": 12.5},
        {"kind": "eval", "split": "val", "epoch": 1, "agg_metrics": 41.26, "txt_r1": 22.5},
    )
    text = page_of(folder)
    assert (
        "The loss of epoch 1 is 6.5 (8.5 in epoch 0). 25.0 % of its hard negatives are known to "
        "match, and 5.0 % of those that ITM learned as no match. The last evaluation (val, "
        "epoch 1) scored 41.3."
    ) in text
    assert "val, epoch 1: txt_r1" in text and "22.5" in text and "12.5" not in text
    by_con_d = {"kind": "epoch", "epoch": 0, "false_negative_rate_by_con_d_i2t": 0.125}
    text = page_of(write_log(tmp_path / "con_d", by_con_d))
    assert "Con-D calls 12.5 % of its hard negatives a match." in text


@pytest.mark.parametrize("epoch, named", [(1, True), (0, False)])
def test_itm_on_its_plateau_in_the_last_epoch_is_named(tmp_path, epoch, named):
    epochs = [{"kind": "epoch", "epoch": number, "global_step": number} for number in (0, 1)]
    text = page_of(write_log(tmp_path, *epochs, {"kind": "itm_plateau", "epoch": epoch}))
    assert ("model.mafa.warm_up_negatives=uniform" in text) is named


def test_bars_are_tenths_of_the_last_histogram(tmp_path):
    histogram = {"kind": "con_d_histogram", "epoch": 0, "i2t": {"true": [1, 2]}}
    page = page_of(write_log(tmp_path, histogram))
    assert re.findall(r'class="n">(.*?)<', page) == list("0010000200")
    assert "0.2 to 0.3" in page and "0.9 to 1.0" in page


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "step"},
        {"kind": "step", "global_step": None},
        {"kind": "eval", "epoch": 0},
        {"kind": "con_d_histogram", "epoch": 0, "i2t": 3},
    ],
)
def test_records_that_no_run_writes_are_named(tmp_path, record):
    with pytest.raises(ValueError, match="has a record that no run writes"):
        report(write_log(tmp_path, record))


@given(st.integers(0, 50), st.integers(1, 20))
def test_sample_is_evenly_spread_and_ordered(count, limit):
    chosen = evenly(list(range(count)), limit)
    assert len(chosen) == min(count, limit) and chosen == sorted(set(chosen))
    gaps = np.diff([*chosen, count])
    assert not len(chosen) or gaps.max() - gaps.min() <= 1


# Captions without images


class FiveSamples:
    def source(self, number):
        return PairSource(f"{number}.jpg", "abcde"[number])

    def show(self, number):
        if number == 3:
            raise OSError("no such file")
        return Image.new("RGB", (8, 8)), "abcde"[number]


def test_caption_without_readable_image():
    viewer = SampleViewer(FiveSamples())
    pairs = [viewer._pair(k, 4 - k, "verdict", None) for k in range(5)]
    assert [(one.caption, one.own_caption) for one in pairs] == list(
        zip("edcba", "abcde", strict=True)
    )
    assert pairs[3].image is None and pairs[4].image is not None
    assert viewer.notes() == ["1 images could not be read; the first: OSError: no such file"]


# Judged pairs


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1) | st.just(float("nan")), max_size=60), st.integers(1, 40))
def test_pairs_of_a_page_are_the_highest_and_some_others(values, limit):
    p = np.array(values)
    positions = _choose(p, limit)
    finite = np.nonzero(~np.isnan(p))[0]
    assert len(positions) == len(set(positions)) == min(limit, len(finite))
    assert set(positions) <= set(finite.tolist())
    shown, half = p[positions], -(-limit // 2)
    assert (np.diff(shown) <= 0).all()
    assert shown[:half].tolist() == sorted(p[finite], reverse=True)[:half]


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


def test_headline_of_judged_pairs():
    """Above .75: pair 0 of "one", which matches, and pair 3 of "two"; two of three known match."""
    assert outcome_of_judged(judged_pairs()) == (
        "one calls 1 of 3 judged pairs a match (P above 0.75); by the truth 100 % of these match, "
        "and 50 % of all judged. two calls 1 of 4 judged pairs a match (P above 0.75); by the "
        "truth 100 % of these match, and 67 % of all judged."
    )


def test_page_of_judged_pairs(tmp_path):
    class Data:
        def source(self, number):
            return PairSource(None, f"caption {number}")

    show = SampleViewer(Data())
    path = report_of_judged(judged_pairs(), show, tmp_path / "page.html", "Pairs")
    text = path.read_text()
    # The pair of row 3 was not judged by "one".
    cards = re.findall(r"<b>(.*?)</b>\n<span>(.*?)</span>\n<small>its own caption: (.*?)<", text)
    assert cards == [
        ("caption 11", "one: P = 0.900, positive; by the truth a match", "caption 1"),
        ("caption 13", "one: P = 0.700, ambiguous", "caption 3"),
        ("caption 12", "one: P = 0.300, ambiguous; by the truth no match", "caption 2"),
        ("caption 14", "two: P = 0.800, positive; by the truth a match", "caption 4"),
        ("caption 12", "two: P = 0.700, ambiguous; by the truth no match", "caption 2"),
        ("caption 13", "two: P = 0.200, negative", "caption 3"),
        ("caption 11", "two: P = 0.100, negative; by the truth a match", "caption 1"),
    ]
    bars = re.findall(r"Pairs by probability: (.*?)</h2>(.*?)</div>", text, re.DOTALL)
    counts = {name: re.findall(r'class="n">(.*?)<', part) for name, part in bars}
    assert counts == {"one": list("0010001010"), "two": list("1100001100")}


def test_report_command_on_mined_pairs(tmp_path, models):
    model = models[0]
    more = ("--batch-size", 16, "--search-space", 48, "--threshold", 0.6)
    call(*arguments("mine", tmp_path, model, *more, "--con-d", *con_d("a", model)))
    call("report", tmp_path)
    text, judged = (tmp_path / "judged.html").read_text(), Judged.load(tmp_path)
    assert outcome_of_judged(judged) in text and len(judged) > 100
    mined = json.loads((tmp_path / "mined.json").read_text())
    shown = re.findall(r"<b>(.*?)</b>", text)
    assert len(shown) == 60 and {one["caption"] for one in mined} & set(shown)
    assert text.count('<img src="data:image') == 60


def test_a_page_of_a_run_whose_data_are_gone_names_them(tmp_path, monkeypatch):
    config = {"model": {"arch": "albef_mafa"}, "datasets": {"image_text_json": {}}}
    folder = write_log(tmp_path / "run", {"kind": "config", "config": config}, step(1))
    found = {"anchor_index": 0, "mined_index": 1, "direction": "i2t", "probability": 0.9}
    found |= {"state": "positive", "epoch": 0, "truth": None}
    (folder / "connections.jsonl").write_text(json.dumps(found))
    text = page_of(folder)
    assert "1 steps are done" in text
    assert "No pairs are shown, because the data of the run cannot be loaded: ConfigError" in text
    monkeypatch.setattr(run_report, "recorded_data", lambda folder: FiveSamples())
    (folder / "connections.jsonl").write_text(json.dumps({**found, "mined_index": 5}))
    assert "the data of the run cannot be loaded: IndexError" in page_of(folder)


def test_report_command_on_judged_pairs_without_config(tmp_path, caplog):
    judged_pairs().save(tmp_path / "judged.npz")
    assert main(["report", str(tmp_path)]) == 1
    assert "judged.npz does not record its config" in caplog.text
