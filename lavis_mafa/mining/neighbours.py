"""Hard negatives of every anchor from the whole data set instead of a mini-batch."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import get_rank, get_world_size
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.corpus_mining import MAX_SIMILARITIES, largest
from lavis_mafa.algorithm.mining import DIRECTIONS
from lavis_mafa.algorithm.pickers import NONE
from lavis_mafa.io.arrays import read_npz
from lavis_mafa.io.files import atomic_write
from lavis_mafa.io.identity import claim_folder, digest
from lavis_mafa.io.processes import barrier, progress
from lavis_mafa.mining import ALL
from lavis_mafa.mining.features import Features
from lavis_mafa.mining.hard_negatives import HardNegatives, Sampling, Similarity, groups_of
from lavis_mafa.mining.model_and_data import ModelAndData, log_on_main, require_range
from lavis_mafa.models.families import backbone_of

ANCHORS = 8192  # in a chunk, after which its neighbours are saved
LEAST_CHUNKS = 16  # of a direction, so that ranks have something to share
_FROM_IMAGE = {"i2t": True, "t2i": False}
assert _FROM_IMAGE.keys() == DIRECTIONS.keys()
_Found = tuple[Tensor, Tensor]


def note_of(whole: Sampling) -> str:
    """Return what the pairs of the whole data set are, for the page of a command."""
    k = whole.neighbours
    number = "candidate" if k == 1 else f"{k} candidates"
    return (
        f"With all samples as the search space, the hard negatives are the {number} most "
        "similar to every anchor in the whole data set; they are not the pairs that training "
        "sees, which come from a mini-batch."
    )


def whole_corpus(args: argparse.Namespace, whole: bool, neighbours: int) -> Sampling | None:
    """Return the settings of the command line; None unless the whole data set is searched.

    Args:
        neighbours: default of ``--neighbours``.

    Raises:
        ValueError: for values out of range, or without effect.
    """
    require_range(args, neighbours=(1,))
    if args.neighbours is not None and not whole:
        raise ValueError(
            "--neighbours without the whole data set as a search space: add "
            f"{ALL} to the search spaces, or leave it out"
        )
    return Sampling(ALL, None, neighbours=args.neighbours or neighbours) if whole else None


def find_neighbours(
    loaded: ModelAndData, features: Features, whole: Sampling, folder: Path, new_only: bool = False
) -> HardNegatives:
    """Return the most similar candidates of all anchors, as sample numbers.

    ``batch`` is the position of the anchor, so that intervals treat anchors as independent. Chunks
    that are in ``folder`` already are not searched again. All ranks must call this function; they
    share the anchors through ``folder``.

    Args:
        folder: its subfolder with the name of ``whole`` keeps the chunks.
        new_only: never find what would not be a new pair of the anchor: another caption of its
            image, whatever the config says, or a caption of its own wording.

    Raises:
        ValueError: if the folder has neighbours of other features or settings.
    """
    folder = folder / whole.name
    folder.mkdir(parents=True, exist_ok=True)
    assert whole.neighbours is not None
    labels = _labels(loaded, features, new_only)
    search = _ExactSearch(features, backbone_of(loaded.model).similarity, labels, loaded.device)
    identity = {
        **features.identity,
        "search": f"{whole.neighbours} neighbours",
        "known positives": digest(*map(np.asarray, search.labels)),
    }
    claim_folder(folder, identity)
    _search_chunks(search, len(features), whole.neighbours, folder)
    barrier()
    found = _negatives_of(len(features), folder)
    found.image, found.text = features.numbers[found.image], features.numbers[found.text]
    return found


def _labels(loaded: ModelAndData, features: Features, new_only: bool) -> list[NDArray[Any]]:
    """Return arrays ``(S,)`` of numbers that known positives share."""
    mafa = loaded.cfg.model_cfg.get("mafa") or {}
    labels: list[NDArray[Any]] = []
    if new_only or mafa.get("same_image", "positive") == "positive":
        labels.append(np.asarray(loaded.data.image_ids[features.numbers]))
    if new_only:
        captions = (normalized(loaded.data.caption(int(n))) for n in features.numbers)
        labels.append(np.fromiter(map(_hash, captions), np.int64))
    groups = groups_of(loaded, features)
    if groups is not None:  # each sample in none has a number of its own
        labels.append(np.where(groups < 0, -1 - np.arange(len(groups)), groups))
    return labels


def _chunks_of_anchors(size: int) -> list[tuple[str, NDArray[Any], str]]:
    """Return direction, positions and file name of all chunks of ``size`` anchors.

    They do not depend on the number of ranks: a resumed search may have another one, and products
    of equal matrices are equal to the last bit.
    """
    step = max(1, min(ANCHORS, -(-size // LEAST_CHUNKS)))
    return [
        (direction, np.arange(begin, min(begin + step, size)), f"{direction}_{k:06d}.npz")
        for direction in DIRECTIONS
        for k, begin in enumerate(range(0, size, step))
    ]


def _search_chunks(search: _ExactSearch, size: int, k: int, folder: Path) -> None:
    """Search this rank's share of the chunks that have no file in ``folder`` yet."""
    todo = [one for one in _chunks_of_anchors(size) if not (folder / one[2]).is_file()]
    barrier()  # every rank has the same list before the first file is written
    todo = todo[get_rank() :: get_world_size()]
    total = sum(len(rows) for _, rows, _ in todo)
    log_on_main("neighbours of %d anchors on this rank among %d samples", total, size)
    with progress(desc="neighbours", total=total, unit=" anchors") as bar:
        for direction, rows, name in todo:
            places, similarity = search.find(rows, _FROM_IMAGE[direction], k)
            with atomic_write(folder / name) as file:
                np.savez(file, places=places.numpy(), similarity=similarity.numpy())
            bar.update(len(rows))


def _negatives_of(size: int, folder: Path) -> HardNegatives:
    """Read the neighbours of all chunks; ``image`` and ``text`` are positions."""
    parts = []
    for direction, rows, name in _chunks_of_anchors(size):
        places = read_npz(folder / name, "places")["places"]
        row, column = np.nonzero(places != NONE)
        anchors, found = rows[row], places[row, column]
        from_image = _FROM_IMAGE[direction]
        pair = (anchors, found) if from_image else (found, anchors)
        parts.append((*pair, np.full(len(anchors), from_image), anchors))
    return HardNegatives(*map(np.concatenate, zip(*parts, strict=True)))


def normalized(caption: str) -> str:
    """Return a caption in lower case with single spaces."""
    return " ".join(caption.lower().split())


def _hash(text: str) -> int:
    # 64 bits: among 100 million captions a collision is unlikely, and would cost one candidate.
    content = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(content, "little", signed=True)


class _ExactSearch:
    """Compare anchors with every candidate, by one matrix product a chunk of candidates.

    Of equally similar candidates the one with the lower position comes first, whatever the chunks.

    Args:
        features: of S samples, which may be memory-mapped: only a chunk is in memory.
        similarity: of image and text features, such as `Backbone.similarity`; computed in float32.
        labels: arrays ``(S,)``; a candidate that equals the anchor in one of them is a known
            positive and never found. Empty: only the anchor's own pair is one.
        device: where to compare.
    """

    def __init__(
        self,
        features: Features,
        similarity: Similarity,
        labels: Sequence[NDArray[Any]],
        device: torch.device | str = "cpu",
    ) -> None:
        self.features = features
        self.similarity = similarity
        self.labels = [*labels] or [np.arange(len(features))]
        self.device = device

    def find(self, rows: NDArray[Any], from_image: bool, k: int) -> _Found:
        """Return the ``k`` most similar candidates of A anchors, the most similar first.

        Args:
            rows: ``(A,)`` positions of the anchors.
            from_image: whether the anchors are images and the candidates texts, or the reverse.

        Returns:
            Positions ``(A, k)`` int64, `NONE` where no candidate is left, and similarities
            ``(A, k)`` float32, on the CPU.
        """
        size = len(self.features)
        step = max(1, MAX_SIMILARITIES // max(1, len(rows)))
        anchors = self._rows_of(rows, from_image)
        best = torch.full((len(rows), 0), float("-inf"), device=self.device)
        places = torch.full((len(rows), 0), NONE, device=self.device)
        for begin in range(0, size, step):
            sim = self._compare(
                rows, anchors, np.arange(begin, min(begin + step, size)), from_image
            )
            values, columns = largest(sim, k)
            # Earlier candidates come first, so that ties are still resolved by position.
            best, columns_of_both = largest(torch.cat([best, values], dim=1), k)
            places = torch.cat([places, columns + begin], dim=1).gather(1, columns_of_both)
        places = places.masked_fill(best.isneginf(), NONE)
        left = k - best.shape[1]
        best = torch.nn.functional.pad(best, (0, left), value=float("-inf"))
        return torch.nn.functional.pad(places, (0, left), value=NONE).cpu(), best.cpu()

    def _rows_of(self, rows: NDArray[Any], images: bool) -> Tensor:
        """Return the features of samples on the device, in float32."""
        stored = self.features.images if images else self.features.texts
        return stored[torch.from_numpy(rows)].to(self.device).float()

    def _compare(
        self, rows: NDArray[Any], anchors: Tensor, candidates: NDArray[Any], from_image: bool
    ) -> Tensor:
        """Return the similarities ``(A, C)`` of anchors to candidates; -inf for known positives.

        Args:
            rows: ``(A,)`` positions of the anchors.
            anchors: their features.
            candidates: ``(C,)`` positions.
        """
        others = self._rows_of(candidates, not from_image)
        pair = (anchors, others) if from_image else (others, anchors)
        with torch.inference_mode():
            sim = self.similarity(*pair).float()
            sim = sim if from_image else sim.t()
            for label in self.labels:
                own, other = (
                    torch.from_numpy(np.asarray(label[one])).to(self.device)
                    for one in (rows, candidates)
                )
                sim = sim.masked_fill(own[:, None] == other[None, :], float("-inf"))
        return sim
