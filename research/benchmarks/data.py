"""Compare decoding and augmenting images with LAVIS's data set.

Both sides do the work of one worker, in this process.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from lavis.datasets.datasets.image_text_pair_datasets import ImageTextPairDataset
from lavis.processors import randaugment
from lavis.processors.blip_processors import BlipCaptionProcessor, BlipImageTrainProcessor
from PIL import Image

from lavis_mafa.datasets import TrainingSet, training_set
from lavis_mafa.datasets.image_text_json import ImageTextTrain
from research.benchmarks.harness import Row, Sizes, in_turn
from research.benchmarks.step_models import captions

BATCH, SIDE = 96, 256
PHOTOGRAPH, LARGE = (640, 480), (1600, 1200)  # pixels; COCO's are about 640 x 480


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure photographs of two sizes, and large ones with ``run.reduce_jpegs``."""
    size, repeats = (8, sizes.repeats) if sizes.quick else (BATCH, max(sizes.repeats, 7))
    note = f"{size} samples; seconds for all of them; to {SIDE} px with RandAugment"
    for width, height, reduced in ((*PHOTOGRAPH, False), (*LARGE, False), (*LARGE, True)):
        with tempfile.TemporaryDirectory() as name:
            ours, theirs = _both(_photographs(Path(name), size, width, height))
            ours.reduce_jpegs = reduced
            what = f"decode and augment {width} x {height}{', reduced JPEGs' if reduced else ''}"
            actions = {
                "ours": partial(_read_as_worker, ours, count()),
                "theirs": partial(_read_by_lavis, theirs),
            }
            yield Row.of(f"{what} / LAVIS", note, *in_turn(actions, repeats).values())


def _both(folder: Path) -> tuple[TrainingSet, ImageTextPairDataset]:
    """Return the same pairs as a training set of this package and as one of LAVIS."""

    def data(cls: Any, **options: Any) -> Any:
        image, caption = BlipImageTrainProcessor(image_size=SIDE), BlipCaptionProcessor()
        return cls(image, caption, str(folder), [str(folder / "pairs.json")], **options)

    ours = TrainingSet(data(ImageTextTrain, cache_dir=str(folder / "cache")))
    ours.send_bytes()
    return ours, data(ImageTextPairDataset)


def _read_as_worker(samples: TrainingSet, epochs: Iterator[int]) -> list[dict[str, Any]]:
    """Read all samples of the next epoch as a worker does."""
    epoch = next(epochs)
    # Outside a worker, the data set would also save and restore the process's random generators.
    with patch.object(training_set, "get_worker_info", return_value=samples):
        return [samples[index, epoch] for index in range(len(samples))]


def _read_by_lavis(samples: ImageTextPairDataset) -> list[dict[str, Any]]:
    with _augmentation_of_lavis():
        return [samples[index] for index in range(len(samples))]


@contextmanager
def _augmentation_of_lavis() -> Iterator[None]:
    """Use LAVIS's original AutoContrast in place of this package's corrected one."""
    ours = randaugment.func_dict["AutoContrast"]
    randaugment.func_dict["AutoContrast"] = randaugment.autocontrast_func
    try:
        with np.errstate(over="ignore"):
            yield
    finally:
        randaugment.func_dict["AutoContrast"] = ours


def _photographs(folder: Path, size: int, width: int, height: int) -> Path:
    """Write JPEGs that are about as slow to decode as photographs, with captions."""
    rng, texts = np.random.default_rng(0), captions(size)
    pairs = []
    for number in range(size):
        picture = np.zeros((height, width, 3))
        for cells, strength in ((4, 90), (16, 50), (64, 25)):
            noise = rng.integers(0, 256, (cells * 3 // 4, cells, 3), dtype=np.uint8)
            smooth = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
            picture += strength * (np.asarray(smooth) / 255.0 - 0.5)
        picture += 128 + rng.normal(0, 5, picture.shape)
        name = f"{number}.jpg"
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(folder / name, quality=90)
        pairs.append({"image": name, "caption": texts[number], "image_id": name})
    (folder / "pairs.json").write_text(json.dumps(pairs))
    return folder
