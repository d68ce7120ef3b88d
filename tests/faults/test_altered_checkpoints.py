"""Checkpoints altered after saving: the change is detected or has no effect."""

from __future__ import annotations

import io
import shutil
import time
import zipfile
from pathlib import Path

import pytest
import torch
from faulty_runs import bits_differing

from lavis_mafa.checkpoints import checksums
from lavis_mafa.checkpoints.checkpoints import read_checkpoint
from lavis_mafa.checkpoints.checksums import is_intact


def content():
    """Return all kinds of values that a checkpoint contains, few bytes of each."""
    torch.manual_seed(1)
    return {
        "model": {
            "weight": torch.randn(5, 3),
            "half": torch.randn(4).bfloat16(),
            "tied": (tied := torch.arange(6)),
            "again": tied,
            "part": torch.randn(9)[2:5],
            "none": torch.zeros(0),
        },
        "run": {"epoch": 1, "rates": [1e-3, 0.5], "name": "α", "best": None, "on": True},
    }


def saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def compress(data: bytes, path: Path) -> None:
    """Write a checkpoint with its records compressed, as zip tools do."""
    with (
        zipfile.ZipFile(io.BytesIO(data)) as plain,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
    ):
        for record in plain.infolist():
            packed.writestr(record.filename, plain.read(record))


def weights_at(data: bytes) -> int:
    """Return where the first weight begins in a file."""
    return data.index(content()["model"]["weight"].numpy().tobytes())


class Trial:
    """Writes altered bytes and loads them; each must be refused by name, or load equal."""

    def __init__(self, path: Path, expected) -> None:
        self.path, self.expected, self.times = path, expected, 0

    def __call__(self, data: bytes | bytearray) -> str:
        """Load the file; return the error message, "" if it loads."""
        self.path.write_bytes(data)
        self.times += 1
        intact = is_intact(self.path)
        try:
            loaded = read_checkpoint(str(self.path))
        except ValueError as error:
            assert str(self.path) in str(error), error
            return str(error)
        assert bits_differing(self.expected, loaded) == 0
        assert intact
        return ""


@pytest.fixture
def trial(tmp_path):
    return Trial(tmp_path / "checkpoint_last.pth", content())


def test_torch_alone_loads_an_altered_weight(tmp_path):
    """Why we verify checksums: if torch ever does so itself, ours are superfluous."""
    data = bytearray(saved(content()))
    data[weights_at(data) + 5] ^= 4
    (tmp_path / "a.pth").write_bytes(data)
    loaded = torch.load(tmp_path / "a.pth", weights_only=True)
    assert bits_differing(content(), loaded) == 1
    for mapped in (False, True):
        with pytest.raises(
            ValueError, match="a.pth cannot be loaded: it is not as it was saved: Bad CRC-32"
        ):
            read_checkpoint(str(tmp_path / "a.pth"), mapped)


def test_every_byte_flipped_once(trial):
    """In headers, names, data, padding, directory and end."""
    complete = saved(content())
    begin = weights_at(complete)
    for place in range(len(complete)):
        data = bytearray(complete)
        data[place] ^= 1 << place % 8
        told = trial(data)
        assert told or not begin <= place < begin + 60, "an altered weight was loaded"


def test_truncation_at_every_length(trial):
    complete = saved(content())
    for length in range(0, len(complete), 7):
        assert "cannot be loaded" in trial(complete[:length])
        assert not is_intact(trial.path)


def test_compressed_checkpoint_is_refused_at_once(tmp_path):
    """It could unpack to any size."""
    path = tmp_path / "bomb.pth"
    compress(saved({"model": {"weight": torch.zeros(2**26)}}), path)
    assert path.stat().st_size < 3_000_000
    began = time.perf_counter()
    with pytest.raises(ValueError, match="bomb.pth cannot be loaded: .* records are compressed"):
        read_checkpoint(str(path))
    assert time.perf_counter() - began < 0.1


def test_missing_file_is_not_intact(tmp_path):
    assert not is_intact(tmp_path) and not is_intact(tmp_path / "nothing.pth")
    (tmp_path / "empty.pth").touch()
    assert not is_intact(tmp_path / "empty.pth")
    shutil.copy(__file__, tmp_path / "text.pth")
    assert not is_intact(tmp_path / "text.pth")


def test_unchanged_file_is_verified_only_once(tmp_path, monkeypatch):
    opened_names = []
    open_member = zipfile.ZipFile.open

    def counted_open(self, name, *args, **kwargs):
        opened_names.append(name)
        return open_member(self, name, *args, **kwargs)

    monkeypatch.setattr(zipfile.ZipFile, "open", counted_open)
    path = tmp_path / "a.pth"
    torch.save(content(), path)
    # A file this recent could be rewritten without a change of its modification time.
    assert is_intact(path) and len(opened_names) > 3
    opened_names.clear()
    assert is_intact(path) and len(opened_names) > 3
    monkeypatch.setattr(checksums, "_CLOCK_RESOLUTION_NS", -(10**18))
    assert is_intact(path)
    opened_names.clear()
    assert is_intact(path) and read_checkpoint(str(path)) and not opened_names
    torch.save(content(), path)
    assert is_intact(path) and opened_names


def test_verification_uses_constant_memory(tmp_path):
    """64 MiB, read in pieces of 256 KiB."""
    import tracemalloc

    path = tmp_path / "large.pth"
    torch.save({"model": {"a": torch.zeros(1 << 24)}}, path)
    tracemalloc.start()
    assert is_intact(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20, peak
