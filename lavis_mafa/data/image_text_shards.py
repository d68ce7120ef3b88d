"""`image_text_shards`: image-text pairs in webdataset tar shards, read by index.

A dataset configuration:

    datasets:
      image_text_shards:
        build_info:
          annotations:
            train: {storage: "mine/{00000..00331}.tar"}  # or a glob, a folder, a list
            val: {storage: mine/val/}

A sample is a run of members whose names are equal up to the first dot (or up to the suffix), with
one image (`.jpg`, `.jpeg`, `.png`, `.webp`) and a caption (`.txt`, `.caption`, or `caption` in
`.json`, perhaps a list): what img2dataset writes. Samples with
equal `image_id` in `.json` show the same image. Shards are listed once, without reading images,
into a `pair_table` in the cache folder ``image_text_shards``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from lavis.common.registry import registry
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from lavis_mafa.data.annotation_rows import MAX_UNUSABLE, PassedOver, Problem, Row
from lavis_mafa.data.local_builder import ConvertedFiles, ConvertingBuilder, group_id_option
from lavis_mafa.data.pair_conversion import Holdout, cached_table, write_table
from lavis_mafa.data.pair_table import PairTable
from lavis_mafa.data.pairs import EvalPairs, Pairs, TrainPairs
from lavis_mafa.data.shards import Shard, files_named, find_shards, read_samples
from lavis_mafa.io.cache import cache_root
from lavis_mafa.io.launcher import usable_cores
from lavis_mafa.io.processes import progress
from lavis_mafa.io.project_files import dataset_yamls

SHARDS_PER_WORKER = 4  # at least; a shard takes a second, a process a part of one


class _ShardTable(PairTable):
    """A table of pairs whose images lie in shards."""

    kind = "shard"
    identified_by = ("image", "source", "start", "size")

    def image(self, index: int) -> str:
        """Return `<shard>/<member>` of the image of pair `index`."""
        return f"{self.meta['sources'][self._value('source', index)]}/{super().image(index)}"

    def image_names(self) -> pa.Array:
        shards = pa.array([os.path.basename(path) for path in self.meta["sources"]], pa.string())
        of_pairs = shards.take(self.rows.column("source").combine_chunks())
        return pc.binary_join_element_wise(of_pairs, super().image_names(), "/")

    def place(self, index: int) -> str:
        return self.image(index)


def listed(
    storage: Collection[str | os.PathLike[str]],
    *,
    drop_empty: bool = True,
    max_unusable: float = MAX_UNUSABLE,
    group_id_key: str | None = None,
    holdout: Holdout = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> _ShardTable:
    """Return the table of the samples in `storage`; create it unless it is cached for these shards.

    Several processes may do so at once.

    Args:
        storage: tar files, folders, globs and brace lists; see `find_shards`.
        drop_empty: drop samples with an empty caption instead of refusing them.
        max_unusable: share of the samples that may be unusable: these are left out and logged.
        group_id_key: of the id of a sample's group in its `.json`; None: no groups.
        holdout: see `converted`.
        cache_dir: folder of all tables; None: $LAVIS_MAFA_CACHE, else ~/.cache/lavis_mafa.

    Raises:
        FileNotFoundError, ValueError: see `find_shards`; also for too many samples that cannot be
            used (the first 20 are listed), damaged shards, or no sample at all.
        RuntimeError: if a shard changed while it was listed.
    """

    def state() -> list[Any]:
        shards = find_shards(list(storage))
        return [shards, bool(drop_empty), group_id_key, max_unusable, *(holdout or ())]

    def convert(folder: Path) -> None:
        shards = find_shards(list(storage))
        write_table(
            folder,
            [shard.path for shard in shards],
            _rows_of(shards, group_id_key),
            groups=group_id_key is not None,
            drop_empty=drop_empty,
            max_unusable=max_unusable,
            holdout=holdout,
            shards=True,
        )

    root = cache_root(cache_dir) / "image_text_shards"
    return cached_table(_ShardTable, root, storage, state, convert)


def _rows_of(
    shards: list[Shard], group_id_key: str | None
) -> Iterator[list[Row | Problem | PassedOver]]:
    """Yield the samples of each shard, in order; several processes list many shards."""
    workers = min(usable_cores(), len(shards) // SHARDS_PER_WORKER)
    loader = DataLoader(
        _Listing(shards, group_id_key),
        batch_size=None,
        collate_fn=list,  # the default would look for arrays in every sample
        num_workers=workers if workers > 1 else 0,
        generator=torch.Generator(),  # else it draws from the one that gives models their weights
    )
    without_group = group_id_key is not None
    for number, rows in enumerate(progress(loader, "shards", unit=" shards"), 1):
        without_group &= not any(isinstance(row, Row) and row.has_group for row in rows)
        if without_group and number == len(shards):
            why = (
                f"no group_id: {group_id_key!r} is in the .json of no sample; set group_id_key to "
                "its name"
            )
            rows.append(Problem("all shards", why, fatal=True))
        yield rows


class _Listing(Dataset[list[Row | Problem | PassedOver]]):
    """The samples of each shard."""

    def __init__(self, shards: list[Shard], group_id_key: str | None) -> None:
        self.paths = [shard.path for shard in shards]
        self.group_id_key = group_id_key

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> list[Row | Problem | PassedOver]:
        return list(read_samples(self.paths[number], self.group_id_key))


class _Shards(Pairs):
    """Pairs from the shards that `listed` finds by ``ann_paths``."""

    table: _ShardTable

    def __init__(
        self,
        vis_processor: Callable[[Image.Image], Any],
        text_processor: Callable[[str], str],
        ann_paths: Collection[str | os.PathLike[str]],
        **table_options: Any,
    ) -> None:
        super().__init__(listed(ann_paths, **table_options), vis_processor, text_processor)


class ImageTextShardsTrain(_Shards, TrainPairs):
    """One sample per pair, in the order of the shards; see `TrainPairs`."""


class ImageTextShardsEval(_Shards, EvalPairs):
    """One sample per `image_id`, with the image of its first sample and the captions of all.

    See `EvalPairs`.
    """


@dataclass(frozen=True)
class _ShardOptions(ConvertedFiles):
    """Options of ``image_text_shards``; the defaults are in its YAML."""

    group_id_key: str | None = group_id_option("key in the .json of the training samples")


@registry.register_builder("image_text_shards")
class ImageTextShardsBuilder(ConvertingBuilder):
    """Build the splits that `build_info.annotations` names, from tar shards."""

    name = "image_text_shards"
    train_dataset_cls = ImageTextShardsTrain
    eval_dataset_cls = ImageTextShardsEval
    DATASET_CONFIG_DICT = dataset_yamls("image_text_shards")
    build_options = _ShardOptions
    files_named = staticmethod(files_named)
