"""Checkpoints altered after saving: the change is detected or has no effect."""

from __future__ import annotations

import io
import time
import zipfile
from pathlib import Path

import pytest
import torch
from faulty_runs import bits_differing

from lavis_mafa.checkpoints.checkpoints import is_intact, read_checkpoint


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
