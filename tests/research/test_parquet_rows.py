"""Check the parquet benchmark at a tiny size: all stores hold the same images."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import torch

from research.benchmarks import parquet
from research.benchmarks.harness import Sizes

SIZE = 3


@pytest.fixture
def stores(tmp_path):
    return parquet.Stores(tmp_path, SIZE)


def test_all_stores_give_the_same_images(stores):
    groups = [pq.ParquetFile(path).num_row_groups for path in (stores.single, stores.large)]
    assert groups == [SIZE, 1]
    pairs = json.loads(stores.annotations.read_text())
    expected = [(stores.root / pairs[number]["image"]).read_bytes() for number in stores.order]
    assert sorted(stores.order) == list(range(SIZE))
    for data in (stores.files, stores.of_large, stores.of_single):
        assert stores.bytes_of(data, rounds=1) == expected
    assert stores.bytes_by_pyarrow() == expected


def test_both_sides_decode_the_same_samples(stores):
    found, expected = (stores.decoding(data)() for data in (stores.of_large, stores.files))
    assert len(found) == SIZE
    for one, other in zip(found, expected, strict=True):
        assert one["text_input"] == other["text_input"]
        assert torch.equal(one["image"], other["image"])


def test_every_conversion_is_a_new_one(stores, monkeypatch):
    folders = []

    def converted(files, cache_dir):
        assert files == [stores.large] and not cache_dir.exists()
        folders.append(cache_dir)
        return real(files, cache_dir=cache_dir)

    real = parquet.converted
    monkeypatch.setattr(parquet, "converted", converted)
    stores.convert(stores.large)
    stores.convert(stores.large)
    assert len(set(folders)) == 2 and not any(folder.exists() for folder in folders)


def test_rows():
    rows = list(parquet.rows(Sizes("quick", repeats=1)))
    assert len({row.what for row in rows}) == 4
    assert all(row.ours > 0 and row.reference > 0 and not row.target for row in rows)
