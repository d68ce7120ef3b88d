"""Check the benchmark of tables of shards at a tiny size."""

from __future__ import annotations

from research.benchmarks import shard_tables
from research.benchmarks.harness import Sizes


def test_rows():
    measured = list(shard_tables.rows(Sizes("quick", repeats=1)))
    assert [row.what.split(",")[0] for row in measured] == [
        "listing a sample of shards",
        "2",  # ,000 pairs read at random
        "memory of an open table of shards a pair",
        "2",
        "memory of an open table of shards a pair",
    ]
    assert all(row.ratio >= 0 for row in measured)


def test_repeated_rows_read_like_the_original(tmp_path):
    base = shard_tables.list_anew(shard_tables.linked(tmp_path, 20, 40))
    table = shard_tables.repeated(base, 3, tmp_path / "repeated")
    assert (len(base), len(table)) == (40, 120)
    for row in (0, 39, 40, 79, 119):
        assert table.caption(row) == base.caption(row % 40)
        assert table.image(row) == base.image(row % 40)
        assert table.image_bytes(row) == base.image_bytes(row % 40)
    assert len(set(table.image_ids)) == 120
