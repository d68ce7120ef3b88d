"""Pictures, shards of webdataset that it writes itself, and tables."""

from __future__ import annotations

import csv
import io
import json
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from webdataset import TarWriter


def png(number):
    """Return a picture of a colour of its own."""
    stream = io.BytesIO()
    Image.new("RGB", (6, 5), (number % 256, number // 256, 77)).save(stream, "PNG")
    return stream.getvalue()


def write_shards(folder, samples, per_shard=10_000):
    """Write samples, (key, bytes of the image, its suffix, caption, values of the .json), into
    shards of ``per_shard``; return a pattern of their paths."""
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    count, rest = 0, iter(samples)
    while some := list(islice(rest, per_shard)):
        path = folder / f"pairs-{count:06d}.tar"
        count += 1
        with TarWriter(str(path), encoder=False, mtime=0) as tar:
            for key, image, suffix, caption, values in some:
                texts = {"txt": caption.encode(), "json": json.dumps(values).encode()}
                tar.write({"__key__": key, suffix: image, **texts})
    return folder / "pairs-*.tar"


def write_rows(path, rows):
    """Write rows in the format of the path's suffix."""
    suffix = path.suffix
    if suffix == ".json":
        path.write_text(json.dumps(rows))
    elif suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif suffix in (".csv", ".tsv"):
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, delimiter="," if suffix == ".csv" else "\t")
            writer.writerow(rows[0])
            writer.writerows(row.values() for row in rows)
    else:
        table = pa.Table.from_pylist(rows)
        if suffix == ".parquet":
            pq.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
                out.write_table(table)
    return path
