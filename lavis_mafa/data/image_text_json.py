"""`image_text_json`: a user's image-text pairs from JSON, JSON-lines, CSV, TSV, COCO, parquet or
Arrow files, or from a folder of Hugging Face's ``datasets``.

A dataset configuration:

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
from lavis_mafa.data.data_folders import files_named
from lavis_mafa.data.local_builder import (
    ConvertedFiles,
    ConvertingBuilder,
    group_id_option,
)
from lavis_mafa.data.pair_conversion import converted
from lavis_mafa.data.pairs import EvalPairs, Pairs, TrainPairs
from lavis_mafa.io.project_files import dataset_yamls

_LOOKED_FOR = 50  # images, spread over the data


class _Files(Pairs):
    """Pairs from annotation files, whose images are files in a folder, or inside those files.

    Args:
        vis_root: folder that the image paths are relative to; None if there are no paths.
        ann_paths: annotation files, globs and folders, read as one.
        table_options: `image_key`, `caption_key`, `image_id_key`, `group_id_key`, `drop_empty`,
            `cache_dir` of `converted`.

    Raises:
        FileNotFoundError: if the image root or an annotation file does not exist.
        ValueError: if the annotation files have rows that cannot be used.
    """

    images_by_content = True

    def __init__(
        self,
        vis_processor: Callable[[Image.Image], Any],
        text_processor: Callable[[str], str],
        vis_root: str | os.PathLike[str] | None,
        ann_paths: Collection[str | os.PathLike[str]],
        **table_options: Any,
    ) -> None:
        root = None if vis_root is None else os.path.abspath(os.path.expanduser(vis_root))
        table = converted(ann_paths, **table_options)
        super().__init__(table, vis_processor, text_processor, root)

    def require_pictures(self) -> None:
        meta = self.table.meta
        if not meta["with_paths"]:
            return
        error: type[Exception] = ValueError
        where, step = "", -(-len(self.table) // _LOOKED_FOR)
        if self.vis_root is not None:
            paths = [self._path_of(row) for row in range(0, len(self.table), step)]
            if any(path is None or os.path.isfile(path) for path in paths):
                return
            error, where = FileNotFoundError, f"none of {len(paths)} is in root {self.vis_root}; "
        raise error(
            f"{', '.join(meta['sources'])}: {meta['with_paths']} pairs give the path of their "
            f"image, such as {meta['first_path']!r}; {where}set build_info.images.storage (train "
            "--images) to the folder that the paths are relative to"
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
    group_id_key: str | None = group_id_option("column of the training split")


@registry.register_builder("image_text_json")
class ImageTextJsonBuilder(ConvertingBuilder):
    """Build the splits that `build_info.annotations` names, from annotation files."""

    name = "image_text_json"
    build_options = _AnnotationColumns
    train_dataset_cls = ImageTextTrain
    eval_dataset_cls = ImageTextEval
    DATASET_CONFIG_DICT = dataset_yamls("image_text_json")

    # Expands a glob, for the check of the config.
    files_named = staticmethod(files_named)

    def dataset_options(self, info: Any, split: str) -> dict[str, Any]:
        root = info.get(self.data_type).storage or None
        return {"vis_root": root, **super().dataset_options(info, split)}
