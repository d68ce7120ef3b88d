"""Encode samples with a model and cache their features and captions in files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from lavis_mafa.algorithm.corpus_mining import MAX_SIMILARITIES
from lavis_mafa.io.files import atomic_write, read_json, read_npz, remove_partial_files, write_json
from lavis_mafa.io.identity import claim_folder, digest
from lavis_mafa.io.processes import barrier, get_rank, get_world_size, on_main_process, progress
from lavis_mafa.tools.analysed_pairs import AnalysedPairs, log_on_main
from lavis_mafa.tools.charts import one_line

# Samples in a file, of which an interruption loses one at most, and files.
_LEAST_BLOCK, _BLOCKS = 256, 1024
_UTF_8 = ("utf-8", "surrogatepass")
_COMPLETE = "samples.json"  # written last: all files are complete if it exists


@dataclass
class Features:
    """Features of S samples; positions 0 to S - 1 index them here.

    Those of `make_features` are memory-mapped files: a slice is read when it is used. Their pages
    are shared by all ranks of a machine and can be dropped by the operating system, so that neither
    the number of ranks nor that of samples is limited by memory.

    Attributes:
        numbers: ``(S,)`` int64, ascending, the sample numbers in the training set.
        images, texts: normalised features ``(S, E)``; images ``(S, Q, E)`` in half precision if
            the model has Q queries for an image.
        vectors: ``(S, E)``, the single vector of each image that GRIT groups by.
        captions: S processed captions.
        unreadable: number and error of each requested sample that could not be read.
    """

    numbers: NDArray[Any]
    images: Tensor
    texts: Tensor
    vectors: Tensor
    captions: Sequence[str]
    unreadable: list[tuple[int, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.numbers)

    def positions(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return the positions 0 to S - 1 of sample numbers; all must be in ``numbers``."""
        return np.searchsorted(self.numbers, numbers)


class _StoredTexts(Sequence[str]):
    """Read-only strings in UTF-8 that stay in a file.

    Args:
        content: bytes of all strings, one after the other.
        ends: ``(S,)`` int64, the byte after the end of each string.
    """

    def __init__(self, content: NDArray[Any], ends: NDArray[Any]) -> None:
        self._content, self._ends = content, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]  # no slices
        place = range(len(self))[index]
        begin = int(self._ends[place - 1]) if place else 0
        # A caption may hold the lone surrogates by which Python stands for invalid bytes.
        return self._content[begin : int(self._ends[place])].tobytes().decode(*_UTF_8)


def make_features(loaded: AnalysedPairs, numbers: NDArray[Any], folder: Path) -> Features:
    """Encode samples; blocks that are in ``folder`` already are not encoded again.

    All ranks must call this function; they share the work through ``folder``, and each maps the
    files of all features into memory instead of holding them.

    Args:
        numbers: ``(S,)`` ascending sample numbers.
        folder: cache of the features.

    Raises:
        ValueError: if ``folder`` holds the features of another model, data set or sample.
    """
    # The identity of the folder hashes the bytes of the numbers, so their type must be fixed.
    numbers = np.asarray(numbers, np.int64)
    folder.mkdir(parents=True, exist_ok=True)
    sample = {"sample": f"{len(numbers)} of them, {digest(numbers)}"}
    claim_folder(folder, {**loaded.identity(), **sample})
    if not (folder / _COMPLETE).is_file():
        step = max(_LEAST_BLOCK, -(-len(numbers) // _BLOCKS))
        blocks = [numbers[i : i + step] for i in range(0, len(numbers), step)]
        paths = [folder / f"block_{k:06d}.npz" for k in range(len(blocks))]
        _encode_missing(loaded, blocks, paths)
        barrier()
        on_main_process(partial(_join_blocks, paths, folder))
    found = _load(folder)
    log_on_main(
        "features of %d samples: %.2f GB in %s, memory-mapped; similarities are held %.2f GB at a "
        "time",
        len(found),
        sum(file.stat().st_size for file in folder.glob("*.bin")) / 1e9,
        folder,
        4 * MAX_SIMILARITIES / 1e9,
    )
    return found


def _encode_missing(
    loaded: AnalysedPairs, blocks: Sequence[NDArray[Any]], paths: Sequence[Path]
) -> None:
    """Encode this rank's share of the blocks that have no file yet."""
    rank, world = get_rank(), get_world_size()
    missing = [k for k in range(rank, len(blocks), world) if not paths[k].is_file()]
    total = sum(len(blocks[k]) for k in missing)
    if total:
        log_on_main("encoding %d of %d samples", total, sum(map(len, blocks)))
    size = loaded.batch_size
    with progress(desc="features", total=total, unit=" samples") as bar:
        for k in missing:
            batches = [blocks[k][i : i + size] for i in range(0, len(blocks[k]), size)]
            arrays = _encode(loaded, batches, bar)
            with atomic_write(paths[k]) as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]


def _encode(
    loaded: AnalysedPairs, batches: Sequence[NDArray[Any]], bar: tqdm
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a block, with a row for each sample that could be read."""
    parts: dict[str, list[NDArray[Any]]] = {}
    captions: list[bytes] = []
    unreadable: list[tuple[int, str]] = []
    for numbers, encoded in zip(batches, loaded.encode(batches), strict=True):
        _require_finite(numbers, encoded.vectors, encoded.texts)
        found = {"vectors": encoded.vectors.float(), "texts": encoded.texts.float()}
        if encoded.images is not None:
            found["images"] = encoded.images.half()
        good = np.array([not error for error in encoded.errors], bool)
        for name, values in found.items():
            parts.setdefault(name, []).append(values.cpu().numpy()[good])
        parts.setdefault("numbers", []).append(numbers[good])
        for number, caption, error in zip(numbers, encoded.captions, encoded.errors, strict=True):
            if error:
                unreadable.append((int(number), error))
            else:
                captions.append(caption.encode(*_UTF_8))
        bar.update(len(numbers))
    return {
        **{name: np.concatenate(values) for name, values in parts.items()},
        "captions": np.frombuffer(b"".join(captions), np.uint8),
        "ends": np.cumsum([len(one) for one in captions], dtype=np.int64),
        "unreadable": np.frombuffer(json.dumps(unreadable).encode(), np.uint8),
    }


def _require_finite(numbers: NDArray[Any], *vectors: Tensor) -> None:
    good = torch.stack([torch.isfinite(v).flatten(1).all(1).cpu() for v in vectors]).all(0)
    if not good.all():
        raise ValueError(
            f"features of samples {numbers[~good.numpy()][:5].tolist()} are NaN or infinite: the "
            "model is damaged, or fp16 overflows (in a config, set run.amp_dtype=bf16)"
        )


def _join_blocks(blocks: Sequence[Path], folder: Path) -> None:
    """Append the arrays of the blocks to one file each, and remove the blocks."""
    arrays: dict[str, list[Any]] = {}  # type and shape of each file
    unreadable: list[Any] = []
    end = 0
    with ExitStack() as files:
        opened: dict[str, Any] = {}
        for path in blocks:
            block = read_npz(path)
            unreadable += json.loads(block.pop("unreadable").tobytes())
            block["ends"] = block["ends"] + end
            end += len(block["captions"])
            for name, values in block.items():
                if name not in opened:
                    opened[name] = files.enter_context(atomic_write(folder / f"{name}.bin"))
                    arrays[name] = [values.dtype.str, 0, *values.shape[1:]]
                opened[name].write(np.ascontiguousarray(values).tobytes())
                arrays[name][1] += len(values)
    write_json(folder / _COMPLETE, {"arrays": arrays, "unreadable": unreadable})
    for path in blocks:
        path.unlink()
    remove_partial_files(folder, "*")


def _load(folder: Path) -> Features:
    """Map the files of `_join_blocks` into memory."""
    try:
        content = read_json(folder / _COMPLETE)
        arrays = {
            name: _mapped(folder / f"{name}.bin", kind, shape)
            for name, (kind, *shape) in content["arrays"].items()
        }
        unreadable = [(int(number), str(error)) for number, error in content["unreadable"]]
        found = Features(
            arrays["numbers"],
            torch.from_numpy(arrays.get("images", arrays["vectors"])),
            torch.from_numpy(arrays["texts"]),
            torch.from_numpy(arrays["vectors"]),
            _StoredTexts(arrays["captions"], arrays["ends"]),
            unreadable,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"the features in {folder} are damaged ({error}): remove the folder, and the samples "
            "are encoded again"
        ) from error
    if unreadable:
        text = "%d samples could not be read, the first: %d (%s); after a repair, remove %s"
        number, problem = unreadable[0]
        log_on_main(text, len(unreadable), number, one_line(problem), folder)
    return found


def _mapped(path: Path, kind: str, shape: Sequence[int]) -> NDArray[Any]:
    if not shape[0]:  # an empty file cannot be mapped
        return np.empty(shape, kind)
    # Copy on write: PyTorch warns of arrays that it cannot write to; nobody does write.
    return np.memmap(path, kind, "c", shape=tuple(shape))
