"""Checkpoints altered after they were saved: the change is detected or has no effect."""

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
from lavis_mafa.io.checksums import damage_of, is_intact

KEPT = Path(__file__).parent / "kept"
REAL = KEPT / "format1_ca9d03b_blip_momentum.pth"


def content():
    """Return all kinds of values that a checkpoint has, few bytes of each."""
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
        both = (value.contiguous().flatten().view(torch.uint8).tolist() for value in (one, other))
        return sum((a ^ b).bit_count() for a, b in zip(*both, strict=True))
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return sum(differing(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        return sum(map(differing, one, other))
    if any(isinstance(value, (dict, list, tuple, torch.Tensor)) for value in (one, other)):
        return 1
    return int(repr(one) != repr(other))  # nan is nan


class Trial:
    """Writes altered bytes, loads them, and counts the outcomes."""

    def __init__(self, path: Path, expected) -> None:
        self.path, self.expected = path, expected
        self.times = self.refused = self.equal = self.bits = 0

    def __call__(self, data: bytes | bytearray) -> str:
        """Load the file; return the refusal, "" if there is none."""
        self.path.write_bytes(data)
        self.times += 1
        whole = is_intact(self.path)
        try:
            loaded = read_checkpoint(str(self.path))
        except ValueError as error:
            assert str(self.path) in str(error), error
            self.refused += 1
            return str(error)
        bits = differing(self.expected, loaded)
        assert not bits or not whole, "altered, and said to be whole"
        self.bits += bits
        self.equal += not bits
        return ""

    def tell(self, injected: Callable, fault: str) -> None:
        injected(fault, self.refused + self.equal, bits=self.bits, times=self.times)
        assert self.bits == 0 and self.refused + self.equal == self.times


@pytest.fixture
def trial(tmp_path):
    return Trial(tmp_path / "checkpoint_last.pth", content())


def test_torch_itself_loads_an_altered_weight(tmp_path):
    """Why we check checksums: if torch ever does so itself, ours are superfluous."""
    data = bytearray(saved(content()))
    data[where(data)["weight"][5]] ^= 4
    (tmp_path / "a.pth").write_bytes(data)
    loaded = torch.load(tmp_path / "a.pth", weights_only=True)
    assert differing(content(), loaded) == 1
    with pytest.raises(ValueError, match="a.pth is not as it was saved: Bad CRC-32"):
        read_checkpoint(str(tmp_path / "a.pth"))


def where(data: bytes) -> dict[str, range]:
    """Return positions in a file by what is stored there."""
    places: dict[str, range] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        records = file.infolist()
        directory = file.start_dir
    for k, record in enumerate(records):
        header = record.header_offset
        name, extra = (
            int.from_bytes(data[header + i : header + i + 2], "little") for i in (26, 28)
        )
        begin = header + 30 + name + extra
        end = begin + record.file_size
        following = records[k + 1].header_offset if k + 1 < len(records) else directory
        short = record.filename.partition("/")[2]
        places[f"header of {short}"] = range(header, header + 30)
        places[f"name of {short}"] = range(header + 30, header + 30 + name)
        places[f"padding of {short}"] = range(header + 30 + name, begin)
        places[short] = range(begin, end)
        places[f"descriptor of {short}"] = range(end, following)
    end = data.rindex(b"PK\x06\x06")
    places["directory"] = range(directory, end)
    places["end"] = range(end, len(data))
    places["weight"] = places["data/0"]
    return places


def test_the_places_cover_the_file():
    data = saved(content())
    found = {i for place in where(data).values() for i in place}
    assert found == set(range(len(data)))


def test_every_byte_of_a_file_flipped_once(trial, injected):
    """In headers, names, data, padding, directory and end alike."""
    whole = saved(content())
    choose = random.Random(0)
    by_place = {}
    places = where(whole)
    for name, place in places.items():
        before = trial.refused
        for i in place:
            data = bytearray(whole)
            data[i] ^= 1 << choose.randrange(8)
            trial(data)
        by_place[name] = trial.refused - before
    trial.tell(injected, "checkpoint: one byte flipped")
    for name, place in places.items():
        if name.startswith("data/") or name in ("data.pkl", "byteorder", "version", "weight"):
            assert by_place[name] == len(place), f"{name}: what was altered was loaded"


@pytest.mark.faults
def test_every_bit_of_a_file_flipped(trial, injected):
    whole = saved(content())
    for i in range(len(whole) * 8):
        data = bytearray(whole)
        data[i // 8] ^= 1 << i % 8
        trial(data)
    trial.tell(injected, "checkpoint: one byte flipped")


def test_cut_at_every_length(trial, injected):
    whole = saved(content())
    for length in range(0, len(whole), 7):
        refused = trial(whole[:length])
        assert "bytes are cut short" in refused or length < 4 and "cannot be loaded" in refused
        assert not is_intact(trial.path)
    trial.tell(injected, "checkpoint: cut short")


def test_bytes_appended_to_a_file(trial, injected):
    whole = saved(content())
    choose = random.Random(0)
    for count in (1, 2, 3, 21, 22, 23, 100, 1000, 65535, 65536, 70000):
        trial(whole + bytes(count))
        trial(whole + choose.randbytes(count))
        trial(choose.randbytes(count) + whole)
        trial(whole + whole[-count:])
    assert trial(whole + whole) == ""  # the second is found, and whole
    trial.tell(injected, "checkpoint: something appended")


def test_blocks_that_never_reached_the_disk(trial, injected):
    """After a power failure a file may have its length and zeros in it, or another file's block."""
    whole = saved({**content(), "much": torch.randn(3000)})
    trial.expected = {**content(), "much": torch.load(io.BytesIO(whole), weights_only=True)["much"]}
    for size in (512, 4096):
        for begin in range(0, len(whole), size):
            count = min(size, len(whole) - begin)
            for block in (bytes(count), whole[:size][:count].ljust(count, b"\1")):
                trial(whole[:begin] + block + whole[begin + count :])
            trial(whole[:begin] + bytes(len(whole) - begin))
    trial.tell(injected, "checkpoint: blocks of zeros")


@cache
def real():
    return REAL.read_bytes(), torch.load(REAL, weights_only=True)


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_real_checkpoint_altered_anywhere(tmp_path, data, injected):
    """Optimizer, momentum queue, order of an epoch: several bytes, anywhere."""
    whole, expected = real()
    trial = Trial(tmp_path / "altered.pth", expected)
    altered = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(whole) - 1))
        altered[place] = data.draw(st.integers(0, 255))
    trial(altered)
    trial.tell(injected, "checkpoint: real, bytes altered")


@pytest.mark.faults
def test_a_real_checkpoint_altered_at_many_places(tmp_path, injected):
    whole, expected = real()
    trial = Trial(tmp_path / "altered.pth", expected)
    choose = random.Random(0)
    for _ in range(3000):
        altered = bytearray(whole)
        altered[choose.randrange(len(whole))] ^= 1 << choose.randrange(8)
        trial(altered)
    trial.tell(injected, "checkpoint: real, bytes altered")


def test_files_of_older_versions_of_torch(tmp_path, injected):
    """The checksums have been there as long as the format; the one before has none."""
    expected = torch.load(KEPT / "torch_1.13_zip.pth", weights_only=True)
    whole = (KEPT / "torch_1.13_zip.pth").read_bytes()
    trial = Trial(tmp_path / "old.pth", expected)
    assert trial(whole) == "" and is_intact(trial.path)
    for i in range(0, len(whole), 5):
        altered = bytearray(whole)
        altered[i] ^= 1 << i % 8
        trial(altered)
    trial.tell(injected, "checkpoint of torch 1.13: one byte flipped")
    before_zip = KEPT / "torch_1.13_legacy.pth"
    assert differing(expected, read_checkpoint(str(before_zip))) == 0
    assert damage_of(before_zip) is None and not is_intact(before_zip)


def test_the_format_without_checksums_fails_politely(tmp_path, injected):
    """Altered numbers cannot be detected there, but unreadable files are refused by name."""
    whole = saved(content(), _use_new_zipfile_serialization=False)
    trial = Trial(tmp_path / "old.pth", content())
    assert trial(whole) == ""
    for length in range(0, len(whole), 7):
        assert trial(whole[:length])
    trial.tell(injected, "checkpoint of the old format: cut short")
    for i in range(0, len(whole), 5):
        trial(whole[:i] + bytes([whole[i] ^ 16]) + whole[i + 1 :])


def test_saved_without_checksums(tmp_path):
    """torch can omit checksums: such a file loads as torch loads it."""
    path = tmp_path / "quick.pth"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content(), path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert damage_of(path) is None and differing(content(), read_checkpoint(str(path))) == 0


def test_checkpoint_zipped_again_with_compression(tmp_path, trial, injected):
    """torch loads it; its checksums are checked, and it is not mapped."""
    path = tmp_path / "packed.pth"
    with zipfile.ZipFile(io.BytesIO(saved(content()))) as plain:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for record in plain.infolist():
                packed.writestr(record.filename, plain.read(record))
    for mapped in (False, True):
        assert differing(content(), read_checkpoint(str(path), mapped)) == 0
    whole = path.read_bytes()
    for i in range(0, len(whole), 5):
        trial(whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :])
    trial.tell(injected, "compressed checkpoint: one byte flipped")


@pytest.mark.faults
def test_large_files_have_the_same_directory(tmp_path):
    """More than 65535 records, so that only zip64 can count them."""
    path = tmp_path / "many.pth"
    value = torch.zeros(1)
    torch.save({"model": {str(i): value.clone() for i in range(66_000)}}, path)
    assert is_intact(path)
    with open(path, "r+b") as file, zipfile.ZipFile(path) as zipped:
        file.seek(zipped.getinfo("many/data/65900").header_offset + 30 + 100)
        file.write(b"\xff" * 64)
    assert not is_intact(path)


def test_tensors_left_in_the_file_are_the_same(tmp_path):
    path = tmp_path / "a.pth"
    torch.save(content(), path)
    assert differing(content(), read_checkpoint(str(path), mapped=True)) == 0
    data = bytearray(path.read_bytes())
    data[where(data)["weight"][0]] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="not as it was saved"):
        read_checkpoint(str(path), mapped=True)


def test_missing_file_is_not_intact(tmp_path):
    assert not is_intact(tmp_path) and not is_intact(tmp_path / "nothing.pth")
    (tmp_path / "empty.pth").touch()
    assert not is_intact(tmp_path / "empty.pth")
    shutil.copy(__file__, tmp_path / "text.pth")
    assert not is_intact(tmp_path / "text.pth")


def test_unchanged_file_is_read_only_once(tmp_path, monkeypatch):
    read = []
    opened = zipfile.ZipFile.open

    def counted(self, name, *args, **kwargs):
        read.append(name.filename)
        return opened(self, name, *args, **kwargs)

    monkeypatch.setattr(zipfile.ZipFile, "open", counted)
    path = tmp_path / "a.pth"
    torch.save(content(), path)
    # A file that is this young could be written to again without another time.
    assert is_intact(path) and len(read) > 3
    read.clear()
    assert is_intact(path) and len(read) > 3
    monkeypatch.setattr(checksums, "CLOCK_RESOLUTION_NS", -(10**18))
    assert is_intact(path)
    read.clear()
    assert is_intact(path) and read_checkpoint(str(path)) and not read
    torch.save(content(), path)
    assert is_intact(path) and read


def test_memory_does_not_grow_with_the_file(tmp_path):
    """64 MiB in pieces of 256 KiB."""
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
    assert not is_intact(path), "only its beginning was read"
