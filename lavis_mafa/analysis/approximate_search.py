"""Find similar candidates by an index of the optional package faiss."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import get_rank, get_world_size
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.pickers import NONE
from lavis_mafa.analysis.loading import log_on_main
from lavis_mafa.analysis.neighbour_search import ExactSearch, Found, largest
from lavis_mafa.analysis.search_spaces import PROBES
from lavis_mafa.io.files import atomic_write
from lavis_mafa.io.processes import barrier, progress
from lavis_mafa.loggers.base import is_installed

PACKAGE, INSTALL = "faiss", 'pip install "faiss-cpu>=1.8"'
MAX_LISTS = 65536
TRAINED_ON = 64  # vectors for every list
AT_ONCE = 65536  # vectors that are added at once
COMPARED = 64  # anchors whose candidates are compared by one matrix product


def require_faiss() -> None:
    """Raise a ValueError if faiss is not installed."""
    if not is_installed(PACKAGE):
        raise ValueError(
            f"--index faiss needs the package {PACKAGE}, which is not installed; {INSTALL}, or use "
            "--index exact"
        )


class FaissSearch:
    """Look up candidates in an inverted index with 8-bit vectors, then compare these exactly.

    Of a family with several vectors for an image, such as BLIP-2, the index has the one that GRIT
    groups by; the comparison uses all of them. The index files are mapped into memory by all ranks.

    Args:
        exact: compares the candidates that the index proposes, and has features and labels.
        folder: of the index files; existing ones are reused.
        probes: lists of the index that a query reads: more find more, in more time.
        seed: of the vectors that the lists are made from.
    """

    def __init__(self, exact: ExactSearch, folder: Path, probes: int = PROBES, seed: int = 0):
        self.exact = exact
        vectors = {True: exact.features.vectors, False: exact.features.texts}
        paths = {True: folder / "index_images.faiss", False: folder / "index_texts.faiss"}
        missing = [images for images, path in paths.items() if not path.is_file()]
        barrier()  # every rank knows what is missing before the first file is written
        for images in missing[get_rank() :: get_world_size()]:
            _write_index(paths[images], vectors[images], seed)
        barrier()
        self.vectors = vectors
        self.indexes = {images: _read_index(path, probes) for images, path in paths.items()}

    def find(self, rows: NDArray[Any], from_image: bool, k: int) -> Found:
        """Return about the ``k`` most similar candidates, see `Search.find`."""
        queries = self.vectors[from_image][torch.from_numpy(rows)].float().numpy()
        # More than k, as known positives are among them and 8 bits confuse close candidates.
        _, proposed = self.indexes[not from_image].search(queries, 4 * k + 32)
        proposed = np.sort(proposed, axis=1)  # so that ties are resolved by position
        parts = [
            self._compare(rows[a : a + COMPARED], proposed[a : a + COMPARED], from_image, k)
            for a in range(0, len(rows), COMPARED)
        ]
        places, values = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return places, values

    def _compare(
        self, rows: NDArray[Any], proposed: NDArray[Any], from_image: bool, k: int
    ) -> Found:
        candidates = np.unique(proposed[proposed >= 0])
        if not len(candidates):
            return torch.full((len(rows), k), NONE), torch.full((len(rows), k), float("-inf"))
        anchors = self.exact.rows_of(rows, from_image)
        sim = self.exact.compare(rows, anchors, candidates, from_image).cpu()
        column = torch.from_numpy(np.searchsorted(candidates, proposed.clip(min=candidates[0])))
        given = torch.from_numpy(proposed)
        values, order = largest(sim.gather(1, column).masked_fill(given < 0, float("-inf")), k)
        places = given.gather(1, order).masked_fill(values.isneginf(), NONE)
        return places, values


def _write_index(path: Path, vectors: Tensor, seed: int) -> None:
    faiss: Any = import_module(PACKAGE)
    size, width = vectors.shape
    lists = max(1, min(MAX_LISTS, round(4 * size**0.5), size // 39))  # faiss warns below 39 a list
    index = faiss.index_factory(width, f"IVF{lists},SQ8", faiss.METRIC_INNER_PRODUCT)
    count = min(size, max(256, TRAINED_ON * lists))
    some = np.sort(np.random.default_rng((seed, 5)).choice(size, count, replace=False))
    log_on_main("%s: %d vectors in %d lists", path.name, size, lists)
    index.train(vectors[torch.from_numpy(some)].float().numpy())
    for part in progress(vectors.split(AT_ONCE), desc=path.name, unit=" parts"):
        index.add(part.float().contiguous().numpy())
    with atomic_write(path) as file:
        faiss.write_index(index, file.name)


def _read_index(path: Path, probes: int) -> Any:
    faiss: Any = import_module(PACKAGE)
    index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    index.nprobe = min(probes, index.nlist)
    return index


def recall(exact: Sequence[Found], found: Sequence[Found]) -> tuple[int, int]:
    """Return how many of the exact neighbours were found, and how many there are.

    A neighbour that is exactly as similar as the last exact one counts as found: which of several
    equally similar ones is listed does not matter.

    Args:
        exact, found: positions and similarities ``(A, k)`` of the same anchors.
    """
    hits = total = 0
    for (_, wanted), (places, values) in zip(exact, found, strict=True):
        there = ~wanted.isneginf()
        last = wanted.masked_fill(~there, float("inf")).amin(dim=1, keepdim=True)
        # Products of other sizes round differently, by a few units of the last place.
        good = (places != NONE) & (values >= last - 1e-6)
        hits += int(torch.minimum(good.sum(dim=1), there.sum(dim=1)).sum())
        total += int(there.sum())
    return hits, total
