"""Measure how listing and reading tar shards grow with the number of pairs.

The shards are one real shard, linked under many names. Tables too large to list here are that of
real shards with its rows repeated: reading them uses the same files in the same way.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
from PIL import Image

from lavis_mafa.datasets.image_text_shards import ShardTable, listed
from lavis_mafa.datasets.pair_table import PLACES, SCHEMA
from lavis_mafa.datasets.shards import write_shards
from lavis_mafa.io.files import write_json
from research.benchmarks.harness import Row, Sizes, Timed, in_turn, progress

READS = 2000
BYTES_A_PAIR = 100  # of a table on the disk


def rows(sizes: Sizes) -> Iterator[Row]:
    """Time listing a sample and reading pairs at random, and count the memory of open tables."""
    per_shard, small, large = (50, 100, 400) if sizes.quick else (10_000, 20_000, 200_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few, many = (linked(folder, per_shard, size) for size in (small, large))
        times = in_turn(
            {"few": partial(list_anew, few), "many": partial(list_anew, many)}, sizes.repeats, 0
        )
        samples = [[t / size for t in times[n]] for n, size in (("many", large), ("few", small))]
        yield Timed.of(*samples).row(
            f"listing a sample of shards, N = {large:,} / {small:,}",
            "<= 1.2",
            "in one process; a table is listed once",
        )
        base = list_anew(many)
        for times_more in (10, 100) if sizes.quick else (50, 500):
            pairs = times_more * large
            if shutil.disk_usage(folder).free < 1.5 * BYTES_A_PAIR * pairs:
                progress(f"left out: a table of {pairs:,} pairs, for which the disk is too small")
                continue
            table = repeated(base, times_more, folder / f"repeated_{times_more}")
            used = private_memory_of(partial(open_and_read, table.folder)) / pairs
            timed = in_turn(
                {"large": partial(reads, table), "base": partial(reads, base)},
                max(sizes.repeats, 5),
            )
            yield Timed.of(timed["large"], timed["base"]).row(
                f"{READS:,} pairs read at random, N = {pairs:,} / {large:,}",
                "",
                "image and caption; files in the page cache as far as they fit",
            )
            yield Row.alone(
                f"memory of an open table of shards a pair, N = {pairs:,}",
                used,
                "B",
                "<= 1",
                f"ratio: bytes a pair of this process's own memory, after {READS:,} reads",
            )


def linked(folder: Path, per_shard: int, size: int) -> Path:
    """Return a folder of shards with ``size`` samples, all links to one shard."""
    one = folder / "one"
    if not one.exists():
        stream = io.BytesIO()
        Image.new("RGB", (8, 8)).save(stream, "JPEG")
        image, caption = stream.getvalue(), "a caption of about as many words as usual, number"
        pairs = ((f"{n:08d}", image, "jpg", f"{caption} {n}", {}) for n in range(per_shard))
        write_shards(one, pairs, per_shard)
    shards = folder / f"{size}_samples"
    shards.mkdir()
    (real,) = one.glob("*.tar")
    for number in range(size // per_shard):
        os.link(real, shards / f"{number:05d}.tar")
    return shards


def list_anew(shards: Path) -> ShardTable:
    """List shards in this process, as at their first use."""
    cache = shards.parent / f"{shards.name}_cache"
    shutil.rmtree(cache, ignore_errors=True)
    with mock.patch("lavis_mafa.datasets.image_text_shards.usable_cores", lambda: 1):
        return listed([shards / "*.tar"], cache_dir=cache)


def repeated(table: ShardTable, times: int, folder: Path) -> ShardTable:
    """Write a table with the rows of another several times; each row has an image of its own."""
    folder.mkdir()
    pairs = len(table)
    with pa.memory_map(os.fspath(table.folder / "pairs.arrow")) as source:
        batches = pa.ipc.open_file(source).read_all().to_batches()
        with (
            pa.OSFile(os.fspath(folder / "pairs.arrow"), "wb") as sink,
            pa.ipc.new_file(sink, SCHEMA) as writer,
        ):
            for _ in range(times):
                for batch in batches:
                    writer.write_batch(batch)
    places = np.memmap(folder / PLACES, np.int64, "w+", shape=(times * pairs, 5))
    ids = np.lib.format.open_memmap(folder / "image_ids.npy", "w+", np.int64, (times * pairs,))
    own = np.asarray(table.places)
    for turn in range(times):
        part = slice(turn * pairs, (turn + 1) * pairs)
        places[part] = own
        ids[part] = np.arange(part.start, part.stop)
    meta = {**table.meta, "pairs": times * pairs, "images": times * pairs}
    write_json(folder / "meta.json", meta)
    return ShardTable(folder)


def reads(table: ShardTable) -> None:
    """Read the images and captions of random pairs."""
    for row in np.random.default_rng(0).integers(0, len(table), READS).tolist():
        table.image_bytes(row)
        table.caption(row)


def open_and_read(folder: Path) -> ShardTable:
    """Return a table that has just been opened, and read."""
    table = ShardTable(folder)
    reads(table)
    return table


def private_memory_of(action: partial[ShardTable]) -> float:
    """Return the bytes that an action leaves allocated; mapped files are not counted."""
    before = _private()
    kept = action()
    after = _private()
    del kept
    return max(0.0, after - before)


def _private() -> float:
    status = Path("/proc/self/status").read_text()
    return 1024.0 * int(re.findall(r"RssAnon:\s*(\d+) kB", status)[0])
