"""Reading logs that are still being written, are truncated, or belong to resumed runs."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest

from lavis_mafa.training.run_log import LOG, RunLog, read_json_lines, read_log
from lavis_mafa.training.tensorboard import _TensorBoardLogger


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


@pytest.mark.parametrize("line", [b"\n", b"[1]\n", b"3\n", b"null\n", b'{"step": 1}\n', b"\xff\n"])
def test_lines_that_are_not_records_are_skipped(tmp_path, line):
    write(tmp_path, [step(1)], end=line + b'{"kind": "step", "global_step": 2}\n')
    assert read_log(tmp_path, "step") == [step(1), step(2)]


def test_missing_log_has_no_lines(tmp_path):
    assert list(read_json_lines(tmp_path / LOG)) == [] == read_log(tmp_path, "step")


def test_written_lines_are_read(tmp_path):
    log = RunLog(tmp_path, active=True)
    log.write("step", global_step=1, loss=float("nan"), words=["ä", (1, float("inf"))])
    log.write("epoch", epoch=0)
    (found,) = read_log(tmp_path, "step")
    assert found.pop("time") > 0
    assert found == {**step(1), "loss": None, "words": ["ä", [1, None]]}


def test_repeated_steps_count_once(tmp_path):
    write(
        tmp_path,
        [step(number, loss=float(position)) for position, number in enumerate((1, 3, 2, 3))],
    )
    found = [
        (record["global_step"], record["loss"])
        for record in read_log(tmp_path, "step", "global_step")
    ]
    assert found == [(1, 0.0), (2, 2.0), (3, 3.0)]
    assert len(read_log(tmp_path, "step")) == 4


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


def test_tensorboard_failure_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    import torch.utils.tensorboard as board

    log = RunLog(tmp_path, active=True, loggers={"tensorboard": _TensorBoardLogger()})
    purged = []

    def open_writer(folder, purge_step=None):
        purged.append(purge_step)
        if len(purged) < 3:
            raise OSError(28, "No space left on device")
        return SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None)

    monkeypatch.setattr(board, "SummaryWriter", open_writer)
    log.rewind({}, step=7)
    log.begin({})
    for step_ in range(4):
        log.scalars("train", {"loss": 1.0}, step_)
    assert purged == [8, 8, 8] and "No space left" in caplog.text
    log.close()
    log.scalars("train", {"loss": 1.0}, 9)
    assert purged[-1] is None
