"""Shards of webdataset, written by webdataset itself, with an index as its ``widsindex`` makes."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from webdataset import TarWriter


def write_shards(folder, samples, per_shard=10_000):
    """Write samples, (key, bytes of the image, its suffix, caption, values of the .json), into
    shards of ``per_shard``; return the path of their index."""
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    listed, rest = [], iter(samples)
    while some := list(islice(rest, per_shard)):
        path = folder / f"pairs-{len(listed):06d}.tar"
        with TarWriter(str(path), encoder=False, mtime=0) as tar:
            for key, image, suffix, caption, values in some:
                texts = {"txt": caption.encode(), "json": json.dumps(values).encode()}
                tar.write({"__key__": key, suffix: image, **texts})
        size = path.stat().st_size
        listed.append({"url": path.name, "nsamples": len(some), "filesize": size})
    index = folder / "pairs.json"
    index.write_text(json.dumps({"__kind__": "wids-shard-index-v1", "shardlist": listed}))
    return index
