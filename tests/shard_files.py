"""Shards of webdataset, written by webdataset itself."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from webdataset import TarWriter


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
