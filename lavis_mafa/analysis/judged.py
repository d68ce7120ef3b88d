"""Pairs of a data set that discriminators judged: what counting and mining leave for others."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.io.files import atomic_write

FILE = "judged.npz"
UNKNOWN, INVALID, VALID = -1, 0, 1
_PREFIX = "probability_"


@dataclass
class Judged:
    """P pairs of an image and a text that are no pair of the data, each once.

    Attributes:
        image, text: ``(P,)`` int64, numbers of the samples in the training set whose image and
            whose text they are.
        from_image, from_text: ``(P,)`` bool, whether an image nominated the text as its hardest
            negative, and the reverse; both may be.
        probability: ``(P,)`` float32 by the discriminator's name, 0 to 1; NaN where it could not
            judge.
        truth: ``(P,)`` int8, `VALID`, `INVALID` or `UNKNOWN`.
        about: plain values that say where they come from: ``cfg_path``, ``options``, ``low``,
            ``high``.
    """

    image: np.ndarray
    text: np.ndarray
    from_image: np.ndarray
    from_text: np.ndarray
    probability: dict[str, np.ndarray]
    truth: np.ndarray
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arrays = {name: getattr(self, name) for name in _COLUMNS} | self.probability
        wrong = {name: a.shape for name, a in arrays.items() if a.shape != self.image.shape}
        if wrong or self.image.ndim != 1:
            raise ValueError(f"expected arrays ({len(self.image)},), got {wrong or 'a matrix'}")

    def __len__(self) -> int:
        return len(self.image)

    @property
    def digest(self) -> str:
        """SHA-256 of the pairs in their order: which judged file answers belong to."""
        pairs = np.stack([self.image, self.text]).astype("<i8")
        return hashlib.sha256(pairs.tobytes()).hexdigest()

    @property
    def thresholds(self) -> tuple[float, float]:
        """``low`` and ``high`` of what judged them; the paper's where ``about`` does not tell."""
        rule = MiningRule()
        low, high = self.about.get("low", rule.low), self.about.get("high", rule.high)
        return float(low), float(high)

    @property
    def names(self) -> list[str]:
        """The discriminators."""
        return list(self.probability)

    def of(self, name: str | None) -> np.ndarray:
        """Probabilities by one discriminator; None: the first.

        Raises:
            ValueError: if there is none of that name, with those that there are.
        """
        if name is None and self.probability:
            name = self.names[0]
        if not self.probability:
            raise ValueError("no discriminator judged these pairs, the truth alone: give --con-d")
        if name not in self.probability:
            raise ValueError(f"no discriminator {name!r} judged these; there are {self.names}")
        return self.probability[name]

    def rows_of(self, image: np.ndarray, text: np.ndarray) -> np.ndarray:
        """Rows ``(K,)`` of pairs by the numbers of their samples; -1 if one was not judged."""
        highest = [array.max(initial=0) for array in (self.image, self.text, image, text)]
        size = int(max(highest)) + 1
        keys, wanted = pair_keys(self.image, self.text, size), pair_keys(image, text, size)
        if not len(keys):
            return np.full(len(wanted), -1)
        order = np.argsort(keys, kind="stable")
        place = np.searchsorted(keys, wanted, sorter=order)
        rows = order[np.minimum(place, len(keys) - 1)]
        return np.where(keys[rows] == wanted, rows, -1)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an ``.npz`` file, whole or not at all."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        columns |= {_PREFIX + name: values for name, values in self.probability.items()}
        with atomic_write(path) as file:
            np.savez(file, about=np.array(json.dumps(self.about)), **columns)
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Judged:
        """Read what `save` wrote; ``path`` is the file or the folder that holds `FILE`.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is another file.
        """
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(
                f"no judged pairs at {path}: `python -m lavis_mafa.analysis count` or `mine` "
                f"writes {FILE} into its --output"
            )
        try:
            with np.load(path, allow_pickle=False) as stored:
                columns: Mapping[str, np.ndarray] = dict(stored)
            probability = {
                name.removeprefix(_PREFIX): values
                for name, values in columns.items()
                if name.startswith(_PREFIX)
            }
            about = json.loads(str(columns["about"]))
            return cls(
                **{name: columns[name] for name in _COLUMNS}, probability=probability, about=about
            )
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(f"{path} holds no judged pairs: {error}") from error


_COLUMNS = ("image", "text", "from_image", "from_text", "truth")


def pair_keys(image: np.ndarray, text: np.ndarray, size: int) -> np.ndarray:
    """``(P,)`` int64, one number for a pair of samples numbered below ``size``, in the order of
    image, then text."""
    return np.asarray(image, np.int64) * size + np.asarray(text, np.int64)
