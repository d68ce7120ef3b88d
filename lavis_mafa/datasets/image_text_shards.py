"""`image_text_shards`: image-text pairs in webdataset tar shards, read by index.

A dataset configuration:

    datasets:
      image_text_shards:
        build_info:
          annotations:
            train: {storage: "mine/{00000..00331}.tar"}  # a glob, an index or a list does as well
            val: {storage: mine/val/pairs.json}

A sample is a run of members whose names are equal up to the first dot, with one image (`.jpg`,
`.jpeg`, `.png`, `.webp`) and a caption (`.txt`, `.caption`, or `caption` in `.json`): what
`lavis_mafa.datasets.shards` and img2dataset write. Samples with equal `image_id` in `.json` show
the same image. Shards are listed once, without reading images, into a cache folder like that of
`pair_table`, with one more file:

    <cache>/image_text_shards/<key>/places.npy   int64 (N, 3): shard, first byte and size of images

All of it is memory-mapped, so the number of samples costs no memory per worker.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from lavis.common.registry import registry
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from lavis_mafa.datasets.annotation_rows import Problem, Refusals
from lavis_mafa.datasets.image_reading import read_rgb
from lavis_mafa.datasets.local_builder import (
    ConvertedFiles,
    ConvertingBuilder,
    group_id_option,
    of_training,
)
from lavis_mafa.datasets.numbering import (
    DIGEST,
    digest_of,
    group_digest,
    numbered_groups,
    numbered_images,
)
from lavis_mafa.datasets.pair_table import SCHEMA, PairTable, describe_groups
from lavis_mafa.datasets.pairs import EvalPairs, Pairs, TrainPairs
from lavis_mafa.datasets.shard_samples import Stored, read_samples
from lavis_mafa.datasets.shards import Shard, files_named, find_shards
from lavis_mafa.datasets.stored_images import PLACES, StoredImages
from lavis_mafa.io.cache import cache_root, make_once
from lavis_mafa.io.checkpoints import dataset_yamls
from lavis_mafa.io.files import names_of, write_json
from lavis_mafa.io.launcher import usable_cores
from lavis_mafa.io.processes import progress

FORMAT_VERSION = 3
SHARDS_PER_WORKER = 4  # at least; a shard takes a second, a process a part of one


class ShardTable(PairTable):
    """A table of pairs with the place of each image in the shards."""

    images: StoredImages

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self.images = StoredImages(self.folder, self.meta["shards"], "shard")

    def image(self, index: int) -> str:
        """Return `<shard>/<member>` of the image of pair `index`."""
        shard = self.images.file(index)
        assert shard is not None
        return f"{shard.path}/{super().image(index)}"

    def image_bytes(self, index: int) -> bytes:
        """Return the image file of pair `index`.

        Raises:
            OSError: if the shard is gone, or has changed since it was listed, also in place.
        """
        return self.images.read(index, self.image(index))

    def identity(self) -> Iterator[tuple[Any, Any]]:
        """Yield, in order, buffers that identify the images, by name and place, and captions."""
        yield from super().identity()
        for rows in np.array_split(self.images.places, 1 + len(self) // 2**20):
            yield np.ascontiguousarray(rows).data, b""


def listed(
    storage: Collection[str | os.PathLike[str]],
    *,
    drop_empty: bool = True,
    group_id_key: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> ShardTable:
    """Return the table of the samples in `storage`; create it unless it is cached for these shards.

    Several processes may do so at once.

    Args:
        storage: index files, tar files, globs and brace lists; see `find_shards`.
        drop_empty: drop samples with an empty caption instead of refusing them.
        group_id_key: of the id of a sample's group in its `.json`; None: no groups.
        cache_dir: folder of all tables; None: $LAVIS_MAFA_CACHE, else ~/.cache/lavis_mafa.

    Raises:
        FileNotFoundError, ValueError: see `find_shards`; also for samples that cannot be used and
            damaged shards (the first 20 are listed), or no sample at all.
        RuntimeError: if a shard changed while it was listed.
    """
    shards = find_shards(list(storage))
    options = drop_empty, group_id_key
    folder = cache_root(cache_dir) / "image_text_shards" / _key(shards, *options)

    def convert(temporary: Path) -> None:
        _make(shards, temporary, *options)
        if _key(find_shards(list(storage)), *options) != folder.name:
            raise RuntimeError(f"{names_of(storage)} changed while being read; start again")

    make_once(folder, convert)
    table = ShardTable(folder)
    counts = table.meta["pairs"], len(shards), table.meta["images"]
    groups = describe_groups(table.meta)
    logging.info("%s: %d samples in %d shards, %d images%s", names_of(storage), *counts, groups)
    if table.meta["empty_dropped"]:
        empty = table.meta["empty_dropped"]
        logging.warning("%s: dropped %d empty captions", names_of(storage), empty)
    return table


def _key(shards: list[Shard], drop_empty: bool, group_id_key: str | None) -> str:
    # Without groups the key is that of tables listed before there were any.
    groups = [] if group_id_key is None else [group_id_key]
    text = json.dumps([FORMAT_VERSION, shards, bool(drop_empty), *groups])
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def _make(shards: list[Shard], folder: Path, drop_empty: bool, group_id_key: str | None) -> None:
    """Write the files of a table into `folder`, a shard at a time."""
    logging.info("Listing the samples of %d shards", len(shards))
    samples_of = _samples_by_shard(shards, group_id_key)
    refused = Refusals()
    pairs = empty = with_group = 0
    with ExitStack() as stack:
        groups = stack.enter_context(open(folder / "groups", "wb"))
        digests = stack.enter_context(open(folder / "digests", "wb"))
        places = stack.enter_context(open(folder / "places", "wb"))
        sink = stack.enter_context(pa.OSFile(os.fspath(folder / "pairs.arrow"), "wb"))
        writer = stack.enter_context(pa.ipc.new_file(sink, SCHEMA))
        for number, (shard, samples) in enumerate(zip(shards, samples_of, strict=True)):
            kept: list[Stored] = []
            wrong: list[str] = []
            found = len(samples)
            for sample in samples:
                with_group += isinstance(sample, Stored) and sample.has_group
                if isinstance(sample, Problem):
                    wrong.append(f"{shard.path}, {sample.where}: {sample.message}")
                elif sample.caption.strip():
                    kept.append(sample)
                elif drop_empty:
                    empty += 1
                else:
                    why = "empty caption; fill it in, or set drop_empty: true"
                    wrong.append(f"{shard.path}, {sample.image}: {why}")
            if shard.samples not in (None, found) and not wrong:
                why = f"{found} samples, but its index says {shard.samples}; write either again"
                wrong.append(f"{shard.path}: {why}")
            refused.add(*wrong)
            if not kept:
                continue
            columns: list[list[str | None]] = [
                [s.image for s in kept],
                [s.caption for s in kept],
                [s.image_id for s in kept],
            ]
            arrays = [pa.array(column, pa.string()) for column in columns]
            writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
            digests.write(b"".join(_identity(number, sample) for sample in kept))
            groups.write(b"".join(group_digest(sample.group_id) for sample in kept))
            rows = [(number, sample.start, sample.size) for sample in kept]
            places.write(np.array(rows, np.int64).tobytes())
            pairs += len(kept)
    if group_id_key is not None and not with_group and not refused.count:
        refused.add(
            f"no group_id: {group_id_key!r} is in the .json of no sample; set group_id_key to its "
            "name"
        )
    refused.end(f"{refused.count} samples or shards")
    if not pairs:
        raise ValueError(f"no image-text pair in {len(shards)} shards ({empty} empty captions)")
    _, _, first = numbered_images(folder, DIGEST)
    np.save(folder / PLACES, np.fromfile(folder / "places", np.int64).reshape(-1, 3))
    os.remove(folder / "places")
    meta = {
        "pairs": pairs,
        "images": len(first),
        "empty_dropped": empty,
        "id_conflicts": 0,  # every sample has its own copy of the image
        **({} if group_id_key is None else numbered_groups(folder)),
        "shards": [[shard.path, shard.size, shard.mtime_ns] for shard in shards],
    }
    (folder / "groups").unlink(missing_ok=True)
    write_json(folder / "meta.json", meta)


class _Listing(Dataset[list[Stored | Problem]]):
    """The samples of each shard."""

    def __init__(self, shards: list[Shard], group_id_key: str | None) -> None:
        self.paths = [shard.path for shard in shards]
        self.group_id_key = group_id_key

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> list[Stored | Problem]:
        return list(read_samples(self.paths[number], self.group_id_key))


def _samples_by_shard(shards: list[Shard], group_id_key: str | None) -> Iterable[list[Any]]:
    """Return the samples of each shard, in order; several processes list many shards."""
    workers = min(usable_cores(), len(shards) // SHARDS_PER_WORKER)
    loader = DataLoader(
        _Listing(shards, group_id_key),
        batch_size=None,
        collate_fn=list,  # the default would look for arrays in every sample
        num_workers=workers if workers > 1 else 0,
        generator=torch.Generator(),  # else it draws from the one that gives models their weights
    )
    listed_shards: Iterable[list[Any]] = progress(loader, "shards", unit=" shards")
    return listed_shards


def _identity(shard: int, sample: Stored) -> bytes:
    """Return a digest of an image's identity: its image_id, or without one its place."""
    text = f"i{sample.image_id}" if sample.image_id is not None else f"p{shard},{sample.start}"
    return digest_of(b"", text.encode("utf-8", "surrogatepass"))


class _Shards(Pairs):
    """Pairs from the shards that `listed` finds by ``ann_paths``."""

    table: ShardTable

    def __init__(
        self,
        vis_processor: Callable[[Image.Image], Any],
        text_processor: Callable[[str], str],
        ann_paths: Collection[str | os.PathLike[str]],
        **table_options: Any,
    ) -> None:
        super().__init__(listed(ann_paths, **table_options), vis_processor, text_processor)

    def picture(self, row: int) -> Image.Image:
        return read_rgb(self.table.image(row), self.table.image_bytes(row))


class ImageTextShardsTrain(_Shards, TrainPairs):
    """One sample per pair, in the order of the shards; see `TrainPairs`."""

    def image_bytes(self, index: int) -> tuple[bytes, str]:
        """Return the stored image file of pair `index`, and its suffix."""
        suffix = os.path.splitext(self.table.image(index))[1]
        return self.table.image_bytes(index), suffix.lower().lstrip(".")


class ImageTextShardsEval(_Shards, EvalPairs):
    """One sample per `image_id`, with the image of its first sample and the captions of all.

    See `EvalPairs`.
    """


@dataclass(frozen=True)
class ShardOptions(ConvertedFiles):
    """Options of ``image_text_shards``; the defaults are in its YAML."""

    group_id_key: str | None = group_id_option("key in the .json of the training samples")


@registry.register_builder("image_text_shards")
class ImageTextShardsBuilder(ConvertingBuilder):
    """Build the splits that `build_info.annotations` names, from tar shards."""

    name = "image_text_shards"
    train_dataset_cls = ImageTextShardsTrain
    eval_dataset_cls = ImageTextShardsEval
    DATASET_CONFIG_DICT = dataset_yamls("image_text_shards")
    build_options = ShardOptions
    files_named = staticmethod(files_named)

    def dataset_options(self, info: Any) -> dict[str, Any]:
        return {"drop_empty": info.drop_empty, "cache_dir": info.cache_dir}

    def options_of_split(self, split: str) -> dict[str, Any]:
        return {key: self.config.build_info[key] for key in of_training(split)}
