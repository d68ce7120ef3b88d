"""`image_text_json`: one's own image-text pairs, from JSON, JSON-lines, CSV, TSV or COCO files.

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
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from lavis.common.dist_utils import is_dist_avail_and_initialized, is_main_process
from lavis.common.registry import registry
from PIL import Image
from torch.utils.data import Dataset
from torch.utils.data.dataloader import default_collate

from lavis_mafa.datasets.arrow_table import PairTable, converted, describe_conflict
from lavis_mafa.datasets.image_reading import read_rgb
from lavis_mafa.datasets.local_builder import LocalBuilder, named_splits

DEFAULT_CONFIG = Path(__file__).parents[1] / "configs/datasets/image_text_json/default.yaml"


class _ImageText(Dataset):
    """What both splits share: the converted table, the image root and the processors.

    Args:
        vis_processor: PIL image (RGB) -> tensor.
        text_processor: caption -> caption.
        vis_root: folder that the image paths are relative to.
        ann_paths: annotation files, read as one.
        table_options: `image_key`, `caption_key`, `drop_empty`, `cache_dir` of `converted`.

    Raises:
        FileNotFoundError: no such image root or annotation file.
        ValueError: the annotation files have rows that cannot be used.
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
        self.table: PairTable = converted(ann_paths, **table_options)
        self.set_processors(vis_processor, text_processor)

    def set_processors(
        self,
        vis_processor: Callable[[Image.Image], Any],
        text_processor: Callable[[str], str],
    ) -> None:
        self.vis_processor = vis_processor
        self.text_processor = text_processor

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return default_collate(samples)


class ImageTextTrain(_ImageText):
    """One sample a pair, in the order of the annotation files.

    An item is `{"image": tensor, "text_input": str, "image_id": int}`; pairs with the same
    `image_id` show the same image. An unreadable image raises OSError naming its path.
    """

    # The random augmentation makes two readings of a sample differ.
    deterministic = False

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "image": self.vis_processor(read_rgb(self.path(index))),
            "text_input": self.text_processor(self.table.caption(index)),
            "image_id": int(self.image_ids[index]),
        }

    @property
    def image_ids(self) -> np.ndarray:
        """(N,) int64, memory-mapped: dense number 0..n_images-1 of each pair's image."""
        return self.table.image_ids

    def path(self, index: int) -> str:
        """Path of the image of pair `index`, joined to the image root."""
        return os.path.join(self.vis_root, self.table.image(index))

    def show(self, index: int) -> tuple[Image.Image, str]:
        """The unprocessed image (RGB) and caption of pair `index`."""
        return read_rgb(self.path(index)), self.table.caption(index)


class ImageTextEval(_ImageText):
    """One sample an image, with all its captions: the contract of LAVIS's RetrievalEvalDataset.

    Attributes:
        text: processed captions, image by image.
        image: image paths as in the annotation files, in order of first appearance.
        txt2img: number of a caption -> number of its image.
        img2txt: number of an image -> numbers of its captions.

    An item is `{"image": tensor, "index": int}`.

    Raises:
        ValueError: also if one `image_id` stands for several files: their captions would be
            scored against the first of them.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.table.meta["id_conflicts"]:
            raise ValueError(
                f"{', '.join(self.table.meta['sources'])}: {describe_conflict(self.table)}; give "
                "each file an image_id of its own, or leave image_id out"
            )
        self.text: list[str] = []
        self.image: list[str] = []
        self.txt2img: dict[int, int] = {}
        self.img2txt: dict[int, list[int]] = {}
        image_ids = np.asarray(self.table.image_ids)
        for row in np.argsort(image_ids, kind="stable").tolist():
            image = int(image_ids[row])
            if image == len(self.image):
                self.image.append(self.table.image(row))
                self.img2txt[image] = []
            self.img2txt[image].append(len(self.text))
            self.txt2img[len(self.text)] = image
            self.text.append(self.text_processor(self.table.caption(row)))

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.vis_processor(self.show_image(index)), "index": index}

    def path(self, index: int) -> str:
        """Path of image `index`, joined to the image root."""
        return os.path.join(self.vis_root, self.image[index])

    def show_image(self, index: int) -> Image.Image:
        """The unprocessed image `index` (RGB)."""
        return read_rgb(self.path(index))


@registry.register_builder("image_text_json")
class ImageTextJsonBuilder(LocalBuilder):
    """Builds the splits that `build_info.annotations` names; what the configuration leaves out
    comes from the default one."""

    train_dataset_cls = ImageTextTrain
    eval_dataset_cls = ImageTextEval
    DATASET_CONFIG_DICT = {"default": str(DEFAULT_CONFIG)}

    def build_datasets(self) -> dict[str, Dataset]:
        """{split: dataset}. Under torch.distributed rank 0 converts while the others wait.

        Raises:
            FileNotFoundError, ValueError: see the datasets. On ranks other than 0 a failure of
                rank 0 is a RuntimeError with its message, so that no rank waits for ever.
        """
        if not is_dist_avail_and_initialized():
            return self.build()
        datasets, failure = None, None
        if is_main_process():
            try:
                datasets = self.build()
            except Exception as error:
                failure = error
        message = [None if failure is None else f"{type(failure).__name__}: {failure}"]
        dist.broadcast_object_list(message, src=0)
        if failure is not None:
            raise failure
        if message[0] is not None:
            raise RuntimeError(f"rank 0 could not build image_text_json: {message[0]}")
        return self.build() if datasets is None else datasets

    def build(self) -> dict[str, Dataset]:
        """Build the splits in this process."""
        info = self.config.build_info
        annotations = named_splits("image_text_json", info.annotations)
        root = info.get(self.data_type).storage
        if not root:
            raise ValueError(
                f"image_text_json: set build_info.{self.data_type}.storage to the folder that the "
                "image paths are relative to"
            )
        self.build_processors()
        datasets: dict[str, Dataset] = {}
        for split, files in annotations.items():
            storage = files.get("storage")
            if not storage:
                raise ValueError(
                    f"image_text_json: build_info.annotations.{split}.storage: expected an "
                    "annotation file or a list of them, got nothing"
                )
            kind = "train" if split == "train" else "eval"
            dataset_cls = self.train_dataset_cls if split == "train" else self.eval_dataset_cls
            datasets[split] = dataset_cls(
                vis_processor=self.vis_processors[kind],
                text_processor=self.text_processors[kind],
                vis_root=root,
                ann_paths=[storage] if isinstance(storage, str) else list(storage),
                image_key=info.image_key,
                caption_key=info.caption_key,
                drop_empty=info.drop_empty,
                cache_dir=info.cache_dir,
            )
        return datasets


def _require_folder(root: str | os.PathLike[str]) -> str:
    path = os.path.abspath(os.path.expanduser(root))
    if not os.path.isdir(path):
        raise FileNotFoundError(
            f"image root {path} is not a folder (looked for the folder that the image paths are "
            f"relative to; relative paths start at {os.getcwd()}). Images are not downloaded: put "
            "them there or correct the path (build_info.images.storage)"
        )
    return path
