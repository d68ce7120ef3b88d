"""Features in files: equal to the blocks, mapped instead of held, complete or encoded again."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.mining import feature_files as files
from lavis_mafa.mining import features as encoding

linux = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux's /proc")
TEXTS = st.lists(st.text(max_size=6) | st.just("\udc80 caf\u00e9 \U0001f600"), max_size=9)


def write_block(path, count, seed=0, width=4, errors=(), queries=0, captions=None):
    """Write a block as `make_features` does, with random values."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: rng.normal(size=(count, width)).astype(np.float32) for name in ("vectors", "texts")
    }
    if queries:
        arrays["images"] = rng.normal(size=(count, queries, width)).astype(np.float16)
    captions = [f"caption {seed} {k}" for k in range(count)] if captions is None else captions
    arrays["captions"] = files.packed(captions)
    arrays["errors"] = files.packed(["gone" if k in errors else "" for k in range(count)])
    with open(path, "wb") as file:
        np.savez(file, **arrays)
    return arrays


@given(captions=TEXTS)
@settings(max_examples=40, deadline=None)
def test_captions_come_back_unchanged(captions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("captions")
    write_block(folder / "block.npz", len(captions), captions=captions)
    files.join_blocks([folder / "block.npz"], np.arange(len(captions)), folder)
    stored = files.read_captions(folder)
    assert list(stored) == captions and len(stored) == len(captions)
    if captions:
        assert stored[-1] == captions[-1]
    with pytest.raises(IndexError):
        stored[len(captions)]


@pytest.mark.parametrize("queries", [0, 3])
def test_joined_blocks_have_the_readable_samples_only(tmp_path, queries):
    paths = [tmp_path / f"block_{k}.npz" for k in range(3)]
    sizes, errors = (5, 5, 2), ((1, 4), (), (0, 1))
    blocks = [
        write_block(path, size, seed, errors=bad, queries=queries)
        for seed, (path, size, bad) in enumerate(zip(paths, sizes, errors, strict=True))
    ]
    numbers = np.arange(12) * 10
    (tmp_path / ".block_7.npz.0.tmp").touch()
    files.join_blocks(paths, numbers, tmp_path)
    good = [0, 2, 3, 5, 6, 7, 8, 9]
    arrays = files.read_arrays(tmp_path)
    assert set(arrays) == {"vectors", "texts", *(["images"] if queries else [])}
    for name, values in arrays.items():
        joined = np.concatenate([block[name] for block in blocks])[good]
        assert values.numpy().dtype == joined.dtype and np.array_equal(values.numpy(), joined)
    assert files.read_numbers(tmp_path).tolist() == [10 * k for k in good]
    assert files.read_captions(tmp_path)[3] == "caption 1 0"
    assert files.read_unreadable(tmp_path) == [(k * 10, "gone") for k in (1, 4, 10, 11)]
    assert files.is_complete(tmp_path)
    assert not [path for path in tmp_path.iterdir() if "block" in path.name]


def test_stopped_joining_is_repeated_from_the_blocks(tmp_path, monkeypatch):
    path = tmp_path / "block.npz"
    arrays = write_block(path, 4)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_json", stop)
        with pytest.raises(KeyboardInterrupt):
            files.join_blocks([path], np.arange(4), tmp_path)
    assert path.is_file() and not files.is_complete(tmp_path)
    files.join_blocks([path], np.arange(4), tmp_path)
    assert np.array_equal(files.read_arrays(tmp_path)["texts"].numpy(), arrays["texts"])


@linux
def test_all_arrays_are_mapped_files(tmp_path):
    write_block(tmp_path / "block.npz", 5, queries=2)
    files.join_blocks([tmp_path / "block.npz"], np.arange(5), tmp_path)
    features = encoding._load(tmp_path, np.arange(5), {"model": "m"})
    assert features.images.shape == (5, 2, 4) and features.texts.shape == (5, 4)
    assert features.identity == {"model": "m"} and len(features) == 5
    mapped = Path("/proc/self/maps").read_text()
    for name in ("images", "texts", "vectors", "numbers", "captions", "caption_ends"):
        assert f"{tmp_path / name}." in mapped
