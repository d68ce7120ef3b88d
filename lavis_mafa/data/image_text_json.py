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

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lavis.common.registry import registry
from torch.utils.data import Dataset

from lavis_mafa.algorithm.options import option
from lavis_mafa.data.annotation_rows import CAPTION_KEYS, IMAGE_KEYS
from lavis_mafa.data.caption_truth import SAME_CAPTION, truth_reader
from lavis_mafa.data.data_folders import files_named
from lavis_mafa.data.feature_folder import FeatureFolder
from lavis_mafa.data.local_files import LocalBuilder, named_splits
from lavis_mafa.data.pair_conversion import CONTENT, FILE, Holdout
from lavis_mafa.data.pairs import EvalPairs, TrainPairs
from lavis_mafa.io.processes import on_main_process
from lavis_mafa.io.project_files import dataset_yamls


@dataclass(frozen=True)
class _ShardOptions:
    """Options of ``image_text_shards``; the defaults are in its YAML."""

    cache_dir: str | None = option(
        doc="folder of converted data; null: $LAVIS_MAFA_CACHE, else ~/.cache/lavis_mafa"
    )
    truth: str | None = option(
        doc="further valid pairs; same_caption: an image with every caption "
        "that has the text of one of its own; a file: also those it lists, as run.truth_file does",
        path="file",
        words=(SAME_CAPTION,),
    )
    identity: str = option(
        doc="how images of samples without an image id are compared: by file, or by content "
        "(equal bytes; reads every picture once)",
        choices=(FILE, CONTENT),
    )
    group_id_key: str | None = option(
        doc="training split: column, in shards key in .json, of a string or an integer, equal for "
        "samples that are never negatives of each other (same product, patient or query); missing "
        "or empty: in no group; null: no groups; see model.mafa.same_group",
    )
    max_unusable: float = option(
        doc="permitted share of records that cannot be used, such as a sample without a caption: "
        "they are left out and listed in the log; if there are more, the data are refused",
        low=0,
        high=1,
    )
    holdout: float = option(
        doc="share of the images, chosen by identity, that are in val and not in train, if both "
        "have the same files; 0: no split",
        low=0,
        high=0.5,
    )
    subset: float | None = option(
        doc="training split: share of its pairs to train on, or from 2 on their number, drawn at "
        "random by subset_seed, for scaling curves; null: all",
        source="MAFA Fig. 6",
        low=0,
        above=True,
    )
    subset_seed: int = option(doc="draws the subset; ${run.seed}: another in every run", low=0)


@dataclass(frozen=True)
class _FileOptions(_ShardOptions):
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


@registry.register_builder("image_text_shards")
class ImageTextShardsBuilder(LocalBuilder):
    """Build the splits that `build_info.annotations` names, from tar shards."""

    name = "image_text_shards"
    build_options: type[_ShardOptions] = _ShardOptions
    train_dataset_cls = TrainPairs
    eval_dataset_cls = EvalPairs
    DATASET_CONFIG_DICT = dataset_yamls("image_text_shards")

    # Expands a glob, for the check of the config.
    files_named = staticmethod(files_named)

    @classmethod
    def _keys(cls, info: Any, split: str) -> dict[str, Any]:
        """Return the names of the columns of a split. Groups are of no use but to training, and the
        files of other splits need not have that column."""
        names = [field.name for field in fields(cls.build_options) if field.name.endswith("_key")]
        used = [name for name in names if split == "train" or name != "group_id_key"]
        return {name: info.get(name) for name in used}

    def build_datasets(self) -> dict[str, Dataset[Any]]:
        """Return {split: data set}; under torch.distributed rank 0 converts while the others wait.

        Raises:
            FileNotFoundError, ValueError: see the data sets. On other ranks a failure of rank 0 is
                a RuntimeError with its message, so that no rank waits forever.
        """
        datasets = on_main_process(self._build)
        return self._build() if datasets is None else datasets

    def _build(self) -> dict[str, Dataset[Any]]:
        """Build the splits in this process."""
        info = self.config.build_info
        annotations = named_splits(self.name, info.annotations)
        make_truth = truth_reader(info.truth)
        folder = (info.get("features") or {}).get("storage")
        features = FeatureFolder(folder) if folder else None
        self.build_processors()
        datasets: dict[str, Dataset[Any]] = {}
        for split, files in annotations.items():
            storage = files.get("storage")
            if not storage:
                raise ValueError(
                    f"{self.name}: build_info.annotations.{split}.storage: expected a file or a "
                    "list of them, got nothing"
                )
            kind = "train" if split == "train" else "eval"
            dataset_cls = self.train_dataset_cls if split == "train" else self.eval_dataset_cls
            subset = info["subset"] if split == "train" else None
            dataset = dataset_cls(
                vis_processor=self.vis_processors[kind],
                text_processor=self.text_processors[kind],
                vis_root=(info.get("images") or {}).get("storage"),
                ann_paths=[storage] if isinstance(storage, str) else list(storage),
                holdout=_holdout_of(info, split),
                subset=subset and (subset, info["subset_seed"]),
                **{name: info[name] for name in ("identity", "max_unusable", "cache_dir")},
                **self._keys(info, split),
            )
            if features is None:
                dataset.require_pictures()
            else:
                dataset.use_features(features, draw=split == "train")
            if make_truth is not None:
                dataset.know(make_truth(dataset.table))
            datasets[split] = dataset
        return datasets


@registry.register_builder("image_text_json")
class ImageTextJsonBuilder(ImageTextShardsBuilder):
    """Build the splits that `build_info.annotations` names, from annotation files."""

    name = "image_text_json"
    build_options = _FileOptions
    DATASET_CONFIG_DICT = dataset_yamls("image_text_json")


def _holdout_of(info: Mapping[str, Any], split: str) -> Holdout:
    """Return which images of its files a split has; None for all.

    Raises:
        ValueError: if train and val have different files, of which each would lose images.
    """
    share = float(info["holdout"])
    if not share or split not in ("train", "val"):
        return None
    named = [one["storage"] for key in ("train", "val") if (one := info["annotations"].get(key))]
    files = {str([one] if isinstance(one, str) else list(one)) for one in named}
    if len(files) > 1:
        raise ValueError(
            f"build_info.holdout is {share:g}, and train and val have different files "
            f"({' and '.join(sorted(files))}); give both the same files, or set holdout: 0 "
            "if none of their images are the same"
        )
    return share, split == "val"
