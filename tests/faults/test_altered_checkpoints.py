"""Checkpoints altered after saving: the change is detected or has no effect."""

from __future__ import annotations

import io
import random
import shutil
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lavis_mafa.io import checksums
from lavis_mafa.io.checkpoints import read_checkpoint
from lavis_mafa.io.checksums import is_intact

KEPT = Path(__file__).parent / "kept"
REAL = KEPT / "format2_3ea7dd5_blip_momentum.pth"


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


def saved(value, **how) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    return buffer.getvalue()


def differing(one, other) -> int:
    """Count the bits in which two contents differ; structure and plain values count as one each."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return 1
        byte_lists = (
            value.contiguous().flatten().view(torch.uint8).tolist() for value in (one, other)
        )
        return sum((a ^ b).bit_count() for a, b in zip(*byte_lists, strict=True))
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return sum(differing(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        return sum(map(differing, one, other))
    if any(isinstance(value, (dict, list, tuple, torch.Tensor)) for value in (one, other)):
        return 1
    return int(repr(one) != repr(other))  # repr, so that nan equals nan


class Trial:
    """Writes altered bytes, loads them, and counts the outcomes."""

    def __init__(self, path: Path, expected) -> None:
        self.path, self.expected = path, expected
        self.times = self.refused = self.equal = self.bits = 0

    def __call__(self, data: bytes | bytearray) -> str:
        """Load the file; return the error message, "" if it loads."""
        self.path.write_bytes(data)
        self.times += 1
        intact = is_intact(self.path)
        try:
            loaded = read_checkpoint(str(self.path))
        except ValueError as error:
            assert str(self.path) in str(error), error
            self.refused += 1
            return str(error)
        bits = differing(self.expected, loaded)
        assert not bits or not intact, "altered, but reported as intact"
        self.bits += bits
        self.equal += not bits
        return ""

    def report(self, injected: Callable, fault: str) -> None:
        injected(fault, self.refused + self.equal, bits=self.bits, times=self.times)
        assert self.bits == 0 and self.refused + self.equal == self.times


@pytest.fixture
def trial(tmp_path):
    return Trial(tmp_path / "checkpoint_last.pth", content())


def test_torch_alone_loads_an_altered_weight(tmp_path):
    """Why we verify checksums: if torch ever does so itself, ours are superfluous."""
    data = bytearray(saved(content()))
    data[regions_of(data)["weight"][5]] ^= 4
    (tmp_path / "a.pth").write_bytes(data)
    loaded = torch.load(tmp_path / "a.pth", weights_only=True)
    assert differing(content(), loaded) == 1
    with pytest.raises(ValueError, match="a.pth is not as it was saved: Bad CRC-32"):
        read_checkpoint(str(tmp_path / "a.pth"))


def regions_of(data: bytes) -> dict[str, range]:
    """Return the regions of a file by what is stored there."""
    regions: dict[str, range] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        records = file.infolist()
        directory = file.start_dir
    for k, record in enumerate(records):
        header = record.header_offset
        name, extra = (
            int.from_bytes(data[header + i : header + i + 2], "little") for i in (26, 28)
        )
        start = header + 30 + name + extra
        end = start + record.file_size
        following = records[k + 1].header_offset if k + 1 < len(records) else directory
        name_in_archive = record.filename.partition("/")[2]
        regions[f"header of {name_in_archive}"] = range(header, header + 30)
        regions[f"name of {name_in_archive}"] = range(header + 30, header + 30 + name)
        regions[f"padding of {name_in_archive}"] = range(header + 30 + name, start)
        regions[name_in_archive] = range(start, end)
        regions[f"descriptor of {name_in_archive}"] = range(end, following)
    end = data.rindex(b"PK\x06\x06")
    regions["directory"] = range(directory, end)
    regions["end"] = range(end, len(data))
    regions["weight"] = regions["data/0"]
    return regions


def test_every_byte_flipped_once(trial, injected):
    """In headers, names, data, padding, directory and end."""
    complete = saved(content())
    choose = random.Random(0)
    refused_by_region = {}
    regions = regions_of(complete)
    for name, region in regions.items():
        before = trial.refused
        for i in region:
            data = bytearray(complete)
            data[i] ^= 1 << choose.randrange(8)
            trial(data)
        refused_by_region[name] = trial.refused - before
    trial.report(injected, "checkpoint: one byte flipped")
    for name, region in regions.items():
        if name.startswith("data/") or name in ("data.pkl", "byteorder", "version", "weight"):
            assert refused_by_region[name] == len(region), f"{name}: an altered region was loaded"


def test_truncation_at_every_length(trial, injected):
    complete = saved(content())
    for length in range(0, len(complete), 7):
        refused = trial(complete[:length])
        assert "bytes are cut short" in refused or length < 4 and "cannot be loaded" in refused
        assert not is_intact(trial.path)
    trial.report(injected, "checkpoint: cut short")


@cache
def real_checkpoint():
    return REAL.read_bytes(), torch.load(REAL, weights_only=True)


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_real_checkpoint_altered_anywhere(tmp_path, data, injected):
    """Optimizer, momentum queue, order of an epoch: several bytes, at any position."""
    complete, expected = real_checkpoint()
    trial = Trial(tmp_path / "altered.pth", expected)
    altered = bytearray(complete)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(complete) - 1))
        altered[position] = data.draw(st.integers(0, 255))
    trial(altered)
    trial.report(injected, "checkpoint: real, bytes altered")


def test_compressed_checkpoint(tmp_path, trial, injected):
    """torch loads it; its checksums are verified, and it is not memory-mapped."""
    path = tmp_path / "packed.pth"
    with zipfile.ZipFile(io.BytesIO(saved(content()))) as plain:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for record in plain.infolist():
                packed.writestr(record.filename, plain.read(record))
    for mapped in (False, True):
        assert differing(content(), read_checkpoint(str(path), mapped)) == 0
    complete = path.read_bytes()
    for i in range(0, len(complete), 5):
        trial(complete[:i] + bytes([complete[i] ^ 1 << i % 8]) + complete[i + 1 :])
    trial.report(injected, "compressed checkpoint: one byte flipped")


def test_memory_mapped_tensors_are_equal(tmp_path):
    path = tmp_path / "a.pth"
    torch.save(content(), path)
    assert differing(content(), read_checkpoint(str(path), mapped=True)) == 0
    data = bytearray(path.read_bytes())
    data[regions_of(data)["weight"][0]] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="not as it was saved"):
        read_checkpoint(str(path), mapped=True)


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
        opened_names.append(name.filename)
        return open_member(self, name, *args, **kwargs)

    monkeypatch.setattr(zipfile.ZipFile, "open", counted_open)
    path = tmp_path / "a.pth"
    torch.save(content(), path)
    # A file this recent could be rewritten without a change of its modification time.
    assert is_intact(path) and len(opened_names) > 3
    opened_names.clear()
    assert is_intact(path) and len(opened_names) > 3
    monkeypatch.setattr(checksums, "CLOCK_RESOLUTION_NS", -(10**18))
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
    with open(path, "r+b") as file:
        file.seek(60 << 20)
        file.write(b"\1")
    assert not is_intact(path), "the whole file must be read"
