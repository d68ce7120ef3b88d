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
from lavis_mafa.data.known_truth import INVALID, UNKNOWN, VALID  # noqa: F401  of `Judged.truth`
from lavis_mafa.io.files import atomic_write, read_npz

FILE = "judged.npz"
_PREFIX = "probability_"  # of the arrays of a discriminator


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
        about: origin of the pairs, as plain values: ``cfg_path``, ``options``, ``low``, ``high``,
            ``lower_bound`` (whether `VALID` pairs are only few of those that match, such as equal
            captions).
    """

    image: NDArray[Any]
    text: NDArray[Any]
    from_image: NDArray[Any]
    from_text: NDArray[Any]
    probability: dict[str, NDArray[Any]]
    truth: NDArray[Any]
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arrays = {name: getattr(self, name) for name in _COLUMNS} | self.probability
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
    def known(self) -> NDArray[Any]:
        """Pairs ``(P,)`` bool whose truth is known: none if it is only a lower bound."""
        return (self.truth != UNKNOWN) & (not self.about.get("lower_bound"))

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
        keys, wanted = pair_keys(self.image, self.text, size), pair_keys(image, text, size)
        if not len(keys):
            return np.full(len(image), -1)
        order = np.argsort(keys, kind="stable")
        found = order[np.searchsorted(keys, wanted, sorter=order).clip(max=len(keys) - 1)]
        return np.where(keys[found] == wanted, found, -1)

    def select(self, rows: NDArray[Any]) -> Judged:
        """Return only some pairs, by ``rows``: numbers or a mask ``(P,)``."""
        return Judged(
            **{name: getattr(self, name)[rows] for name in _COLUMNS},
            probability={name: one[rows] for name, one in self.probability.items()},
            about=self.about,
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an ``.npz`` file atomically."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        columns |= {_PREFIX + name: values for name, values in self.probability.items()}
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
            found = cls(
                **{name: columns[name] for name in _COLUMNS},
                probability={
                    name.removeprefix(_PREFIX): values
                    for name, values in columns.items()
                    if name.startswith(_PREFIX)
                },
                about=about,
            )
            found._check()
            return found
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a file of judged pairs: {error}") from error

    def _check(self) -> None:
        """Raise ValueError if a file from someone else has values of another kind."""
        low, high = self.thresholds
        if not 0.0 <= low <= high <= 1.0:
            raise ValueError(f"thresholds {low:g} and {high:g}, expected 0 <= low <= high <= 1")
        kinds = {"image": "iu", "text": "iu", "truth": "i", "from_image": "b", "from_text": "b"}
        columns = {name: getattr(self, name) for name in _COLUMNS}
        for name, values in {**columns, **self.probability}.items():
            if values.dtype.kind not in kinds.get(name, "f"):
                raise ValueError(f"{name!r} has the type {values.dtype}")
        for name in ("image", "text"):  # pair_keys of larger numbers would not fit into 64 bits
            if len(columns[name]) and not 0 <= columns[name].min() <= columns[name].max() < 2**31:
                raise ValueError(f"{name} has values outside 0 to {2**31}")


_COLUMNS = ("image", "text", "from_image", "from_text", "truth")


def pair_keys(image: NDArray[Any], text: NDArray[Any], size: int) -> NDArray[Any]:
    """Return one number for each pair, ``(P,)`` int64, in the order of image, then text.

    Args:
        image, text: ``(P,)``, sample numbers below ``size``.
    """
    return np.asarray(image, np.int64) * size + np.asarray(text, np.int64)
