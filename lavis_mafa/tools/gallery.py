"""Show judged pairs with their images and captions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lavis_mafa.algorithm.binary import TENTHS
from lavis_mafa.algorithm.scores import CON_D
from lavis_mafa.tools.charts import Bars, format_number
from lavis_mafa.tools.report_page import THUMBNAIL, ShownPair
from lavis_mafa.tools.tables import one_line

if TYPE_CHECKING:  # it needs LAVIS
    from lavis_mafa.data.training_set import TrainingSet

T = TypeVar("T")
SHOWN = 60  # pairs on a page


class SampleViewer:
    """Reads images and captions of samples by number, as far as they can be read.

    Args:
        data: the training set; None: only the numbers of the samples are known.
        problem: why there are no data; "" if there are.
    """

    def __init__(self, data: TrainingSet | None, problem: str = "") -> None:
        self._data, self._problem, self._missing = data, problem, 0

    def pair(self, image: int, text: int, verdict: str, truth: bool | None) -> ShownPair:
        """Return the pair of the image of one sample and the caption of another."""
        caption, own = self._caption(text), self._caption(image)
        if getattr(self._data, "of_texts", False):
            anchor = self._data.annotated(image)[0]  # type: ignore[union-attr]
            return ShownPair(None, f"{anchor} – {caption}", own, verdict, truth)
        return ShownPair(self._image(image), caption, own, verdict, truth)

    def notes(self) -> list[str]:
        """Return notes of what could not be read so far; [] if there is nothing."""
        if self._data is None:
            return [
                f"The data could not be loaded ({self._problem}), so pairs are shown without "
                "images and captions. Relative paths are resolved against the working directory "
                "of the command."
            ]
        if not self._missing:
            return []
        return [f"{self._missing} images could not be read; the first: {self._problem}"]

    def _image(self, number: int) -> Image.Image | None:
        if self._data is None:
            return None
        try:
            picture = self._data.show(number)[0]
            picture.thumbnail((THUMBNAIL, THUMBNAIL))  # many are in memory at once
            return picture
        # A builder may raise anything for a broken file; the page is useful without the image.
        except Exception as error:
            self._missing += 1
            self._problem = self._problem or f"{type(error).__name__}: {error}"
            return None

    def _caption(self, number: int) -> str:
        try:
            assert self._data is not None
            return self._data.source(number)[1]
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError):
            return f"(caption of sample {number})"


def view_data(load: Callable[[], TrainingSet]) -> SampleViewer:
    """Return a viewer of data, or one that only knows numbers if they cannot be loaded."""
    try:
        return SampleViewer(load())
    # Missing files or libraries, or another working directory, must not prevent the page.
    except Exception as error:
        kind = type(error).__name__
        logging.warning("the page has no images: %s: %s", kind, one_line(str(error)))
        return SampleViewer(None, kind)


def connections_of(
    records: Iterable[Mapping[str, Any]], show: SampleViewer, config: Mapping[str, Any]
) -> Iterator[ShownPair]:
    """Yield the records of ``connections.jsonl`` with images and captions.

    Args:
        config: of the run, which names what judged them.
    """
    rule: Any = config
    for name in ("model", "mafa", "connections"):
        rule = rule.get(name) or {}
    score = "P" if rule.get("score", CON_D) == CON_D else rule["score"]
    for one in records:
        image, text = one["anchor_index"], one["mined_index"]
        if one["direction"] == "t2i":
            image, text = text, image
        verdict = f"{score} = {format_number(one['probability'])}, {one['state']}"
        yield show.pair(image, text, f"{verdict}, epoch {one['epoch']}", one["truth"])


def bars_of(title: str, tenths: NDArray[Any]) -> Bars:
    """Return the numbers of pairs ``(10,)`` by tenth of the probability as bars."""
    names = [f"{k / TENTHS:.1f} to {(k + 1) / TENTHS:.1f}" for k in range(TENTHS)]
    values = dict(zip(names, map(int, tenths), strict=True))
    return Bars(title, values, high=max(1, int(np.max(tenths))))


def evenly(items: Sequence[T], limit: int) -> list[T]:
    """Return at most ``limit`` items, evenly spaced, in their order."""
    if len(items) <= limit:
        return list(items)
    return [items[k * len(items) // limit] for k in range(limit)]
