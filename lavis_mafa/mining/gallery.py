"""Show connections of a run with their images and captions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from PIL import Image

from lavis_mafa.datasets.training_set import TrainingSet
from lavis_mafa.pages.report_page import THUMBNAIL, Mined, Show
from lavis_mafa.pages.tables import one_line

T = TypeVar("T")
# What a record of ``connections.jsonl`` and a card of the gallery both have, under the same names.
_RECORDED = ("direction", "probability", "truth", "epoch", "state")


class SampleViewer:
    """Return the thumbnail and caption of a sample by number, as far as they can be read.

    Args:
        data: the training set; None: only the numbers of the samples are known.
        images: whether to read images.

    Attributes:
        missing: number of images that could not be read.
        problem: error of the first of them.
    """

    def __init__(self, data: TrainingSet | None, images: bool = True) -> None:
        self.data, self.images = data, images
        self.missing, self.problem = 0, ""

    def __call__(self, number: int) -> tuple[Image.Image | None, str]:
        if self.data is None:
            return None, f"(caption of sample {number})"
        if self.images:
            try:
                picture, caption = self.data.show(number)
                picture.thumbnail((THUMBNAIL, THUMBNAIL))  # hundreds are in memory at once
                return picture, caption
            # A builder may raise anything for a broken file; the page is useful without the image.
            except Exception as error:
                self.missing += 1
                self.problem = self.problem or f"{type(error).__name__}: {error}"
        return None, self._caption(number)

    def notes(self) -> list[str]:
        """Return a note of the images that could not be read so far; [] if there are none."""
        if not self.missing:
            return []
        return [f"{self.missing} images could not be read; the first: {self.problem}"]

    def _caption(self, number: int) -> str:
        assert self.data is not None
        try:
            return self.data.source(number)[1]
        except (AttributeError, IndexError, KeyError, TypeError):
            return f"(caption of sample {number})"


def view_data(load: Callable[[], TrainingSet], images: bool, notes: list[str]) -> SampleViewer:
    """Return a viewer of data; if they cannot be loaded, add a note that says why."""
    try:
        return SampleViewer(load(), images)
    # Missing files or libraries, or another working directory, must not prevent the page.
    except Exception as error:
        problem = one_line(str(error))
        logging.warning("the page has no images: %s: %s", type(error).__name__, problem)
        notes.append(
            "The data could not be loaded, so connections are shown without images and captions "
            f"({type(error).__name__}: {problem}). Relative paths are resolved against the working "
            "directory of the command."
        )
        return SampleViewer(None)


def connections_of(
    records: Iterable[Mapping[str, Any]], show: Show, run: str = "", score: str = ""
) -> Iterator[Mined]:
    """Yield the records of ``connections.jsonl`` with images and captions.

    Args:
        score: what judged them in Con-D's place; empty: Con-D.
    """
    for record in records:
        facts = {name: record[name] for name in _RECORDED}
        facts.update(run=run, score=score)
        yield Mined.shown(show, record["anchor_index"], record["mined_index"], **facts)


def evenly(items: Sequence[T], limit: int) -> list[T]:
    """Return at most ``limit`` items, evenly spaced, in their order."""
    if len(items) <= limit:
        return list(items)
    return [items[k * len(items) // limit] for k in range(limit)]
