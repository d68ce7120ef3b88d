"""Compare tokenising, decoding and augmentation with LAVIS's data set and tokenizer.

Both sides do the work of one worker, in this process.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from lavis.datasets.datasets.image_text_pair_datasets import ImageTextPairDataset
from lavis.processors import randaugment
from lavis.processors.blip_processors import BlipCaptionProcessor, BlipImageTrainProcessor
from PIL import Image
from transformers import BertTokenizer

from lavis_mafa.algorithm.tokens import TOKENS, Tokenizer
from lavis_mafa.datasets import TrainingSet, training_set
from lavis_mafa.datasets.image_text_json import ImageTextTrain
from lavis_mafa.io.checkpoints import find_config
from lavis_mafa.models.parts.tokenizers import build_tokenizer
from lavis_mafa.runners.loaders import to_device
from research.benchmarks.harness import Row, Sizes, side_by_side
from research.benchmarks.step_models import captions

VOCABULARY, MAX_LENGTH, BATCH, SIDE = "tiny_vocab.txt", 30, 96, 256
LARGE = 1600, 1200  # pixels of a large photograph
PHOTOGRAPHS = os.environ.get("LAVIS_MAFA_PHOTOGRAPHS")
TARGET = "<= 0.40"


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure loading captions, images and both, for photographs of several sizes; COCO's are about
    640 x 480. Large ones are also read with ``run.reduce_jpegs``.

    The environment's ``LAVIS_MAFA_PHOTOGRAPHS`` may name a folder with ``train.json`` in the format
    of LAVIS's annotation files and its images.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, size = Path(name), 8 if sizes.quick else BATCH
        kinds = {f"{w} x {h}": generated(folder, size, w, h) for w, h in ((640, 480), LARGE)}
        if PHOTOGRAPHS:
            kinds["small photographs"] = photographs(Path(PHOTOGRAPHS), folder, size)
        for kind, (root, annotations) in kinds.items():
            sides = Sides(root, annotations, folder)
            repeats = sizes.repeats if sizes.quick else max(sizes.repeats, 7)
            yield from sides.rows(repeats, kind)
            if kind == "{} x {}".format(*LARGE):
                sides.ours.reduce_jpegs = True
                yield sides.images(repeats, f"{kind}, reduced JPEGs")


class Sides:
    """The same pairs as a training set of this package and as one of LAVIS.

    Args:
        root: folder of the images.
        annotations: LAVIS's annotation file.
        folder: for converted files of this package.
    """

    def __init__(self, root: Path, annotations: Path, folder: Path) -> None:
        def data(cls: Any, **options: Any) -> Any:
            image, caption = BlipImageTrainProcessor(image_size=SIDE), BlipCaptionProcessor()
            return cls(image, caption, str(root), [str(annotations)], **options)

        self.theirs = data(ImageTextPairDataset)
        self.ours = TrainingSet(data(ImageTextTrain, cache_dir=str(folder / "cache")))
        self.slow = BertTokenizer(find_config(VOCABULARY), do_lower_case=True)
        self.fast = Tokenizer(build_tokenizer(VOCABULARY), MAX_LENGTH)
        self.ours.add_tokens(TOKENS, self.fast)
        self.ours.send_bytes()
        self.captions = [self.theirs[index]["text_input"] for index in range(len(self.theirs))]
        self.epochs = count()

    def rows(self, repeats: int, kind: str) -> Iterator[Row]:
        """Yield three rows; times are of all samples."""
        size = len(self.captions)
        note = f"{size} samples, {VOCABULARY}; seconds for all of them"
        yield side_by_side(
            lambda: self.fast(self.captions), lambda: self.tokenised(self.captions), repeats
        ).row(f"tokenise {size} captions / LAVIS in forward", TARGET, note)
        yield self.images(repeats, kind)
        yield side_by_side(self.batch, self.batch_of_lavis, repeats).row(
            f"both and collate, {kind} / LAVIS",
            TARGET,
            f"{note}; ours normalises the whole mini-batch, on a GPU if there is one",
        )

    def images(self, repeats: int, kind: str) -> Row:
        """Return the row of decoding and augmenting, as a worker does."""
        return side_by_side(self.read, self.read_by_lavis, repeats).row(
            f"decode and augment {kind} / LAVIS",
            TARGET,
            f"{len(self.captions)} samples; seconds for all of them; to {SIDE} px with RandAugment",
        )

    def batch(self) -> dict[str, Any]:
        """Read and collate all samples as a run does."""
        return to_device(self.ours.collater(self.read()), torch.device("cpu"))

    def read(self) -> list[dict[str, Any]]:
        """Read all samples of this package's data set, with new augmentations each time."""
        return read_as_worker(self.ours, next(self.epochs))

    def read_by_lavis(self) -> list[dict[str, Any]]:
        """Read all samples of LAVIS's data set."""
        with augmentation_of_lavis():
            return [self.theirs[index] for index in range(len(self.captions))]

    def batch_of_lavis(self) -> dict[str, Any]:
        """Collate LAVIS's samples and tokenise them as its model does in ``forward``."""
        batch = self.theirs.collater(self.read_by_lavis())
        return {**batch, TOKENS: self.tokenised(batch["text_input"])}

    def tokenised(self, captions: list[str]) -> Any:
        """Tokenise as ``albef_pretrain`` does."""
        return self.slow(
            captions,
            padding="max_length",
            truncation=True,
            max_length=MAX_LENGTH,
            return_tensors="pt",
        )


def read_as_worker(samples: TrainingSet, epoch: int) -> list[dict[str, Any]]:
    """Read all samples of an epoch as a worker does."""
    # Outside a worker, the data set would also save and restore the process's random generators.
    with patch.object(training_set, "get_worker_info", return_value=samples):
        return [samples[index, epoch] for index in range(len(samples))]


@contextmanager
def augmentation_of_lavis() -> Iterator[None]:
    """Use LAVIS's original AutoContrast in place of this package's corrected one."""
    ours = randaugment.func_dict["AutoContrast"]
    randaugment.func_dict["AutoContrast"] = randaugment.autocontrast_func
    try:
        with np.errstate(over="ignore"):
            yield
    finally:
        randaugment.func_dict["AutoContrast"] = ours


def generated(folder: Path, size: int, width: int, height: int) -> tuple[Path, Path]:
    """Write JPEGs that are about as slow to decode as photographs, with captions."""
    rng, texts = np.random.default_rng(0), captions(size)
    found = []
    for number in range(size):
        picture = np.zeros((height, width, 3))
        for cells, strength in ((4, 90), (16, 50), (64, 25)):
            noise = rng.integers(0, 256, (cells * 3 // 4, cells, 3), dtype=np.uint8)
            smooth = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
            picture += strength * (np.asarray(smooth) / 255.0 - 0.5)
        picture += 128 + rng.normal(0, 5, picture.shape)
        name = f"{width}_{number}.jpg"
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(folder / name, quality=90)
        found.append({"image": name, "caption": texts[number], "image_id": name})
    return folder, _written(folder / f"generated_{width}.json", found)


def photographs(root: Path, folder: Path, size: int) -> tuple[Path, Path]:
    """Select the first photographs of ``root``, with one caption each."""
    found: dict[str, Any] = {}
    for pair in json.loads((root / "train.json").read_text()):
        found.setdefault(pair["image"], pair)
    return root, _written(folder / "photographs.json", list(found.values())[:size])


def _written(path: Path, pairs: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(pairs))
    return path
