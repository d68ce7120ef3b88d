"""Judgements by people as the truth of pairs of samples: valid, invalid or unknown."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from lavis_mafa.datasets.annotation_rows import Refusals
from lavis_mafa.datasets.judgements import Answers, Judgement, Judgements
from lavis_mafa.metrics.known_truth import INVALID, UNKNOWN, VALID, single_spaced

Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]

logger = logging.getLogger(__name__)


class JudgedTruth:
    """Say which pairs of samples match by judgements: valid, invalid, or unknown.

    An instance is a data set's ``truth``: called with sample numbers ``(P,)`` of images and of
    texts it returns whether they match, ``(P,)`` bool, False where that is unknown; `known` tells
    those apart. A judgement is about an image and a wording: it holds for all samples with the same
    image (``image_ids``) and with the same caption, ignoring differences in white space. Image and
    caption of one sample, and the other captions of its image, are valid.

    Args:
        judgements: see `read_judgements`.
        image_ids: ``(N,)``, equal for samples of one image.
        sources: the file of the image and the caption of each of the N samples, in order.
        processor: the text processor of the captions in ``sources``, where they are processed.
        required: refuse judgements of which none is about the data; otherwise a warning is logged.
        names: the name of the image of each sample in its annotation file, where ``sources`` have
            longer paths. A judgement that gives an image's whole name or path is about that image,
            even if other paths end with it.

    Attributes:
        counts: number of distinct judged pairs by verdict: ``valid``, ``invalid``, ``undecided``;
            and of rows that are ``not in the data``.

    Raises:
        ValueError: if no row is about an image and a caption of the data, or a row names several
            images or a caption that its image does not have.
    """

    def __init__(
        self,
        judgements: Judgements,
        image_ids: npt.NDArray[Any],
        sources: Iterable[tuple[str | None, str]],
        processor: Callable[[str], str] | None = None,
        required: bool = True,
        names: Iterable[str | None] | None = None,
    ) -> None:
        self._image_ids = image_ids
        samples = _Samples(judgements, image_ids, list(sources), processor, names)
        pooled: dict[tuple[int, str], Answers] = {}
        foreign = 0
        for row in judgements.rows:
            pair = samples._pair_of(row)
            if pair is None:
                foreign += 1
                continue
            known = pooled.get(pair)
            pooled[pair] = row.answers if known is None else known.pooled(row.answers)
        wrong, rows = samples.problems, judgements.rows
        wrong.end(f"{judgements.path}: {wrong.count} of {len(rows)} judgements")
        if not pooled:
            message = (
                f"{judgements.path}: none of its {len(rows)} judgements is about an image and a "
                f"caption of the data; the first is about {rows[0].image!r}, the data have "
                f"{samples.example}"
            )
            if required:
                raise ValueError(message)
            logger.warning("%s", message)
        verdicts = {pair: judgements.rule.verdict(answers) for pair, answers in pooled.items()}
        values = list(verdicts.values())
        self.counts = {
            "valid": values.count(VALID),
            "invalid": values.count(INVALID),
            "undecided": values.count(UNKNOWN),
            "not in the data": foreign,
        }
        words = {text: number for number, text in enumerate(dict.fromkeys(t for _, t in pooled))}
        self._wording = np.array([words.get(text, -1) for text in samples.wordings], np.int64)
        self._size = max(1, len(words))
        decided = sorted(
            (image * self._size + words[text], verdict)
            for (image, text), verdict in verdicts.items()
            if verdict != UNKNOWN
        )
        self._keys = np.array([key for key, _ in decided], np.int64)
        self._verdicts = np.array([verdict for _, verdict in decided], np.int8)

    def __call__(self, image_of: npt.ArrayLike, text_of: npt.ArrayLike) -> _Bools:
        """Return which pairs ``(P,)`` are known to match."""
        valid: _Bools = self.states(image_of, text_of) == VALID
        return valid

    def known(self, image_of: npt.ArrayLike, text_of: npt.ArrayLike) -> _Bools:
        """Return of which pairs ``(P,)`` it is known whether they match."""
        known: _Bools = self.states(image_of, text_of) != UNKNOWN
        return known

    def states(self, image_of: npt.ArrayLike, text_of: npt.ArrayLike) -> npt.NDArray[np.int8]:
        """Return `VALID`, `INVALID` or `UNKNOWN` for pairs of sample numbers, ``(P,)`` int8.

        The shapes of both arguments broadcast to that of the result.
        """
        images, texts = np.broadcast_arrays(image_of, text_of)
        image, word = self._image_ids[images].astype(np.int64), self._wording[texts]
        states = np.full(image.shape, UNKNOWN, np.int8)
        if len(self._keys):
            keys = image * self._size + word
            place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            found = (self._keys[place] == keys) & (word >= 0)
            states[found] = self._verdicts[place[found]]
        states[image == self._image_ids[texts]] = VALID
        return states

    def pairs(self) -> tuple[Ints, Ints]:
        """Return the decided pairs of different images: images and texts ``(K,)``.

        Each pair is named by the first sample with its image and the first with its wording.
        """
        if not len(self._keys):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        ids, first_image = np.unique(self._image_ids, return_index=True)
        words, first_text = np.unique(self._wording, return_index=True)
        image = first_image[np.searchsorted(ids, self._keys // self._size)]
        text = first_text[np.searchsorted(words, self._keys % self._size)]
        apart = self._image_ids[image] != self._image_ids[text]
        return image[apart], text[apart]


class _Samples:
    """Find the images and captions that judgements name among the samples of a data set."""

    def __init__(
        self,
        judgements: Judgements,
        image_ids: npt.NDArray[Any],
        sources: list[tuple[str | None, str]],
        processor: Callable[[str], str] | None,
        names: Iterable[str | None] | None = None,
    ) -> None:
        rows, self._processor = judgements.rows, processor
        self.wordings = [single_spaced(caption) for _, caption in sources]
        self._known = set(self.wordings)
        self.problems = Refusals()
        self.example = repr(sources[0][0]) if sources and sources[0][0] else "no files of images"
        self._image_ids = image_ids
        # Samples by the last part of their path, only of images that a judgement names.
        named = {_parts(row.image)[-1] for row in rows}
        named |= {_parts(row.caption_of)[-1] for row in rows if row.caption_of is not None}
        self._samples: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
        self._whole: dict[tuple[str, ...], list[tuple[int, tuple[str, ...]]]] = {}
        own = [path for path, _ in sources] if names is None else names
        for number, ((path, _), name) in enumerate(zip(sources, own, strict=True)):
            parts = _parts(path or "")
            if parts[-1] in named:
                self._samples.setdefault(parts[-1], []).append((number, parts))
                for whole in {parts, _parts(name or "")}:
                    self._whole.setdefault(whole, []).append((number, parts))
        self._found: dict[str, list[int]] = {}

    def samples_of(self, name: str) -> list[int]:
        """Return the samples whose image is called ``name``, in order.

        That is the image with this name in its annotation file or with this path; otherwise the one
        whose path ends with ``name``.

        Raises:
            ValueError: if they show several images.
        """
        if name not in self._found:
            wanted = _parts(name)
            found = self._whole.get(wanted) or [
                (k, parts)
                for k, parts in self._samples.get(wanted[-1], [])
                if parts[-len(wanted) :] == wanted
            ]
            images = {int(self._image_ids[k]): "/".join(parts) for k, parts in found}
            if len(images) > 1:
                some = ", ".join(sorted(images.values())[:3])
                raise ValueError(
                    f"{name!r} names {len(images)} images ({some}): give more of its path"
                )
            self._found[name] = [k for k, _ in found]
        return self._found[name]

    def _pair_of(self, row: Judgement) -> tuple[int, str] | None:
        """Return the image id and the wording of a row's pair; None if the data lack one."""
        try:
            images, wording = self.samples_of(row.image), self._wording_of(row)
        except ValueError as error:
            self.problems.add(f"{row.where}: {error}")
            return None
        if not images or wording is None:
            return None
        return int(self._image_ids[images[0]]), wording

    def _wording_of(self, row: Judgement) -> str | None:
        if row.caption is not None:
            text = single_spaced(row.caption)
            if text not in self._known and self._processor is not None:
                text = single_spaced(self._processor(row.caption))
            return text if text in self._known else None
        assert row.caption_of is not None and row.caption_index is not None
        own = self.samples_of(row.caption_of)
        if not own:
            return None
        if row.caption_index >= len(own):
            raise ValueError(
                f"{row.caption_of!r} has {len(own)} captions in the data, so there is no "
                f"caption_index {row.caption_index} (counted from 0)"
            )
        return self.wordings[own[row.caption_index]]


def _parts(path: str) -> tuple[str, ...]:
    """Return the parts of a path, without empty ones and dots."""
    return tuple(part for part in path.replace("\\", "/").split("/") if part not in ("", ".")) or (
        "",
    )
