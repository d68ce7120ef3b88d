"""Check atomic writing of files, and JSON without NaN and infinity."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lavis_mafa.io.cache import make_once
from lavis_mafa.io.files import _plain, atomic_write, write_json, write_text


def test_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    write_text(path, "before é")
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_text(encoding="utf-8") == "before é"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_file_appears_only_when_complete(tmp_path):
    path = tmp_path / "a.txt"
    with atomic_write(path) as file:
        file.write(b"a")
        assert not path.exists()
    assert path.read_bytes() == b"a"


def test_json_has_no_nan_or_infinity(tmp_path):
    write_json(tmp_path / "a.json", {"a": [float("nan"), (1.5, -float("inf"))], 2: "é"})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [None, [1.5, None]], "2": "é"}
    assert "é" in text
    write_json(tmp_path / "a.json", "caf\udce9")
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == "caf\udce9"
    assert _plain(1.5) == 1.5 and _plain("nan") == "nan"


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "a.txt"
    with atomic_write(path) as one:
        one.write(b"one")
        with atomic_write(path) as other:
            other.write(b"two")
        assert path.read_bytes() == b"two"
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]


def test_another_process_may_finish_a_folder_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda *_: [tmp_path / "gone.tmp-0"])  # listed, then renamed
    make_once(tmp_path / "one", lambda folder: None)
    assert (tmp_path / "one").is_dir()


def test_published_files_and_folders_have_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a.txt", "a")
        make_once(tmp_path / "cache" / "one", lambda folder: write_text(folder / "b.txt", "b"))
    finally:
        os.umask(before)
    modes = {
        path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777
        for path in tmp_path.rglob("*")
    }
    assert modes == {"a.txt": 0o640, "cache": 0o750, "cache/one": 0o750, "cache/one/b.txt": 0o640}
