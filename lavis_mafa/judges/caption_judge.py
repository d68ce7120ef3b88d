"""Con-D that compares captions: a caption matches an image if it is like the image's own ones.

Vectors of captions come from word statistics, a sentence encoder or a file. Word statistics need no
download and no language. Words are compared by the other words that their images' captions contain:
word vectors span the leading eigenvectors of the positive pointwise mutual information (PPMI) of
words in the captions of one image; a caption is the sum of its words' vectors, weighted by log
inverse document frequency (idf).
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from lavis_mafa.algorithm.options import option
from lavis_mafa.data.caption_truth import normalised
from lavis_mafa.judges.cross_encoder import problem_of_package
from lavis_mafa.judges.discriminators import DISCRIMINATORS, SampleJudge
from lavis_mafa.judges.pair_reader import PLACE, explain_not_loaded

_NAME = "captions"
_WORDS = 10_000  # the most frequent ones have vectors: their PPMI needs at most about 1 GB
# Chosen on the 1,000 validation images of Flickr8k, without the judgements of its test images, by
# the AUC of an image's held-out caption against captions of other images: .986 with 128 dimensions,
# .987 with 256 and .988 with 512; idf to the power .5: .986, 1: .987, 1.25: .987.
_DIMENSIONS = 256
_ITERATIONS = 8  # of subspace iteration; AUC does not change from 4 on
_GRAMS = (2, 3)
_SEVERAL = 0.1  # share of images with several captions from which on these give the scale
_SCALE, _AMONG = 10_000, 1_000  # most captions with their own images, and with nearest others
_AT = (0.5, 0.8)  # quantiles of the scale, and the probabilities there
_CHUNK = 4096  # pairs compared at once


def _words_of(caption: str) -> list[str]:
    """Return the words of a caption, separated by spaces."""
    return caption.split()


def _characters_of(caption: str) -> list[str]:
    """Return the sequences of two and three characters of a caption, with a space at both ends."""
    text = f" {caption} "
    return [text[k : k + n] for n in _GRAMS for k in range(len(text) - n + 1)]


_UNITS = {"words": _words_of, "characters": _characters_of}


@dataclass(frozen=True)
class _CaptionSettings:
    """Settings of `_CaptionJudge`."""

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
class _CaptionJudge(SampleJudge):
    """A judge that needs no training: is a caption like an image's own captions?

    The similarity of an image and a caption is the mean of two figures: the highest and the mean
    cosine of the caption with the image's captions, except captions of the same wording. P(match)
    is a logistic function of it that is .5 at the median and .8 at the 80 % quantile of a scale, so
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
    def from_config(cls, cfg: Mapping[str, Any], settings: _CaptionSettings) -> _CaptionJudge:
        """Return the judge of a ``model.mafa.con_d`` config.

        Raises:
            ValueError: if the config names vectors of captions and a model that makes them.
        """
        if cfg.get("checkpoint") and settings.vectors:
            raise ValueError(
                f"{PLACE}.{_NAME}.vectors: {PLACE}.checkpoint also gives the vectors of captions; "
                "remove one of them"
            )
        return cls(settings, cfg.get("checkpoint"))

    def know(self, train_set: Any) -> None:
        """Compute the vectors of the captions of a training set, and the scale.

        Raises:
            ValueError: if captions cannot be compared; see `_word_statistics`.
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
            vectors = _stored_vectors(self.settings.vectors, len(text))[rows]
        elif self.checkpoint:
            vectors = _sentence_vectors(wordings, self.checkpoint)
        else:
            units = _UNITS[self.settings.units]
            vectors = _word_statistics(list(place), owner, self._caption, units)
        self._vectors = _centred(vectors)
        self._middle, high = np.quantile(self._scale(), _AT)
        self._slope = np.log(_AT[1] / (1 - _AT[1])) / max(high - self._middle, 1e-3)

    def _scale(self) -> NDArray[Any]:
        """Return the similarities that probabilities refer to, see `_CaptionJudge`."""
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


def _word_statistics(
    captions: Sequence[str],
    image_of: NDArray[Any],
    caption_of: NDArray[Any],
    units: Callable[[str], list[str]],
) -> NDArray[Any]:
    """Return vectors ``(U, E)`` float32 of captions from how words occur together; zero for a
    caption that shares no word with another one.

    Args:
        captions: U distinct ones.
        image_of, caption_of: ``(P,)`` distinct pairs: the image, from 0 on, has the caption.
        units: `_words_of` or `_characters_of`.

    Raises:
        ValueError: if no two words occur in several captions.
    """
    # Not sets: the order of equally frequent words must be the same on all ranks.
    found = Counter(chain.from_iterable(dict.fromkeys(units(one)) for one in captions))
    known = [(word, count) for word, count in found.most_common(_WORDS) if count > 1]
    if len(known) < 2:
        raise ValueError(
            f"{PLACE}.arch is captions, but the training data have {len(known)} words that occur "
            "in several captions, expected at least 2; set captions.units: characters (--judge "
            "captions:characters), or name a model of sentence-transformers as checkpoint"
        )
    place = {word: k for k, (word, _) in enumerate(known)}
    flat, ends = array("i"), array("q", [0])
    for caption in captions:
        flat.extend(place[word] for word in units(caption) if word in place)
        ends.append(len(flat))
    shape = (len(captions), len(known))
    counts = csr_matrix((np.ones(len(flat), np.float32), flat, ends), shape)
    owns = csr_matrix((np.ones(len(image_of), np.float32), (image_of, caption_of)))
    by_image = owns @ counts
    together = (by_image.T @ by_image).tocoo()
    total = np.asarray(together.sum(axis=0)).reshape(-1)
    ppmi = np.log(together.data * total.sum() / (total[together.row] * total[together.col]))
    together.data = np.maximum(ppmi, 0).astype(np.float32)
    matrix = together.tocsr()
    matrix.eliminate_zeros()
    # Subspace iteration. Cosines depend on the subspace only, not on a basis of it.
    size = (len(known), min(_DIMENSIONS, len(known)))
    basis = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    for _ in range(_ITERATIONS):
        basis, _ = np.linalg.qr(matrix @ basis)
    idf = np.log(len(captions) / np.array([count for _, count in known], np.float32))
    return np.asarray(counts @ (_unit(basis) * idf[:, None]))


def _sentence_vectors(captions: Sequence[str], path: str) -> NDArray[Any]:
    """Return vectors ``(U, E)`` float32 of captions by a model of sentence-transformers; no code
    that comes with it is run.

    Raises:
        ValueError: if it cannot be loaded.
    """
    if problem := problem_of_package("captions"):
        raise ValueError(f"{PLACE}.arch: {problem}")
    from sentence_transformers import SentenceTransformer

    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    with explain_not_loaded(path, "is not a sentence encoder that sentence-transformers can load"):
        encoder = SentenceTransformer(path, device=device, trust_remote_code=False)
    found = encoder.encode(list(captions), batch_size=64, show_progress_bar=False)
    return np.asarray(found, np.float32)


def _stored_vectors(path: str, samples: int) -> NDArray[Any]:
    """Return the vectors ``(N, E)`` in an .npy file, memory-mapped.

    Raises:
        OSError, ValueError: if it is not such a file, or does not have one row per sample.
    """
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    if found.ndim != 2 or len(found) != samples or found.dtype.kind != "f":
        raise ValueError(
            f"{PLACE}.captions.vectors: {path} has {found.dtype} numbers of shape {found.shape}, "
            f"expected real ones of shape ({samples}, E): the vector of every pair's caption, in "
            "the order of the training data"
        )
    return np.asarray(found)


def _centred(vectors: NDArray[Any]) -> NDArray[Any]:
    """Return vectors ``(U, E)`` float16 of length 1 around their mean; zero ones remain zero.

    What all captions share says nothing about any of them: on Flickr8k's validation images the AUC
    (see `_DIMENSIONS`) rises by .007 with word statistics and by .001 with MiniLM.

    Raises:
        ValueError: if a number is not finite.
    """
    found = _unit(np.asarray(vectors, np.float32))
    if not np.isfinite(found).all():
        raise ValueError(f"{PLACE}.captions: some vectors of captions are NaN or infinite")
    known = found.any(axis=1)
    found[known] -= found[known].mean(axis=0)
    return np.asarray(_unit(found).astype(np.float16))


def _unit(vectors: NDArray[Any]) -> NDArray[Any]:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
