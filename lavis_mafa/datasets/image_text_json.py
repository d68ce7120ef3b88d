"""`image_text_json`: a user's image-text pairs from JSON, JSON-lines, CSV, TSV or COCO files.

A dataset configuration:

    datasets:
      image_text_json:
        build_info:
          annotations:
            train: {storage: mine/train.jsonl}
            val: {storage: mine/val.json}
          images: {storage: mine/images}
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lavis.common.registry import registry
from PIL import Image

from lavis_mafa.algorithm.options import option
from lavis_mafa.datasets.arrow_table import converted
from lavis_mafa.datasets.image_reading import read_rgb
from lavis_mafa.datasets.local_builder import ConvertedFiles, ConvertingBuilder
from lavis_mafa.datasets.pairs import EvalPairs, Pairs, TrainPairs

DEFAULT_CONFIG = Path(__file__).parents[1] / "configs/datasets/image_text_json/default.yaml"


class _Files(Pairs):
    """Pairs from annotation files, whose images are files in a folder.

    Args:
        vis_root: folder that the image paths are relative to.
        ann_paths: annotation files, read as one.
        table_options: `image_key`, `caption_key`, `drop_empty`, `cache_dir` of `converted`.

    Raises:
        FileNotFoundError: if the image root or an annotation file does not exist.
        ValueError: if the annotation files have rows that cannot be used.
    """

    def __init__(
        self,
        vis_processor: Callable[[Image.Image], Any],
        text_processor: Callable[[str], str],
        vis_root: str | os.PathLike[str],
        ann_paths: Collection[str | os.PathLike[str]],
        **table_options: Any,
    ) -> None:
        self.vis_root = _require_folder(vis_root)
        super().__init__(converted(ann_paths, **table_options), vis_processor, text_processor)

    def picture(self, row: int) -> Image.Image:
        return read_rgb(os.path.join(self.vis_root, self.table.image(row)))


class ImageTextTrain(_Files, TrainPairs):
    """One sample per pair, in the order of the annotation files; see `TrainPairs`."""

    def path(self, index: int) -> str:
        """Return the path of pair `index`'s image, including the image root."""
        return os.path.join(self.vis_root, self.table.image(index))


class ImageTextEval(_Files, EvalPairs):
    """One sample per image, with all its captions; see `EvalPairs`."""

    def path(self, index: int) -> str:
        """Return the path of image `index`, including the image root."""
        return os.path.join(self.vis_root, self.image[index])


@dataclass(frozen=True)
class AnnotationColumns(ConvertedFiles):
    """Options of ``image_text_json``; the defaults are in its YAML."""

    image_key: str | None = option(
        doc="column of the image path; null: image, image_path, filename, filepath, file_name, path"
    )
    caption_key: str | None = option(
        doc="column of the caption; null: caption, text, title or captions"
    )


@registry.register_builder("image_text_json")
class ImageTextJsonBuilder(ConvertingBuilder):
    """Build the splits that `build_info.annotations` names, from annotation files."""

    name = "image_text_json"
    build_options = AnnotationColumns
    train_dataset_cls = ImageTextTrain
    eval_dataset_cls = ImageTextEval
    DATASET_CONFIG_DICT = {"default": str(DEFAULT_CONFIG)}

    def dataset_options(self, info: Any) -> dict[str, Any]:
        root = info.get(self.data_type).storage
        if not root:
            raise ValueError(
                f"image_text_json: set build_info.{self.data_type}.storage to the folder that the "
                "image paths are relative to"
            )
        return {
            "vis_root": root,
            "image_key": info.image_key,
            "caption_key": info.caption_key,
            "drop_empty": info.drop_empty,
            "cache_dir": info.cache_dir,
        }


def _require_folder(root: str | os.PathLike[str]) -> str:
    path = os.path.abspath(os.path.expanduser(root))
    if not os.path.isdir(path):
        raise FileNotFoundError(
            f"image root {path} is not a folder (looked for the folder that the image paths are "
            f"relative to; relative paths start at {os.getcwd()}). Images are not downloaded: put "
            "them there, or correct the path (build_info.images.storage)"
        )
    return path
