"""Con-D that compares captions: a caption matches an image if it is like the image's own ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.algorithm.options import option
from lavis_mafa.datasets.caption_truth import normalised
from lavis_mafa.models.con_d.caption_vectors import (
    centred,
    characters_of,
    sentence_vectors,
    stored_vectors,
    word_statistics,
    words_of,
)
from lavis_mafa.models.con_d.cross_encoder import problem_of_package
from lavis_mafa.models.con_d.discriminators import DISCRIMINATORS, SampleJudge
from lavis_mafa.models.con_d.pair_reader import PLACE, problems_of_unread
from lavis_mafa.problems import ConfigView, Problem

_NAME = "captions"
_UNITS = {"words": words_of, "characters": characters_of}
_SEVERAL = 0.1  # share of images with several captions from which on these give the scale
_SCALE, _AMONG = 10_000, 1_000  # most captions with their own images, and with nearest others
_AT = (0.5, 0.8)  # quantiles of the scale, and the probabilities there
_CHUNK = 4096  # pairs compared at once


@dataclass(frozen=True)
class _CaptionSettings:
    """Settings of `CaptionJudge`."""

    units: str = option(
        "words",
        "what word statistics count; characters: sequences of two and three, for scripts that put "
        "no spaces between words",
        choices=tuple(_UNITS),
    )
    vectors: str | None = option(
        None,
        "vectors of the captions to use instead, of shape (pairs, any)",
        path=".npy file",
    )


@DISCRIMINATORS.register(_NAME, settings=_CaptionSettings, source="lavis_mafa")
class CaptionJudge(SampleJudge):
    """A judge that needs no training: is a caption like an image's own captions?

    The similarity of an image and a caption is the mean of two figures: the highest and the mean
    cosine of the caption with the image's captions, without those of the same wording. P(match) is
    a logistic function of it that is .5 at the median and .8 at the 80 % quantile of a scale, so
    that ``low`` and ``high`` of `MiningRule` are about these quantiles:

    - If at least a tenth of the images have several captions, the scale is the similarity of their
      captions to the others of the same image.
    - Otherwise it is the cosine of a caption with the most similar one of 1,000 random others.

    P is 1 for a caption whose wording another caption of the image has, and for a pair of the data
    whose image has no other captions. It is not calibrated: a P of .8 does not mean that 80 % of
    such pairs match.

    Args:
        settings: see `_CaptionSettings`.
        checkpoint: sentence encoder, a name or folder; None: word statistics of the captions.
    """

    checkpoint_path: ClassVar[str] = "path or name"

    def __init__(
        self, settings: _CaptionSettings | None = None, checkpoint: str | None = None
    ) -> None:
        self.settings, self.checkpoint = settings or _CaptionSettings(), checkpoint

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any], settings: _CaptionSettings) -> CaptionJudge:
        """Return the judge of a ``model.mafa.con_d`` config."""
        return cls(settings, cfg.get("checkpoint"))

    @classmethod
    def problems_of(cls, cfg: ConfigView) -> Iterator[Problem]:
        """Yield what is wrong with a config."""
        yield from problems_of_unread(cfg, _NAME, "image_size")
        if not cfg[f"{PLACE}.checkpoint"]:
            return
        if cfg.machine and (problem := problem_of_package(_NAME)):
            yield Problem(f"{PLACE}.checkpoint", problem)
        if cfg[f"{PLACE}.{_NAME}.vectors"]:
            why = f"{PLACE}.checkpoint also gives the vectors of captions; remove one of them"
            yield Problem(f"{PLACE}.{_NAME}.vectors", why)

    def know(self, train_set: Any) -> None:
        """Compute the vectors of the captions of a training set, and the scale.

        Raises:
            ValueError: if captions cannot be compared; see `caption_vectors`.
        """
        image = np.unique(train_set.image_ids, return_inverse=True)[1].reshape(-1)
        place: dict[str, int] = {}  # of each distinct caption
        wordings: list[str] = []
        text = np.empty(len(image), np.int64)
        for number in range(len(image)):
            wording = train_set.source(number)[1]
            text[number] = place.setdefault(normalised(wording), len(place))
            if text[number] == len(wordings):
                wordings.append(wording)
        self._image, self._text = image, text
        pairs = np.unique(image * len(place) + text)
        owner, self._caption = pairs // len(place), pairs % len(place)
        self._first = np.searchsorted(owner, np.arange(image.max() + 2))
        if self.settings.vectors is not None:
            rows = np.unique(text, return_index=True)[1]
            vectors = stored_vectors(self.settings.vectors, len(text))[rows]
        elif self.checkpoint:
            vectors = sentence_vectors(wordings, self.checkpoint)
        else:
            units = _UNITS[self.settings.units]
            vectors = word_statistics(list(place), owner, self._caption, units)
        self._vectors = centred(vectors)
        self._middle, high = np.quantile(self._scale(), _AT)
        self._slope = np.log(_AT[1] / (1 - _AT[1])) / max(high - self._middle, 1e-3)

    def _scale(self) -> NDArray[Any]:
        """Return the similarities that probabilities refer to, see `CaptionJudge`."""
        generator = np.random.default_rng(0)
        several = np.diff(self._first) > 1
        if several.mean() >= _SEVERAL:
            rows = np.flatnonzero(several[self._image])
            rows = generator.permutation(rows)[:_SCALE]
            return self._similarity(self._image[rows], self._text[rows])[0]
        logging.info(
            "captions: only %.0f %% of the images have several captions, so that probabilities are "
            "quantiles of the most similar captions of other images",
            100 * several.mean(),
        )
        drawn = generator.permutation(len(self._vectors))[: _AMONG + 1]
        among = self._vectors[drawn].astype(np.float32)
        cosine = among @ among.T
        np.fill_diagonal(cosine, -1)
        return np.asarray(cosine.max(axis=1))

    def probability(self, images: NDArray[Any], texts: NDArray[Any]) -> NDArray[Any]:
        image, text = self._image[images], self._text[texts]
        similarity, has_wording = self._similarity(image, text)
        found = np.exp(-np.logaddexp(0, -self._slope * (similarity - self._middle)))
        found[has_wording & (self._image[texts] != image)] = 1
        return found

    def _similarity(
        self, image: NDArray[Any], text: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the similarity ``(P,)`` of images and captions, infinite without other ones, and
        whether the image has the caption."""
        found, has_wording = np.empty(len(image), np.float32), np.empty(len(image), bool)
        for begin in range(0, len(image), _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            first, size = self._first[image[chunk]], len(image[chunk])
            count = self._first[image[chunk] + 1] - first
            # All captions of all images, one after the other.
            row = np.repeat(np.arange(size), count)
            offset = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
            other, own = self._caption[first[row] + offset], text[chunk][row]
            cosine = np.einsum(
                "ne,ne->n", self._vectors[other], self._vectors[own], dtype=np.float32
            )
            same = other == own
            row, cosine = row[~same], cosine[~same]
            has_wording[chunk] = count > (number := np.bincount(row, minlength=size))
            most = np.full(size, -np.inf, np.float32)
            np.maximum.at(most, row, cosine)
            mean = np.bincount(row, cosine, size) / np.maximum(number, 1)
            found[chunk] = np.where(number > 0, (most + mean) / 2, np.inf)
        return found, has_wording
