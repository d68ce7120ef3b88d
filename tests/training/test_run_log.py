"""Reading logs that are still being written, are truncated, or belong to resumed runs."""

from __future__ import annotations

import io
import json

from lavis_mafa.io.files import read_json_lines
from lavis_mafa.training.run_log import LOG, RunLog, read_log


def step(number, **figures):
    return {"kind": "step", "global_step": number, **figures}


def write(folder, records, end=b""):
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    (folder / LOG).write_bytes("".join(lines).encode() + end)


def test_truncated_log_is_read(tmp_path):
    """Truncation may fall within a multi-byte character."""
    last = json.dumps(step(2, note="Hündin"), ensure_ascii=False).encode()
    for length in range(len(last)):
        write(tmp_path, [step(1)], end=last[:length])
        assert list(read_json_lines(tmp_path / LOG)) == read_log(tmp_path, "step") == [step(1)]
    write(tmp_path, [step(1)], end=last)
    assert [record["global_step"] for record in read_log(tmp_path, "step")] == [1, 2]


def test_rewind_cuts_only_lines_of_this_package(tmp_path):
    """Also lines of ranks that no longer exist; the user's own files are kept."""
    log = RunLog(tmp_path, active=True)
    (tmp_path / "mine.jsonl").write_text("{}\n")
    log.append("unreadable.jsonl", {"index": 1}, 3)
    log.write("step", global_step=1)
    sizes = log.sizes(rank=0)
    log.write("step", global_step=2)
    log.append("connections.jsonl", {"image": 1})
    log.rewind(sizes, step=1)
    assert [record["global_step"] for record in read_log(tmp_path, "step")] == [1]
    assert list(read_json_lines(tmp_path / "connections.jsonl")) == []
    assert list(read_json_lines(tmp_path / "unreadable_rank3.jsonl")) == [{"index": 1}]
    assert (tmp_path / "mine.jsonl").read_text() == "{}\n"


def test_full_disk_loses_whole_lines_only(tmp_path, monkeypatch, caplog):
    log = RunLog(tmp_path, active=True)
    log.write("step", global_step=1)

    class Full(io.FileIO):
        def write(self, content):
            return super().write(content[: len(content) // 2])

    for number in (2, 5):
        with monkeypatch.context() as patch:
            patch.setattr("builtins.open", lambda path, *_, **__: Full(path, "ab"))
            log.write("step", global_step=number)
            log.write("step", global_step=number + 1)
        log.write("step", global_step=number + 2)
    assert caplog.text.count("lines are lost") == 2  # once whenever the disk becomes full
    assert [r["global_step"] for r in read_log(tmp_path, "step")] == [1, 4, 7]
    assert (tmp_path / LOG).read_bytes().count(b"\n") == 3
    log.close()
    assert f"{tmp_path / LOG} is incomplete: 4 writes have failed" in caplog.text
