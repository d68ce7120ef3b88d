"""Read features of images from a folder, in the place of pictures.

    names.json or names.txt       one image name for each of N rows, as in the annotations
    features.npy                  (N, V), (N, S, V), or (N, views, S, V), float16 or float32

Instead of ``features.npy`` there may be several files, each named after the number of its first
row: ``features_0.npy``, ``features_512.npy``, ... The files are mapped into memory, so that workers
and ranks of a machine share them. A row that begins with NaN is that of an unreadable picture.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from lavis_mafa.io.files import read_json

NAMES = "names.json"
Row = npt.NDArray[Any]


class FeatureFolder:
    """Features of N images, in files that are mapped into memory.

    Attributes:
        shape: views, S and V.

    Raises:
        ValueError: if there are no features, or files of different shapes.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.abspath(os.path.expanduser(folder)))
        shapes = {one.shape[1:] for one in self._arrays}
        if len(shapes) != 1:
            found = f"files of the shapes {sorted(shapes)}" if shapes else "no features*.npy"
            raise ValueError(f"{self.folder}: expected features of one shape, found {found}")
        self.shape: tuple[int, int, int] = shapes.pop()

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for workers: each maps the files itself instead of receiving a copy.
        return {"folder": self.folder, "shape": self.shape}

    @cached_property
    def _arrays(self) -> list[Row]:
        arrays: list[Row] = []
        found = sorted((_first_row(path), path) for path in self.folder.glob("features*.npy"))
        for first, path in found:
            if first != sum(map(len, arrays)):
                raise ValueError(
                    f"{path} begins at row {first}, but the files before it have "
                    f"{sum(map(len, arrays))} rows: one is missing, or two begin at one row. If "
                    "lavis-mafa features makes them, rerun it"
                )
            try:
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise ValueError(f"{path} is damaged ({error}); make it again") from error
            if array.dtype not in (np.float16, np.float32) or not 2 <= array.ndim <= 4:
                raise ValueError(
                    f"{path} has {array.dtype} of the shape {array.shape}, expected float16 or "
                    "float32 (N, V), (N, S, V) or (N, views, S, V)"
                )
            middle = {2: (1, 1), 3: (1,), 4: ()}[array.ndim]
            arrays.append(array.reshape(len(array), *middle, *array.shape[1:]))
        return arrays

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum([len(one) for one in self._arrays])

    def names(self) -> list[str]:
        """Read the names of the rows.

        Raises:
            ValueError: if there are none, or more or fewer than rows.
        """
        text = self.folder / "names.txt"
        if (self.folder / NAMES).is_file():
            names = read_json(self.folder / NAMES)
        elif text.is_file():
            lines = text.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
            names = [line.removesuffix("\r") for line in lines]
        else:
            raise ValueError(f"{self.folder} has no {NAMES} or names.txt with the images' names")
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise ValueError(f"{self.folder / NAMES}: expected a list of image names")
        if len(names) != self._ends[-1]:
            raise ValueError(
                f"{self.folder} has {len(names)} names and {self._ends[-1]} rows of features. If "
                "lavis-mafa features makes them, rerun it"
            )
        return names

    def row(self, number: int) -> Row:
        """Return the features ``(views, S, V)`` of a row, memory-mapped."""
        which = int(np.searchsorted(self._ends, number, side="right"))
        array = self._arrays[which]
        return array[number - int(self._ends[which]) + len(array)]


def _first_row(path: Path) -> int:
    number = path.stem.removeprefix("features").removeprefix("_")
    if number and not number.isdecimal():
        raise ValueError(f"{path}: expected features.npy, or features_N.npy that begins at row N")
    return int(number or 0)


@dataclass(frozen=True)
class KeptImage:
    """What a data set with features knows of an image.

    Attributes:
        views: its features ``(views, S, V)``.
        picture: reads its picture.
    """

    views: Row
    picture: Callable[[], Image.Image]


class FeatureView:
    """The image processor of features: one of the views, as a float32 tensor ``(S, V)``.

    Args:
        draw: draw the view at random, by the generator that augmentation draws from; False: the
            first view.
    """

    reads_features = True

    def __init__(self, draw: bool = False) -> None:
        self.draw = draw

    def __call__(self, image: Any) -> Tensor:
        if not isinstance(image, KeptImage):
            raise ValueError(
                "the model reads features, but the data set has no build_info.features"
            )
        view = int(torch.randint(len(image.views), ())) if self.draw else 0
        return torch.from_numpy(np.array(image.views[view], np.float32))


def processed(processor: Callable[[Any], Any], image: Any) -> Any:
    """Return what a processor makes of an image: of its features, or else of its picture."""
    if isinstance(image, KeptImage) and not getattr(processor, "reads_features", False):
        image = image.picture()
    return processor(image)
