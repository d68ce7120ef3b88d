"""Identities of training data: what a cache by image id, or a saved order of samples, refers to."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lavis_mafa.data.pair_table import PairTable

if TYPE_CHECKING:  # it needs LAVIS
    from lavis_mafa.data.training_set import TrainingSet

SAMPLED = 64  # samples whose content is read where a data set lists neither files nor captions


@dataclass(frozen=True)
class DataIdentity:
    """Digests of all rows of a training set, in order.

    Folders that image paths are relative to do not count, so that data may move.

    Attributes:
        samples, images: numbers of both.
        image_rows: digest of the image id and the image's name of every sample. Of shards also of
            the place and size of every image file. Of data that list no names, such as rendered
            ones, the content of some samples.
        caption_rows: digest of the captions, or of whatever else an annotation has; and of the
            groups, if there are any.
    """

    samples: int
    images: int
    image_rows: str
    caption_rows: str

    @classmethod
    def of(cls, train_set: TrainingSet) -> DataIdentity:
        """Read all rows: about 2 s for a million pairs in lists, 0.1 s in converted tables."""
        images, captions = _hash(), _hash()
        ids = np.asarray(train_set.image_ids, np.int64)
        images.update(np.ascontiguousarray(ids).data)
        if train_set.group_ids is not None:
            captions.update(np.ascontiguousarray(train_set.group_ids, np.int64).data)
        begin = 0
        for part in train_set.parts:
            for image, caption in _rows_of(part, train_set, begin):
                images.update(image)
                captions.update(caption)
            begin += len(part)
        distinct = len(np.unique(ids))
        return cls(len(ids), distinct, images.hexdigest(), captions.hexdigest())


def digest_of_rows(data: Any) -> str:
    """Return the number of samples of a split's data set, and a digest of its rows in order.

    Of data without a table or annotations, the captions, image names and ids that they list count.
    """
    found = _hash()
    for row in listed_rows(data):
        for one in row:
            found.update(one)
    names = ("text", "texts", "image", "image_names", "image_ids", "group_ids")
    for listed in (getattr(data, name, None) for name in names):
        if isinstance(listed, np.ndarray) and not listed.dtype.hasobject:
            found.update(listed.tobytes())
        elif isinstance(listed, (list, tuple)):
            found.update(repr(listed).encode(errors="replace"))
    samples = len(data) if hasattr(data, "__len__") else "an unknown number of"
    return f"{samples} samples, {found.hexdigest()}"


def _hash() -> Any:
    return hashlib.blake2b(digest_size=16)


def _rows_of(part: Any, train_set: TrainingSet, begin: int) -> Iterator[tuple[Any, Any]]:
    """Yield bytes that identify the images and the captions of a part of the data."""
    listed = False
    for row in listed_rows(part):
        listed = True
        yield row
    if listed or not hasattr(part, "source"):  # other data would be read to identify them
        return
    some = np.unique(np.linspace(0, max(0, len(part) - 1), SAMPLED).astype(np.int64))
    for number in some[: len(part)]:
        yield _content(train_set, begin + int(number)), b""


def listed_rows(part: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what `_rows_of` does of a table or of annotations; nothing if there are neither."""
    table = getattr(part, "table", None)
    if isinstance(table, PairTable):
        yield from table.identity()
        return
    annotation = getattr(part, "annotation", None)
    if isinstance(annotation, list) and annotation and isinstance(annotation[0], dict):
        for row in annotation:
            yield (
                f"{row.get('image')!r}\n".encode(errors="replace"),
                (f"{sorted(row.items(), key=str)!r}\n".encode(errors="replace")),
            )


def _content(train_set: TrainingSet, number: int) -> bytes:
    """Return the name of a sample's image file, without its folder; without a file, its bytes."""
    try:
        path = train_set.source(number).path
        return os.path.basename(path).encode() if path else train_set.image_bytes(number)
    except (OSError, LookupError, AttributeError, AssertionError):  # data with nothing but ids
        return b""
