"""`count` and `mine` check their discriminators first, and every output shows it."""

from __future__ import annotations

import json

import pytest
from small_world import arguments, call, con_d

from lavis_mafa.cli import main
from lavis_mafa.tools.judge_check import self_check_tables
from lavis_mafa.tools.judged_pairs import Judged
from lavis_mafa.tools.run_report import report
from lavis_mafa.training.con_d_check import RECORD

GRIT = ("run.grit.queue_size=64", "run.grit.search_space=32")


def words(command, folder, path, *more):
    sizes = ["--batch-sizes", 8] if command == "count" else ["--batch-size", 8]
    return arguments(
        command,
        folder,
        path,
        *sizes,
        "--sampling",
        "random",
        *more,
        "--con-d",
        *con_d("own", path),
        "own.self_check_pairs=40",
        options=GRIT,
        size=64,
    )


def test_count_shows_a_poor_discriminator(tmp_path, models, capsys, caplog):
    call(*words("count", tmp_path, models[1]))
    printed = capsys.readouterr().out
    assert "Con-D self-check of own: AUC 0." in printed and "of 40 own against 40" in printed
    assert "Con-D (own) fails its self-check" in printed
    assert any("give --self-check refuse" in one.getMessage() for one in caplog.records)
    content = json.loads((tmp_path / "counts.json").read_text())["self_check"]["own"]
    assert content["pairs"] == 40 and content["auc"] < 0.75 and content["problems"]
    (at,) = content["above"]
    assert at["threshold"] == 0.5 and 0 < at["random"] < 1, "the threshold of the count"
    assert Judged.load(tmp_path).about["self_check"] == {"own": content}
    assert "fails its self-check" in (tmp_path / "report.html").read_text()
    page = report(tmp_path, tmp_path / "again.html").read_text()
    assert "Con-D self-check" in page and f"{content['auc']:.3f}" in page


@pytest.mark.parametrize("command", ["count", "mine"])
def test_a_poor_discriminator_is_refused_before_the_work(tmp_path, models, caplog, command):
    assert main(words(command, tmp_path, models[1], "--self-check", "refuse")) == 1
    assert "give --self-check warn" in caplog.records[-1].getMessage()
    assert not (tmp_path / "features").exists()


def test_mine_shows_it_too(tmp_path, models):
    call(*words("mine", tmp_path, models[1]))
    summary = json.loads((tmp_path / "mine.json").read_text())
    content = summary["self-check"]["own"]
    assert [at["threshold"] for at in content["above"]] == [0.5, 0.8]  # low and high of the config
    assert "Con-D self-check" in (tmp_path / "report.html").read_text()
    judged = Judged.load(tmp_path)
    assert summary["base rate"] == pytest.approx((judged.truth == 1).mean())
    assert summary["lift"] == pytest.approx(summary["precision"] / summary["base rate"])


def test_the_table_and_a_run_s_page(tmp_path):
    above = [{"threshold": 0.5, "own": 0.75, "random": 0.5}]
    check = {"pairs": 8, "auc": 0.625, "above": above, "problems": ["<b>poor</b>"]}
    (table,) = self_check_tables({"mine": check})
    assert table.rows == [["mine", 8, "0.625", 0.5, "75.0", "50.0", "<b>poor</b>"]]
    (table,) = self_check_tables({"mine": {"pairs": 0, "auc": None, "above": [], "problems": []}})
    assert table.rows == [["mine", 0, None, None, None, None, "not possible"]]
    for bound in ("AUC below 0.75", "more than a third", "Fewer than 5 % of own pairs"):
        assert bound in table.note
    assert self_check_tables({}) == []
    lines = [{"kind": "config", "time": 1}, {"kind": RECORD, "time": 2, "name": "mine", **check}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "log.jsonl").write_text(text)
    page = report(tmp_path).read_text()
    assert "Con-D self-check" in page and "0.625" in page
    assert "&lt;b&gt;poor" in page and "<b>poor" not in page
