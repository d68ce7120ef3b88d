"""The toy world as LAVIS data sets: `toy_scenes`, and the cache of its pictures."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import BaseDatasetBuilder
from lavis.datasets.datasets.base_dataset import BaseDataset
from omegaconf import OmegaConf
from PIL import Image

from lavis_mafa.algorithm.options import option
from lavis_mafa.io.cache import cache_root
from lavis_mafa.io.files import atomic_write
from lavis_mafa.io.processes import on_main_process
from lavis_mafa.io.project_files import CONFIGS
from lavis_mafa.toyworld.render import render
from lavis_mafa.toyworld.world import (
    PRESETS,
    WorldConfig,
    make_captions,
    make_scenes,
    valid,
    valid_matrix,
)

Arrays = dict[str, npt.NDArray[Any]]
Processor = Callable[[Any], Any]

# BLIP's normalisation, as in LAVIS's image processors.
IMAGE_MEAN = np.array((0.48145466, 0.4578275, 0.40821073), dtype=np.float32)
IMAGE_STD = np.array((0.26862954, 0.26130258, 0.27577711), dtype=np.float32)

SPLITS = ("train", "val", "test")
DETAILED = "test_detailed"  # the images of `test` with captions that mention everything
FORMAT_VERSION = 1  # part of the cache key: increment it when the data of a seed change
# Least value and default of the whole numbers that determine the data of a world.
_DATA_KEYS = {
    "seed": (0, 0),
    "train_size": (1, 4000),
    "val_size": (1, 200),
    "test_size": (1, 500),
    "captions_per_image": (1, 1),
    "train_topics": (0, 0),
    "test_topics": (0, 0),
}


class _ToyPictures(BaseDataset):  # type: ignore[misc]
    """The pictures of one split with captions, in memory.

    Image k shows `scenes[k]`; caption i describes image `image_ids[i]`. Without a processor, an
    image is returned as a float tensor normalised by BLIP's mean and standard deviation, and a text
    unchanged.

    Args:
        arrays: images uint8 (n_images, H, W, 3), scenes (n_images,), captions (n_captions,), texts
            str (n_captions,), image_ids int64 (n_captions,).
        name: of the split; part of the image names.
    """

    def __init__(
        self,
        arrays: Arrays,
        world: WorldConfig,
        vis_processor: Processor | None = None,
        text_processor: Processor | None = None,
        name: str = "test",
    ) -> None:
        super().__init__(vis_processor, text_processor)
        self.world = world
        self.images = arrays["images"]
        self.scenes = arrays["scenes"]
        self.captions = arrays["captions"]
        self.texts: list[str] = arrays["texts"].tolist()
        self.image_ids: npt.NDArray[np.int64] = arrays["image_ids"].astype(np.int64)
        self.image_names = [f"{name}/{i:06d}.png" for i in range(len(self.images))]

    @property
    def deterministic(self) -> bool:
        """Return whether a sample is deterministic; a vis_processor is assumed to be random."""
        return self.vis_processor is None

    def picture(self, image: int) -> Image.Image:
        """Return the unprocessed picture of an image."""
        return Image.fromarray(self.images[image])

    def image_input(self, image: int) -> Any:
        """Return an image as the model's input."""
        if self.vis_processor is not None:
            return self.vis_processor(self.picture(image))
        scaled = (self.images[image].astype(np.float32) / 255 - IMAGE_MEAN) / IMAGE_STD
        return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))

    def text_input(self, text: str) -> str:
        """Return a text as the model's input."""
        return text if self.text_processor is None else self.text_processor(text)


class _ToyScenesTrain(_ToyPictures):
    """Pairs of an image and a caption, for training.

    Items: `image` (float tensor (3, H, W), unless a vis_processor returns something else),
    `text_input` (str), `image_id` (int; equal for all captions of an image).
    """

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = int(self.image_ids[index])
        text = self.text_input(self.texts[index])
        return {"image": self.image_input(image), "text_input": text, "image_id": image}

    def truth(self, image_of: npt.ArrayLike, text_of: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return whether the caption of sample `text_of[k]` fits the image of sample `image_of[k]`.

        Both are sample indices; their shapes broadcast to the shape of the result.
        """
        images, texts = (np.asarray(one, np.int64) for one in (image_of, text_of))
        return valid(self.captions[texts], self.scenes[self.image_ids[images]])

    def source(self, index: int) -> tuple[None, str]:
        """Return the file of a sample's picture, which has none, and its unprocessed caption."""
        return None, self.texts[index]

    def show(self, index: int) -> tuple[Image.Image, str]:
        """Return the unprocessed picture and caption of a sample, for reports."""
        return self.picture(int(self.image_ids[index])), self.texts[index]


class ToyScenesEval(_ToyPictures):
    """Images with captions for retrieval, as LAVIS's `RetrievalEvalDataset`.

    `text` and `image` list captions and image names, `txt2img` and `img2txt` map their positions.
    Items: `image`, `index` (int), one for each image.
    """

    def __init__(self, arrays: Arrays, world: WorldConfig, **options: Any) -> None:
        super().__init__(arrays, world, **options)
        self.text = [self.text_input(text) for text in self.texts]
        self.image = self.image_names
        self.txt2img: dict[int, int] = dict(enumerate(self.image_ids.tolist()))
        self.img2txt: dict[int, list[int]] = {i: [] for i in range(len(self.images))}
        for text, image in self.txt2img.items():
            self.img2txt[image].append(text)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.image_input(index), "index": index}

    def truth_matrix(self) -> npt.NDArray[np.bool_]:
        """Return which captions are valid for which images: bool (n_images, n_texts)."""
        return valid_matrix(self.scenes, self.captions)


@dataclass(frozen=True)
class _ToyOptions:
    """Options of toy builders with a range; the defaults are in their YAMLs."""

    preset: str | None = option(
        doc="dense: many false negatives; sparse: few; clustered: few between random pairs, many "
        "between similar ones",
        choices=tuple(PRESETS),
    )
    cache_dir: str | None = option(
        doc="folder of generated data; null: $LAVIS_MAFA_CACHE, else ~/.cache/lavis_mafa"
    )


@registry.register_builder("toy_scenes")
class ToyScenesBuilder(BaseDatasetBuilder):  # type: ignore[misc]
    """Build `train` (_ToyScenesTrain), `val` and `test` (ToyScenesEval) of one world.

    Attributes:
        splits: names that a run may evaluate; `DETAILED` is there in a world with topics.
    """

    train_dataset_cls = _ToyScenesTrain
    eval_dataset_cls = ToyScenesEval
    build_options = _ToyOptions
    splits = (*SPLITS, DETAILED)
    DATASET_CONFIG_DICT = {
        "default": str(CONFIGS / "datasets/toy_scenes/clustered.yaml"),
        **{name: str(CONFIGS / f"datasets/toy_scenes/{name}.yaml") for name in sorted(PRESETS)},
    }

    def build_datasets(self) -> dict[str, BaseDataset]:
        """Generate or load the data; under torch.distributed rank 0 does so first.

        Raises:
            ValueError: for values out of range in `build_info`.
        """
        info: Any = OmegaConf.to_container(self.config.build_info, resolve=True)
        world, data = _read_build_info(info)
        kind = self.config.get("type", "default")
        if kind in PRESETS and kind != info.get("preset", kind):
            logging.warning(
                "toy_scenes: type is %s but build_info.preset is %s; the preset is used",
                kind,
                info["preset"],
            )
        directory = cache_root(info.get("cache_dir")) / "toy_scenes"

        splits = on_main_process(lambda: _load_or_make(world, data, directory))
        splits = splits or _load_or_make(world, data, directory)

        self.build_processors()
        datasets = {}
        for name, arrays in splits.items():
            mode = "train" if name == "train" else "eval"
            dataset_cls: Any = getattr(self, f"{mode}_dataset_cls")
            datasets[name] = dataset_cls(arrays, world, **self._processors(mode), name=name)
        return datasets

    def _processors(self, mode: str) -> dict[str, Processor | None]:
        """Return the configured processors; None for one that is not configured, because LAVIS's
        default passes its input through and would not turn an image into a tensor."""
        return {
            key: getattr(self, f"{key}s")[mode] if self.config.get(key) is not None else None
            for key in ("vis_processor", "text_processor")
        }


def _read_build_info(info: Mapping[str, Any]) -> tuple[WorldConfig, dict[str, int]]:
    """Return the world of a `build_info`, and its seed and sizes; null means the default.

    Returns:
        The world and the numbers of `_DATA_KEYS`.

    Raises:
        ValueError: for values out of range.
    """
    world_keys = [field.name for field in dataclasses.fields(WorldConfig)]
    problems, data = [], {}
    for key, (lowest, default) in _DATA_KEYS.items():
        try:
            data[key] = _whole_number(key, info.get(key), default, lowest)
        except ValueError as error:
            problems.append(str(error))
    changes = {key: info[key] for key in world_keys if info.get(key) is not None}
    try:
        world = WorldConfig.preset(info.get("preset") or "dense", **changes)
    except ValueError as error:
        raise ValueError("; ".join([*problems, str(error)])) from error
    for key in ("train_topics", "test_topics"):
        if data.get(key, 0) > world.topics:
            remedy = "" if world.topics else ": set it to 0, or select this world by type"
            problems.append(
                f"{key} is {data[key]}, expected at most the world's topics, {world.topics}{remedy}"
            )
    if problems:
        raise ValueError("toy_scenes build_info: " + "; ".join(problems))
    return world, data


def _whole_number(key: str, value: Any, default: int, lowest: int) -> int:
    """Return a key's value, or its default for None.

    Raises:
        ValueError: if it is not a whole number from `lowest` up.
    """
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ValueError(f"{key} is {value!r}, expected a whole number from {lowest} up")
    return int(value)


def _make_world(world: WorldConfig, data: Mapping[str, int]) -> dict[str, Arrays]:
    """Generate all splits from the seed; `data` as returned by `_read_build_info`.

    The training split has `train_size` pairs (its last image may have fewer captions than the
    others); the other splits have that many images with all their captions. Splits, captions and
    pixels have separate random streams, so that a change to one does not affect the others.

    In a world with topics, the training images show the first ``train_topics`` of them and those of
    the other splits the last ``test_topics`` (0: all), so that both can be kept apart. Such a world
    has the split `DETAILED`, too.
    """
    per_image = data["captions_per_image"]
    last = range(world.topics - data["test_topics"], world.topics)
    topics = {"train": range(data["train_topics"]), "val": last, "test": last}
    splits = {}
    for number, name in enumerate(SPLITS):
        size = data[f"{name}_size"]
        pairs = size if name == "train" else size * per_image
        image_ids = np.arange(pairs, dtype=np.int64) // per_image
        streams = [np.random.default_rng([data["seed"], number, stream]) for stream in range(3)]
        scenes = make_scenes(world, int(image_ids[-1]) + 1, streams[0], topics[name] or None)
        captions, texts = make_captions(world, scenes[image_ids], streams[1])
        splits[name] = {
            "images": render(world, scenes, streams[2]),
            "scenes": scenes,
            "captions": captions,
            "texts": np.array(texts),
            "image_ids": image_ids,
        }
    if world.topics:
        test, rng = splits["test"], np.random.default_rng([data["seed"], SPLITS.index("test"), 3])
        scenes = test["scenes"][test["image_ids"]]
        captions, texts = make_captions(world.detailed(), scenes, rng)
        splits[DETAILED] = {**test, "captions": captions, "texts": np.array(texts)}
    return splits


def _cache_path(world: WorldConfig, data: Mapping[str, int], directory: Path) -> Path:
    """Return the file for these data; its name is a hash of everything that determines them."""
    numbers = {name: float(value) for name, value in dataclasses.asdict(world).items()}
    parameters = {"format": FORMAT_VERSION, "world": numbers, "data": dict(data)}
    key = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:16]
    return directory / f"{key}.npz"


def _load_or_make(
    world: WorldConfig, data: Mapping[str, int], directory: Path
) -> dict[str, Arrays]:
    """Return the splits from the cache, or generate and cache them.

    A damaged file is replaced. If the cache cannot be written, the data are generated at every
    start, which takes seconds.
    """
    path = _cache_path(world, data, directory)
    try:
        return _load(path)
    except FileNotFoundError:
        logging.info("toy_scenes: generating the data (%s)", path)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logging.warning("toy_scenes: %s cannot be read (%s); generating it again", path, error)
    splits = _make_world(world, data)
    try:
        _save(path, splits)
    except OSError as error:
        logging.warning("toy_scenes: data not cached, %s cannot be written (%s)", path, error)
    return splits


def _load(path: Path) -> dict[str, Arrays]:
    keys = ("images", "scenes", "captions", "texts", "image_ids")
    with np.load(path, allow_pickle=False) as stored:
        splits = dict.fromkeys(name.partition(".")[0] for name in stored.files)
        return {split: {key: stored[f"{split}.{key}"] for key in keys} for split in splits}


def _save(path: Path, splits: Mapping[str, Arrays]) -> None:
    named: dict[str, Any] = {
        f"{split}.{key}": array for split in splits for key, array in splits[split].items()
    }
    with atomic_write(path) as file:
        np.savez(file, **named)
