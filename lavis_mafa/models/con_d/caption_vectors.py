"""Vectors of captions: from word statistics of the captions, a sentence encoder, or a file.

Word statistics need no download and no language. Words are compared by the other words that their
images' captions contain: word vectors span the leading eigenvectors of the positive pointwise
mutual information (PPMI) of words in the captions of one image; a caption is the sum of its words'
vectors, weighted by log inverse document frequency (idf).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from lavis_mafa.models.con_d.cross_encoder import NOT_LOADED, problem_of_package
from lavis_mafa.models.con_d.pair_reader import PLACE, first_line

_WORDS = 10_000  # the most frequent ones have vectors: their PPMI needs at most about 1 GB
# Chosen on the 1,000 validation images of Flickr8k, without the judgements of its test images, by
# the AUC of an image's held-out caption against captions of other images: .986 with 128 dimensions,
# .987 with 256 and .988 with 512; idf to the power .5: .986, 1: .987, 1.25: .987.
_DIMENSIONS = 256
_ITERATIONS = 8  # of subspace iteration; AUC does not change from 4 on
_GRAMS = (2, 3)


def words_of(caption: str) -> list[str]:
    """Return the words of a caption, separated by spaces."""
    return caption.split()


def characters_of(caption: str) -> list[str]:
    """Return the sequences of two and three characters of a caption, with a space at both ends."""
    text = f" {caption} "
    return [text[k : k + n] for n in _GRAMS for k in range(len(text) - n + 1)]


def word_statistics(
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
        units: `words_of` or `characters_of`.

    Raises:
        ValueError: if no two words occur in several captions.
    """
    # Not sets: the order of equally frequent words must be the same on all ranks.
    found = Counter(chain.from_iterable(dict.fromkeys(units(one)) for one in captions))
    known = [(word, count) for word, count in found.most_common(_WORDS) if count > 1]
    if len(known) < 2:
        raise ValueError(
            f"{PLACE}.arch is captions, but the training data have {len(known)} words that occur "
            "in several captions, expected at least 2; set captions.units: characters, or name "
            "a model of sentence-transformers as checkpoint"
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


def sentence_vectors(captions: Sequence[str], path: str) -> NDArray[Any]:
    """Return vectors ``(U, E)`` float32 of captions by a model of sentence-transformers; no code
    that comes with it is run.

    Raises:
        ValueError: if it cannot be loaded.
    """
    if problem := problem_of_package("captions"):
        raise ValueError(f"{PLACE}.arch: {problem}")
    from sentence_transformers import SentenceTransformer

    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    try:
        encoder = SentenceTransformer(path, device=device, trust_remote_code=False)
    except NOT_LOADED as error:
        raise ValueError(
            f"{PLACE}.checkpoint: {path} is no sentence encoder that sentence-transformers can "
            f"load ({first_line(error)})"
        ) from error
    found = encoder.encode(list(captions), batch_size=64, show_progress_bar=False)
    return np.asarray(found, np.float32)


def stored_vectors(path: str, samples: int) -> NDArray[Any]:
    """Return the vectors ``(N, E)`` in an .npy file, memory-mapped.

    Raises:
        OSError, ValueError: if it is no such file, or has not as many rows as there are samples.
    """
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    if found.ndim != 2 or len(found) != samples or found.dtype.kind != "f":
        raise ValueError(
            f"{PLACE}.captions.vectors: {path} has {found.dtype} numbers of shape {found.shape}, "
            f"expected real ones of shape ({samples}, E): the vector of every pair's caption, in "
            "the order of the training data"
        )
    return np.asarray(found)


def centred(vectors: NDArray[Any]) -> NDArray[Any]:
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
