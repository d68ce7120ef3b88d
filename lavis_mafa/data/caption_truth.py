"""Valid pairs of one's own data beside the pairs themselves: `build_info.truth` of a builder.

A caption is valid for every image that has a caption of the same text, see `normalised`. A file of
further valid pairs, in the format of `run.truth_file`, adds to that: with ``["dog.jpg", "an
animal"]`` in it, every caption "An animal." is valid for dog.jpg.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lavis_mafa.data.known_truth import read_truth
from lavis_mafa.data.pair_conversion import dense_ids
from lavis_mafa.data.pair_table import PairTable
from lavis_mafa.data.picture_identity import digest_of

SAME_CAPTION = "same_caption"
_KEY = "build_info.truth"

_Mask = npt.NDArray[np.bool_]
_Numbers = npt.NDArray[np.int64]


# What is known of the pairs of a table, the ``truth`` of its data set: returns whether the captions
# of the pairs of the second rows fit the images of the pairs of the first rows, whose shapes
# broadcast. An object that does not know every pair has a method ``known``, which takes the same
# arguments and returns which pairs it knows.
PairTruth = Callable[[npt.ArrayLike, npt.ArrayLike], _Mask]


class _WithoutPunctuation(dict[int, str | int]):
    """A table for `str.translate`: punctuation (Unicode's categories P) becomes a blank."""

    def __missing__(self, code: int) -> str | int:
        self[code] = " " if unicodedata.category(chr(code)).startswith("P") else code
        return self[code]


_without_punctuation = _WithoutPunctuation()


def normalised(caption: str) -> str:
    """Return a caption as it is compared with others: NFKC, without case and punctuation, single
    spaces. A caption of punctuation alone keeps it."""
    text = unicodedata.normalize("NFKC", caption).casefold()
    return " ".join((text.translate(_without_punctuation).strip() or text).split())


class CaptionTruth:
    """The truth of a table by the text of its captions; see the module.

    It needs 16 bytes for each pair of the table, and a search among the pairs for each question.

    Args:
        table: the pairs.
        further: further valid pairs, ``(image name in the table, caption)``; those whose image or
            caption is not in the table are skipped, and their number is logged.
    """

    def __init__(self, table: PairTable, further: Sequence[tuple[str, str]] = ()) -> None:
        self.image_ids = table.image_ids
        # Captions of the further pairs come last, so that those of the table are numbered from 0.
        both = caption_numbers(chain(table.captions(), (caption for _, caption in further)))
        self.caption_ids, others = both[: len(table)], both[len(table) :]
        self.n_captions = int(self.caption_ids.max()) + 1
        keys = self._key(np.asarray(self.image_ids), self.caption_ids)
        if further:
            keys = np.concatenate([keys, self._of_further(table, further, others)])
        self._keys = np.unique(keys)

    def __call__(self, image_of: npt.ArrayLike, text_of: npt.ArrayLike) -> _Mask:
        """As `PairTruth`."""
        images = self.image_ids[np.asarray(image_of, np.int64)]
        keys = self._key(images, self.caption_ids[np.asarray(text_of, np.int64)])
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.asarray(self._keys[places] == keys)

    def matrix(self, rows: _Numbers) -> _Mask:
        """Return which of the captions of ``rows (T,)`` are valid for which image, ``(I, T)``."""
        shape = int(self.image_ids.max()) + 1, self.n_captions
        table = np.zeros(shape, np.bool_)
        table.reshape(-1)[self._keys] = True
        return np.asarray(table[:, self.caption_ids[rows]])

    def _key(self, images: _Numbers, captions: _Numbers) -> _Numbers:
        return np.asarray(images * self.n_captions + captions)

    def _of_further(
        self, table: PairTable, further: Sequence[tuple[str, str]], captions: _Numbers
    ) -> _Numbers:
        wanted = {image for image, _ in further}
        images: dict[str, set[int]] = {}
        for row in np.unique(self.image_ids, return_index=True)[1].tolist():
            name = table.image(row)
            if name in wanted:
                images.setdefault(name, set()).add(int(self.image_ids[row]))
        keys, foreign = [], []
        for pair, caption in zip(further, captions.tolist(), strict=True):
            found = images.get(pair[0], set()) if caption < self.n_captions else set()
            if not found:
                foreign.append(pair)
            keys += [image * self.n_captions + caption for image in found]
        if foreign:
            logging.warning(
                "%s: %d of %d pairs are not in %s, the first is %s",
                _KEY,
                len(foreign),
                len(further),
                table.folder,
                list(foreign[0]),
            )
        return np.array(keys, np.int64)


def truth_reader(given: str | None) -> Callable[[PairTable], CaptionTruth] | None:
    """Return what makes the truth of a table from `build_info.truth`; None for null.

    Args:
        given: ``same_caption``, or a file of further valid pairs by name and caption.

    Raises:
        FileNotFoundError, ValueError: for a file as `read_truth` refuses it, and for one that lists
            numbers: they would mean something else in every split.
    """
    if given is None:
        return None
    if given == SAME_CAPTION:
        return CaptionTruth
    further: list[tuple[str, str]] = []
    for image, text in read_truth(given, _KEY):
        if not (isinstance(image, str) and isinstance(text, str)):
            raise ValueError(
                f"{_KEY}: {given} lists pairs by number, such as {[image, text]}, which mean other "
                'pairs in every split; list them by name, such as ["dog.jpg", "an animal"], or '
                "give the file as run.truth_file for one test split"
            )
        further.append((image, text))
    return lambda table: CaptionTruth(table, further)


def caption_numbers(captions: Iterator[str]) -> _Numbers:
    """Number different captions as compared, in order of first appearance: ``(N,)`` int64."""
    stored = bytearray()
    for caption in captions:
        stored += digest_of(b"", normalised(caption).encode("utf-8", "surrogatepass"))
    column = pa.Array.from_buffers(pa.binary(16), len(stored) // 16, [None, pa.py_buffer(stored)])
    return dense_ids(pa.chunked_array([column]))[0]
