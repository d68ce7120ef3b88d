"""`image_text_json` and `image_text_shards`: a user's image-text pairs.

The first reads JSON, JSON lines, CSV, TSV, COCO, parquet and Arrow files, and folders of Hugging
Face's ``datasets``; the second webdataset tar shards, which are listed once without reading images.

    datasets:
      image_text_json:
        build_info:
          annotations:
            train: {storage: mine/train.jsonl}
            val: {storage: mine/val.json}
          images: {storage: mine/images}  # not needed if the images are in parquet or Arrow files
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from lavis.common.registry import registry
from PIL import Image

from lavis_mafa.algorithm.options import option
from lavis_mafa.data.annotation_rows import CAPTION_KEYS, IMAGE_KEYS
from lavis_mafa.data.local_builder import ConvertedFiles, ConvertingBuilder
from lavis_mafa.data.pair_conversion import converted
from lavis_mafa.data.pairs import EvalPairs, Pairs, TrainPairs
from lavis_mafa.io.project_files import dataset_yamls

_LOOKED_FOR = 50  # images, spread over the data


class _Files(Pairs):
    """Pairs from annotation files or shards, whose images are files in a folder, or inside them.

    Args:
        vis_root: folder that the image paths are relative to; None if there are no paths.
        ann_paths: annotation files, shards, globs and folders, read as one.
        table_options: of `converted`.

    Raises:
        FileNotFoundError: if the image root or an annotation file does not exist.
        ValueError: if the annotation files have rows that cannot be used.
    """

    def __init__(
        self,
        vis_processor: Callable[[Image.Image], Any],
        text_processor: Callable[[str], str],
        vis_root: str | os.PathLike[str] | None,
        ann_paths: Collection[str | os.PathLike[str]],
        **table_options: Any,
    ) -> None:
        root = None if vis_root is None else os.path.abspath(os.path.expanduser(vis_root))
        table = converted(ann_paths, root=root, **table_options)
        super().__init__(table, vis_processor, text_processor, root)

    def require_pictures(self) -> None:
        meta = self.table.meta
        if not meta["with_paths"]:
            return
        what = (
            f"{', '.join(meta['sources'])}: {meta['with_paths']} pairs give the path of their "
            f"image, such as {meta['first_path'][0]!r}; "
        )
        cure = (
            "set build_info.images.storage (train --images) to the folder that the paths are "
            "relative to"
        )
        if self.vis_root is None:
            raise ValueError(what + cure)
        rows = range(0, len(self.table), -(-len(self.table) // _LOOKED_FOR))
        paths = [path for row in rows if (path := self._path_of(row)) is not None]
        missing = [path for path in paths if not os.path.isfile(path)]
        if len(missing) > len(paths) / 2:
            raise FileNotFoundError(
                f"{what}{len(missing)} of {len(paths)} that were looked for are not in root "
                f"{self.vis_root}, first {missing[0]!r}; {cure}"
            )


class ImageTextTrain(_Files, TrainPairs):
    """One sample per pair, in the order of the annotation files; see `TrainPairs`."""


class ImageTextEval(_Files, EvalPairs):
    """One sample per image, with all its captions; see `EvalPairs`."""


@dataclass(frozen=True)
class _AnnotationColumns(ConvertedFiles):
    """Options of ``image_text_json``; the defaults are in its YAML."""

    image_key: str | None = option(
        doc=f"column of the image; null: the first of {', '.join(IMAGE_KEYS)}; in parquet and "
        "Arrow files the first that holds image files"
    )
    caption_key: str | None = option(
        doc=f"column of the caption; null: the first of {', '.join(CAPTION_KEYS)}"
    )
    image_id_key: str | None = option(
        doc="column of a string or an integer, equal for all rows of one image; null: image_id, if "
        "it exists"
    )


@registry.register_builder("image_text_json")
class ImageTextJsonBuilder(ConvertingBuilder):
    """Build the splits that `build_info.annotations` names, from annotation files."""

    name = "image_text_json"
    build_options = _AnnotationColumns
    train_dataset_cls = ImageTextTrain
    eval_dataset_cls = ImageTextEval
    DATASET_CONFIG_DICT = dataset_yamls("image_text_json")


@registry.register_builder("image_text_shards")
class ImageTextShardsBuilder(ConvertingBuilder):
    """Build the splits that `build_info.annotations` names, from tar shards."""

    name = "image_text_shards"
    train_dataset_cls = ImageTextTrain
    eval_dataset_cls = ImageTextEval
    DATASET_CONFIG_DICT = dataset_yamls("image_text_shards")
