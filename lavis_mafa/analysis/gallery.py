"""Connections of a run with their pictures and captions, as reports show them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from PIL import Image

from lavis_mafa.datasets.training_set import TrainingSet
from lavis_mafa.pages.report import THUMBNAIL, Mined

Show = Callable[[int], tuple[Image.Image | None, str]]
T = TypeVar("T")


class Shown:
    """Small picture and caption of a sample by number, as far as they are at hand.

    Args:
        data: the training set; None: nothing is known of the samples but their numbers.
        images: whether pictures are wanted.

    Attributes:
        missing: how many pictures could not be read.
        problem: why the first of them could not.
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
                picture.thumbnail((THUMBNAIL, THUMBNAIL))  # hundreds are kept at once
                return picture, caption
            # Whatever a builder's files may raise: the page can do without.
            except Exception as error:
                self.missing += 1
                self.problem = self.problem or f"{type(error).__name__}: {error}"
        return None, self._caption(number)

    def _caption(self, number: int) -> str:
        assert self.data is not None
        try:
            return self.data.source(number)[1]
        except (AttributeError, IndexError, KeyError, TypeError):
            return f"(caption of sample {number})"


def shown_data(opener: Callable[[], TrainingSet], images: bool, notes: list[str]) -> Shown:
    """`Shown` of data; what is wrong with them becomes a note."""
    try:
        return Shown(opener(), images)
    # Missing files, missing libraries, another folder: no reason to fail.
    except Exception as error:
        problem = " ".join(str(error).split())
        logging.warning("no pictures: %s: %s", type(error).__name__, problem)
        notes.append(
            "The data could not be opened here, so the connections are shown without pictures and "
            f"captions ({type(error).__name__}: {problem}). Relative paths are looked for where "
            "the command is called."
        )
        return Shown(None)


def connections_of(
    records: Iterable[Mapping[str, Any]], show: Show, run: str = ""
) -> Iterator[Mined]:
    """What a run logged in ``connections.jsonl``, with pictures and captions."""
    for record in records:
        anchor_image, anchor_caption = show(record["anchor_index"])
        mined_image, mined_caption = show(record["mined_index"])
        yield Mined(
            direction=record["direction"],
            anchor_image=anchor_image,
            anchor_caption=anchor_caption,
            mined_image=mined_image,
            mined_caption=mined_caption,
            probability=record["probability"],
            truth=record["truth"],
            epoch=record["epoch"],
            state=record["state"],
            anchor_index=record["anchor_index"],
            mined_index=record["mined_index"],
            run=run,
        )


def evenly(items: Sequence[T], limit: int) -> list[T]:
    """At most ``limit`` of the items, evenly spread, in their order."""
    if len(items) <= limit:
        return list(items)
    return [items[place * len(items) // limit] for place in range(limit)]
