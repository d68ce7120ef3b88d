"""Altered parquet and Arrow files: a message or other pairs, but no crash, and little memory."""

from __future__ import annotations

import io
import multiprocessing
import random
import resource
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from lavis_mafa.data.annotation_files import read_rows
from lavis_mafa.data.annotation_rows import Problem
from lavis_mafa.data.columnar_files import check_columns

COPIES = 150  # altered ones of each file
MOST_MEMORY = 2**32  # bytes more than before: a page of parquet may claim half of it


def picture(number: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (6, 5), (number, 0, 77)).save(stream, "PNG")
    return stream.getvalue()


def tables() -> dict[str, pa.Table]:
    numbers = range(12)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    words = [f"word {k}" for k in numbers]
    return {
        "struct": pa.table(
            {
                "image": pa.array([{"bytes": picture(k), "path": f"{k}"} for k in numbers], image),
                "captions": [[word] * (k % 3) for k, word in enumerate(words)],
                "image_id": list(numbers),
            }
        ),
        "dictionaries": pa.table(
            {
                "image": pa.array([f"{k % 3}.png" for k in numbers]).dictionary_encode(),
                "text": pa.array(words, pa.large_string()),
                "image_id": pa.array([f"i{k % 2}" for k in numbers]).dictionary_encode(),
            }
        ),
    }


def write(table: pa.Table, path: Path, form: str) -> None:
    if form == "parquet":
        pq.write_table(table, path, row_group_size=5)
        return
    make = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}[form]
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, 5)


def altered(content: bytes, draw: random.Random) -> bytes:
    """Return a file that is cut short, or has a bit, a number or a part of it replaced."""
    changed, place = bytearray(content), draw.randrange(len(content))
    kind = draw.choice(["cut", "bit", "number", "zeros", "part"])
    if kind == "cut":
        del changed[place:]
    elif kind == "bit":
        changed[place] ^= 1 << draw.randrange(8)
    elif kind == "number":
        number, size = draw.choice([(2**63 - 1, 8), (-1, 8), (2**40, 8), (2**31 - 1, 4), (-1, 4)])
        changed[place : place + size] = number.to_bytes(size, "little", signed=True)
    elif kind == "zeros":
        size = min(draw.randrange(1, 40), len(content) - place)
        changed[place : place + size] = bytes(size)
    else:
        other = draw.randrange(len(content))
        changed[place : place + 24] = content[other : other + 24]
    return bytes(changed)


def read_altered(folder: Path, results: Any) -> None:
    counts = {"refused": 0, "cut and not noticed": 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, table in tables().items():
        for form in ("parquet", "stream", "file"):
            path = folder / ("a.parquet" if form == "parquet" else "a.arrow")
            write(table, path, form)
            content, draw = path.read_bytes(), random.Random(f"{name} {form}")
            assert len(list(read_rows(path))) == 12
            for _ in range(COPIES):
                path.write_bytes(altered(content, draw))
                try:
                    check_columns([path])
                    refused = False
                    for row in read_rows(path):
                        refused |= isinstance(row, Problem)
                        if getattr(row, "stored", None):
                            row.stored.content.to_pybytes()
                except ValueError as error:
                    assert str(path) in str(error)
                    refused = True
                counts["refused"] += refused
                counts["cut and not noticed"] += path.stat().st_size < len(content) and not refused
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results.put((counts, (after - before) * 1024))


def test_altered_files_neither_crash_nor_take_memory(tmp_path, injected):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=read_altered, args=(tmp_path, results))
    process.start()
    process.join(100)
    assert process.exitcode == 0, f"exit status {process.exitcode}: a crash if negative"
    counts, memory = results.get(timeout=5)
    assert counts["refused"] > 3 * COPIES  # of six files
    assert counts["cut and not noticed"] == 0
    assert memory < MOST_MEMORY
    injected("altered parquet or Arrow file", 6 * COPIES, times=6 * COPIES)
