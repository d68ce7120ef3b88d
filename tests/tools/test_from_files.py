"""`count` and `mine` of a few pairs with stored features."""

from __future__ import annotations

import json

import numpy as np
from shard_files import write_rows

from lavis_mafa.cli import main
from lavis_mafa.tools import from_files

CHINESE = ["一只狗在草地上奔跑", "草地上的狗", "两个人在海边散步", "海边有两个人"]
ROWS = [{"image": f"{k // 2}.png", "caption": CHINESE[k % 4]} for k in range(12)]


def run(command, folder, rows, *more):
    """Run a command on rows with random features."""
    features = np.random.default_rng(0).normal(size=(2, len(rows), 4)).astype(np.float32)
    for name, side in zip(("images", "texts"), features, strict=True):
        np.save(folder / f"{name}.npy", side)
    given = [command, "--data", write_rows(folder / "pairs.csv", rows), "--output", folder / "out"]
    given += ["--encoder", folder / "images.npy", folder / "texts.npy", *more]
    return main(list(map(str, given)))


def test_captions_without_spaces_are_compared_by_characters(tmp_path, caplog):
    assert run("count", tmp_path, ROWS, "--judge", "captions") == 1
    assert "(--judge captions:characters)" in caplog.text
    assert run("count", tmp_path, ROWS, "--judge", "captions:characters") == 0


def test_an_estimate_is_of_the_candidates_that_there_are(tmp_path):
    more = ["--search-spaces", "all", "--neighbours", 50, "--threshold", 0]
    assert run("count", tmp_path, ROWS, "--sampling", "grit", *more) == 0
    found = json.loads((tmp_path / "out/counts.json").read_text())["counts"]
    # Of 6 images with 2 captions each, every image has 10 other captions, every caption 5 images.
    assert {one["anchors"]: one["judged"] for one in found} == {"image": 12 * 10, "text": 12 * 5}
    assert all(one["estimated"] == one["found"] > 10 for one in found)


def test_the_copy_of_pairs_of_texts_names_their_columns(tmp_path, capsys):
    rows = [{"question": f"q{k}", "answer": f"a{k}"} for k in range(8)]
    assert run("mine", tmp_path, rows, "--text-keys", "question", "answer") == 0
    assert "clean.csv (read it with --text-keys question answer)" in capsys.readouterr().out


def test_missing_pictures_are_found_before_they_are_encoded(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(from_files, "_encoder_of", lambda *_: None)
    assert run("count", tmp_path, ROWS) == 1
    assert "0.png" in caplog.text and "Traceback" not in caplog.text
