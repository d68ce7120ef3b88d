"""The file of judged pairs, which `count` and `mine` write and other commands read."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.io.arrays import read_npz
from lavis_mafa.io.files import atomic_write
from lavis_mafa.metrics.known_truth import INVALID as INVALID
from lavis_mafa.metrics.known_truth import UNKNOWN as UNKNOWN
from lavis_mafa.metrics.known_truth import VALID as VALID

FILE = "judged.npz"
_AT_ONCE = 2**20  # pairs that `rows_of` looks for at once
# Of the arrays of a discriminator and of a sampling in the file.
_PREFIX, _SAMPLING = "probability_", "sampling_"


@dataclass
class Judged:
    """P distinct pairs of an image and a text of different samples, with match probabilities.

    Attributes:
        image, text: ``(P,)`` int64, numbers in the training set of the samples that the image and
            the text come from.
        from_image, from_text: ``(P,)`` bool, whether the text is a hard negative of the image, and
            whether the image is a hard negative of the text; both can be true.
        probability: ``(P,)`` float32 by name of the discriminator, 0 to 1; NaN where it could not
            judge the pair.
        truth: ``(P,)`` int8, `VALID`, `INVALID` or `UNKNOWN`.
        about: origin of the pairs, as plain values: ``cfg_path``, ``options``, ``low``, ``high``.
        samplings: ``(P,)`` bool by `hard_negatives.Sampling.name`, whether the pair is a hard
            negative in its mini-batches; {} in files of `mine` and of earlier versions.
    """

    image: NDArray[Any]
    text: NDArray[Any]
    from_image: NDArray[Any]
    from_text: NDArray[Any]
    probability: dict[str, NDArray[Any]]
    truth: NDArray[Any]
    about: dict[str, Any] = field(default_factory=dict)
    samplings: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arrays = {name: getattr(self, name) for name in _COLUMNS} | self.probability
        arrays |= self.samplings
        wrong = {name: a.shape for name, a in arrays.items() if a.shape != self.image.shape}
        if wrong or self.image.ndim != 1:
            raise ValueError(f"expected arrays ({len(self.image)},), got {wrong or 'a matrix'}")

    def __len__(self) -> int:
        return len(self.image)

    @property
    def thresholds(self) -> tuple[float, float]:
        """``low`` and ``high`` of the run; the paper's if ``about`` has none."""
        rule = MiningRule()
        low, high = self.about.get("low", rule.low), self.about.get("high", rule.high)
        return float(low), float(high)

    @property
    def names(self) -> list[str]:
        """Names of the discriminators."""
        return list(self.probability)

    def probability_by(self, name: str | None) -> NDArray[Any]:
        """Return the probabilities by a discriminator; None: the first one.

        Raises:
            ValueError: if there is no such discriminator.
        """
        if name is None and self.probability:
            name = self.names[0]
        if not self.probability:
            raise ValueError(
                "these pairs were judged only by the ground truth, not by a discriminator: run the "
                "command that wrote them with --con-d"
            )
        if name not in self.probability:
            raise ValueError(f"no discriminator {name!r} judged these pairs; known: {self.names}")
        return self.probability[name]

    def rows_of(self, image: NDArray[Any], text: NDArray[Any]) -> NDArray[Any]:
        """Return the rows ``(K,)`` of pairs by sample numbers; -1 if a pair was not judged."""
        highest = [array.max(initial=0) for array in (self.image, self.text, image, text)]
        size = int(max(highest)) + 1
        keys, rows = pair_keys(self.image, self.text, size), np.full(len(image), -1)
        order = None if (keys[1:] > keys[:-1]).all() else np.argsort(keys, kind="stable")
        # In parts, whose temporary numbers take little memory.
        for begin in range(0, len(rows) if len(keys) else 0, _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            wanted = pair_keys(image[part], text[part], size)
            place = np.searchsorted(keys, wanted, sorter=order).clip(max=len(keys) - 1)
            found = place if order is None else order[place]
            rows[part] = np.where(keys[found] == wanted, found, -1)
        return rows

    def select(self, rows: NDArray[Any]) -> Judged:
        """Return only some pairs, by ``rows``: numbers or a mask ``(P,)``."""
        return Judged(
            **{name: getattr(self, name)[rows] for name in _COLUMNS},
            probability={name: one[rows] for name, one in self.probability.items()},
            about=self.about,
            samplings={name: one[rows] for name, one in self.samplings.items()},
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an ``.npz`` file atomically."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        columns |= {_PREFIX + name: values for name, values in self.probability.items()}
        columns |= {_SAMPLING + name: values for name, values in self.samplings.items()}
        with atomic_write(path) as file:
            np.savez(file, about=np.array(json.dumps(self.about)), **columns)
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Judged:
        """Read a file of `save`; ``path`` is the file, or a folder that contains `FILE`.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is not a file of judged pairs.
        """
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(
                f"no judged pairs at {path}: `lavis-mafa count` and `lavis-mafa mine` write {FILE} "
                "into their --output"
            )
        try:
            columns = read_npz(path)
            about = json.loads(str(columns["about"]))
            if not isinstance(about, dict):
                raise ValueError(f"about is a {type(about).__name__}, expected an object")
            probability, samplings = (
                {
                    name.removeprefix(prefix): values
                    for name, values in columns.items()
                    if name.startswith(prefix)
                }
                for prefix in (_PREFIX, _SAMPLING)
            )
            found = cls(
                **{name: columns[name] for name in _COLUMNS},
                probability=probability,
                about=about,
                samplings=samplings,
            )
            found._check()
            return found
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a file of judged pairs: {error}") from error

    def _check(self) -> None:
        """Check what a file from someone else may have wrong.

        Raises:
            ValueError: naming the first value of another kind, or out of range.
        """
        low, high = self.thresholds
        if not 0.0 <= low <= high <= 1.0:
            raise ValueError(f"thresholds {low:g} and {high:g}, expected 0 <= low <= high <= 1")
        flags = {name: getattr(self, name) for name in ("from_image", "from_text")}
        for kinds, low, high, columns in (
            # Up to which the number of a pair, see `pair_keys`, fits into 64 bits.
            ("iu", 0, 2**31, {"image": self.image, "text": self.text}),
            ("b", 0, 1, flags | self.samplings),
            ("i", min(_TRUTHS), max(_TRUTHS), {"truth": self.truth}),
            ("f", 0, 1, self.probability),
        ):
            for name, values in columns.items():
                if not name.isidentifier():
                    raise ValueError(f"the name {name!r}, expected letters, digits and _")
                if values.dtype.kind not in kinds:
                    raise ValueError(f"{name} has the type {values.dtype}")
                if ((values < low) | (values > high)).any():  # NaN passes
                    raise ValueError(f"{name} has values outside {low:g} to {high:g}")


_TRUTHS = (VALID, INVALID, UNKNOWN)
_COLUMNS = ("image", "text", "from_image", "from_text", "truth")


def pair_keys(image: NDArray[Any], text: NDArray[Any], size: int) -> NDArray[Any]:
    """Return one number for each pair, ``(P,)`` int64, in the order of image, then text.

    Args:
        image, text: ``(P,)``, sample numbers below ``size``.
    """
    return np.asarray(image, np.int64) * size + np.asarray(text, np.int64)
