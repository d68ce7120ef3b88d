"""Compare images inside parquet with image files, and row groups of one image with large ones.

Both sides are this package's data set. It copies images out of parquet when it converts the file,
because GRIT reads them in any order, and parquet can only be read by whole row groups.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from lavis.processors.blip_processors import BlipCaptionProcessor, BlipImageTrainProcessor

from lavis_mafa.datasets import TrainingSet
from lavis_mafa.datasets.image_text_json import ImageTextTrain
from lavis_mafa.datasets.pair_conversion import converted
from research.benchmarks.data import BATCH, SIDE, generated, read_as_worker
from research.benchmarks.harness import Row, Sizes, side_by_side

ROUNDS = 50  # over all images, whose bytes are read in microseconds


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure decoding, bytes in random order, and conversion; times are of all images."""
    with tempfile.TemporaryDirectory() as name:
        size = 4 if sizes.quick else BATCH
        yield from Stores(Path(name), size).rows(sizes.repeats)


class Stores:
    """The same pairs with image files, and in parquet with one row group and with one per image.

    Args:
        folder: for all files.
        size: number of pairs.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.root, self.annotations = generated(folder, size, 640, 480)
        self.files = self.data(self.annotations, self.root)
        self.large, self.single = (self.parquet(rows) for rows in (size, 1))
        self.of_large, self.of_single = self.data(self.large), self.data(self.single)
        self.order = np.random.default_rng(0).permutation(size).tolist()
        self.numbers = count()

    def parquet(self, group: int) -> Path:
        """Write the pairs to a parquet file with row groups of ``group`` images."""
        pairs = json.loads(self.annotations.read_text())
        columns = {
            "image": [(self.root / pair["image"]).read_bytes() for pair in pairs],
            "caption": [pair["caption"] for pair in pairs],
        }
        path = self.folder / f"groups_of_{group}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=group)
        return path

    def data(self, file: Path, root: Path | None = None) -> ImageTextTrain:
        """Return the training set of an annotation file."""
        image, caption = BlipImageTrainProcessor(image_size=SIDE), BlipCaptionProcessor()
        return ImageTextTrain(image, caption, root, [file], cache_dir=self.folder / "cache")

    def rows(self, repeats: int) -> Iterator[Row]:
        """Yield four rows."""
        size = self.size
        note = f"{size} JPEGs of 640 x 480; seconds for all of them"
        yield side_by_side(
            self.decoding(self.of_large), self.decoding(self.files), max(repeats, 5)
        ).row("decode and augment, parquet / image files", note=f"{note}; converted before")
        note_of_bytes = f"{note}, {ROUNDS} times; converted before; files in the page cache"
        yield side_by_side(
            lambda: self.bytes_of(self.of_single), lambda: self.bytes_of(self.of_large), repeats
        ).row(f"images in random order, row groups of 1 / {size}", note=note_of_bytes)
        yield side_by_side(
            lambda: self.bytes_of(self.of_large, rounds=1), self.bytes_by_pyarrow, repeats
        ).row(
            f"images in random order, copied / from row groups of {size}",
            note=f"{note}; the reference reads an image's row group with pyarrow",
        )
        yield side_by_side(
            lambda: self.convert(self.single), lambda: self.convert(self.large), repeats
        ).row(f"convert parquet, row groups of 1 / {size}", note=f"{note}; once for a file")

    def decoding(self, data: ImageTextTrain) -> Callable[[], object]:
        """Return a function that reads all samples, with new augmentations each time."""
        samples, epochs = TrainingSet(data), count()
        return lambda: read_as_worker(samples, next(epochs))

    def bytes_of(self, data: ImageTextTrain, rounds: int = ROUNDS) -> list[bytes]:
        """Return the image files of all pairs, in random order."""
        for _ in range(rounds):
            found = [data.image_bytes(index)[0] for index in self.order]
        return found

    def bytes_by_pyarrow(self) -> list[bytes]:
        """Return the same from the file with one row group, without a copy of its images."""
        with pq.ParquetFile(self.large) as file:
            return [
                file.read_row_group(0, columns=["image"], use_threads=False)["image"][index].as_py()
                for index in self.order
            ]

    def convert(self, file: Path) -> None:
        """Convert a file as at its first use."""
        cache = self.folder / f"converted_{next(self.numbers)}"
        converted([file], cache_dir=cache)
        shutil.rmtree(cache)
