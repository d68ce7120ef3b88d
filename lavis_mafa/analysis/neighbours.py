"""Hard negatives of every anchor from the whole data set instead of a mini-batch."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lavis.common.dist_utils import get_rank, get_world_size
from numpy.typing import NDArray

from lavis_mafa.algorithm.mining import DIRECTIONS
from lavis_mafa.algorithm.pickers import NONE
from lavis_mafa.analysis.approximate_search import FaissSearch, recall, require_faiss
from lavis_mafa.analysis.corpus import Corpus
from lavis_mafa.analysis.features import Features
from lavis_mafa.analysis.hard_negatives import HardNegatives, groups_of
from lavis_mafa.analysis.loading import ModelAndData, log_on_main, require_range
from lavis_mafa.analysis.neighbour_search import ExactSearch, Found, Search
from lavis_mafa.analysis.search_spaces import ALL, EXACT, FAISS, PROBES
from lavis_mafa.io.files import atomic_write
from lavis_mafa.io.identity import claim_folder, digest
from lavis_mafa.io.processes import all_gather_objects, barrier, progress
from lavis_mafa.models.families import backbone_of

ANCHORS = 8192  # in a chunk, after which its neighbours are saved
LEAST_CHUNKS = 16  # of a direction, so that ranks have something to share
RECALL_ANCHORS = 1000  # of each direction, whose exact neighbours are compared with the index's
FROM_IMAGE = {"i2t": True, "t2i": False}
assert FROM_IMAGE.keys() == DIRECTIONS.keys()


@dataclass(frozen=True)
class WholeCorpus:
    """All samples as the search space: there are no mini-batches.

    Attributes:
        neighbours: K, most similar candidates of every anchor.
        index: `EXACT` or `FAISS`.
        probes: lists that a query of the index reads.
    """

    neighbours: int
    index: str = EXACT
    probes: int = PROBES
    batch_size: None = None
    search_space: None = None

    @property
    def kind(self) -> str:
        """Name of the sampling in files and tables."""
        return ALL if self.index == EXACT else f"{ALL}_{self.index}"

    @property
    def name(self) -> str:
        """Short name for files and tables, with K."""
        return name_of(self.kind, self.neighbours)


def name_of(kind: str, neighbours: int) -> str:
    """Return `WholeCorpus.name`."""
    return f"{kind}_K{neighbours}"


class Neighbours(NamedTuple):
    """What a search has found.

    Attributes:
        negatives: in both directions; ``batch`` is the position of the anchor, so that intervals
            treat anchors as independent.
        recall: share of the exact neighbours that an index found, 0 to 1, and ``anchors``, the
            number of anchors in each direction that it was measured on; {} for an exact search.
    """

    negatives: HardNegatives
    recall: dict[str, float]


def check_arguments(args: argparse.Namespace, whole: bool) -> None:
    """Check ``--neighbours``, ``--index`` and ``--probes``.

    Args:
        whole: whether the whole data set is a search space.

    Raises:
        ValueError: for values out of range, options that have no effect, or without faiss.
    """
    require_range(args, neighbours=(1,), probes=(1,))
    names = ("neighbours", "index", "probes")
    given = [f"--{name}" for name in names if getattr(args, name) is not None]
    if given and not whole:
        raise ValueError(
            f"{', '.join(given)} without the whole data set as a search space: add {ALL} to the "
            "search spaces, or leave it out"
        )
    if args.probes is not None and args.index != FAISS:
        raise ValueError(f"--probes {args.probes} without an index: add --index {FAISS}")
    if args.index == FAISS:
        require_faiss()


def whole_corpus(args: argparse.Namespace, neighbours: int) -> WholeCorpus:
    """Return the settings of the command line; ``neighbours`` is the default."""
    return WholeCorpus(args.neighbours or neighbours, args.index or EXACT, args.probes or PROBES)


def find_neighbours(
    loaded: ModelAndData,
    features: Features,
    whole: WholeCorpus,
    folder: Path,
    labels: Sequence[NDArray[Any]],
    seed: int = 0,
) -> Neighbours:
    """Return the most similar candidates of all anchors, as sample numbers.

    Chunks that are in ``folder`` already are not searched again. All ranks must call this function;
    they share the anchors through ``folder``.

    Args:
        folder: its subfolder with the name of ``whole`` keeps the chunks, and the index.
        labels: ``(S,)``, see `ExactSearch`.
        seed: of the anchors that recall is measured on.

    Raises:
        ValueError: if the folder has neighbours of other features or settings.
    """
    folder = folder / whole.name
    folder.mkdir(parents=True, exist_ok=True)
    exact = ExactSearch(features, backbone_of(loaded.model).similarity, labels, loaded.device)
    claim_folder(folder, _identity(whole, features, exact.labels, seed))
    search: Search = exact
    if whole.index == FAISS:
        search = FaissSearch(exact, folder, whole.probes, seed)
    search_chunks(search, len(features), whole.neighbours, folder)
    barrier()
    found = negatives_of(len(features), folder)
    measured = {}
    if search is not exact:
        measured = measure_recall(exact, search, len(features), whole.neighbours, seed)
        log_on_main("%s", recall_text(measured))
    found.image, found.text = features.numbers[found.image], features.numbers[found.text]
    return Neighbours(found, measured)


def chunks_of_anchors(size: int) -> list[tuple[str, NDArray[Any], str]]:
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


def search_chunks(search: Search, size: int, k: int, folder: Path) -> None:
    """Search this rank's share of the chunks that have no file in ``folder`` yet."""
    todo = [one for one in chunks_of_anchors(size) if not (folder / one[2]).is_file()]
    barrier()  # every rank has the same list before the first file is written
    todo = todo[get_rank() :: get_world_size()]
    total = sum(len(rows) for _, rows, _ in todo)
    log_on_main("neighbours of %d anchors on this rank among %d samples", total, size)
    with progress(desc="neighbours", total=total, unit=" anchors") as bar:
        for direction, rows, name in todo:
            places, similarity = search.find(rows, FROM_IMAGE[direction], k)
            with atomic_write(folder / name) as file:
                np.savez(file, places=places.numpy(), similarity=similarity.numpy())
            bar.update(len(rows))


def negatives_of(size: int, folder: Path) -> HardNegatives:
    """Read the neighbours of all chunks; ``image`` and ``text`` are positions."""
    parts = []
    for direction, rows, name in chunks_of_anchors(size):
        with np.load(folder / name, allow_pickle=False) as stored:
            places = stored["places"]
        row, column = np.nonzero(places != NONE)
        anchors, found = rows[row], places[row, column]
        from_image = FROM_IMAGE[direction]
        pair = (anchors, found) if from_image else (found, anchors)
        parts.append((*pair, np.full(len(anchors), from_image), anchors))
    return HardNegatives(*map(np.concatenate, zip(*parts, strict=True)))


def measure_recall(exact: Search, search: Search, size: int, k: int, seed: int) -> dict[str, float]:
    """Compare a search with the exact one on a sample of anchors; see `Neighbours.recall`.

    All ranks must call it; they share the anchors.
    """
    chosen = np.random.default_rng((seed, 6)).choice(size, min(RECALL_ANCHORS, size), replace=False)
    rows = np.sort(chosen)[get_rank() :: get_world_size()]
    shares: dict[str, float] = {"anchors": len(chosen)}
    for direction, from_image in FROM_IMAGE.items():
        both: list[list[Found]] = [[one.find(rows, from_image, k)] for one in (exact, search)]
        own = recall(*both) if len(rows) else (0, 0)
        hits, total = np.sum(all_gather_objects(own), axis=0).tolist()
        shares[direction] = hits / total if total else 1.0
    return shares


def group_labels(loaded: ModelAndData, features: Features) -> list[NDArray[Any]]:
    """Return the groups ``(S,)`` of the samples in memory, each sample in none with a number of its
    own; an empty list if groups have no effect."""
    groups = groups_of(loaded, features)
    return [] if groups is None else [np.where(groups < 0, -1 - np.arange(len(groups)), groups)]


def wording_labels(data: Corpus, numbers: NDArray[Any]) -> NDArray[Any]:
    """Return a number ``(S,)`` int64 for each caption, equal for captions that differ in case and
    spaces at most."""
    return np.fromiter((_hash(normalized(data.caption(int(n)))) for n in numbers), np.int64)


def normalized(caption: str) -> str:
    """Return a caption in lower case with single spaces."""
    return " ".join(caption.lower().split())


def _hash(text: str) -> int:
    # 64 bits: among 100 million captions a collision is unlikely, and would cost one candidate.
    content = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(content, "little", signed=True)


def content_of(whole: WholeCorpus, found: Neighbours) -> dict[str, Any]:
    """Return settings and recall for the JSON of a command."""
    content: dict[str, Any] = {"neighbours": whole.neighbours, "index": whole.index}
    if whole.index == FAISS:
        content |= {"probes": whole.probes, "recall": found.recall}
    return content


def notes_of(whole: WholeCorpus, found: Neighbours) -> list[str]:
    """Return the notes for the page of a command."""
    number = "candidate" if whole.neighbours == 1 else f"{whole.neighbours} candidates"
    how = "an exact search" if whole.index == EXACT else "the approximate index faiss"
    note = (
        f"With all samples as the search space, the hard negatives are the {number} most similar "
        f"to every anchor in the whole data set, found by {how}; they are not the pairs that "
        "training sees, which come from a mini-batch."
    )
    return [note, recall_text(found.recall)] if found.recall else [note]


def recall_text(measured: dict[str, float]) -> str:
    """Return recall in words."""
    shares = ", ".join(f"{100 * measured[d]:.1f} % ({name})" for d, name in DIRECTIONS.items())
    return (
        f"The index found {shares} of the exact neighbours of {measured['anchors']:,} random "
        "anchors in each direction. A larger --probes finds more."
    )


def _identity(
    whole: WholeCorpus, features: Features, labels: Sequence[NDArray[Any]], seed: int
) -> dict[str, str]:
    """Return what the neighbours depend on."""
    search = f"{whole.neighbours} neighbours, {whole.index}"
    if whole.index == FAISS:
        search += f", {whole.probes} probes, seed {seed}"
    return {
        **features.identity,
        "search": search,
        "known positives": digest(*map(np.asarray, labels)),
    }


def image_labels(loaded: ModelAndData, features: Features) -> NDArray[Any]:
    """Return the image ids ``(S,)`` of the samples in memory."""
    return np.asarray(loaded.data.image_ids[features.numbers])
