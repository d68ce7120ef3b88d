"""Join blocks of encoded samples into one file per array, which every rank maps into memory.

The pages of a mapped file are shared by all ranks of a machine and can be dropped by the operating
system, so that neither the number of ranks nor that of samples is limited by memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import get_rank, get_world_size, is_main_process
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.io.arrays import read_npz
from lavis_mafa.io.files import atomic_write, remove_partial_files, write_json
from lavis_mafa.io.processes import barrier

_ARRAYS = ("images", "texts", "vectors")
_NUMBERS = "numbers"  # file of the readable samples' numbers
CAPTIONS, ENDS = "captions.utf8", "caption_ends.npy"
_UTF_8 = ("utf-8", "surrogatepass")
_COMPLETE = "samples.json"  # written last: all files are complete if it exists


class _StoredTexts(Sequence[str]):
    """Read-only strings in UTF-8 that stay in a file.

    Args:
        path: file of all strings, one after the other.
        ends: ``(S,)`` int64, the byte after the end of each string.
    """

    def __init__(self, path: Path, ends: NDArray[Any]) -> None:
        empty = not path.stat().st_size  # an empty file cannot be mapped
        self._bytes = np.empty(0, np.uint8) if empty else np.memmap(path, np.uint8, "r")
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]  # no slices
        place = range(len(self))[index]
        begin = int(self._ends[place - 1]) if place else 0
        # A caption may hold the lone surrogates by which Python stands for invalid bytes.
        return self._bytes[begin : int(self._ends[place])].tobytes().decode(*_UTF_8)


def is_complete(folder: Path) -> bool:
    """Return whether `join_blocks` has finished in a folder."""
    return (folder / _COMPLETE).is_file()


def join_blocks(blocks: Sequence[Path], numbers: NDArray[Any], folder: Path) -> None:
    """Write one file per array from the blocks, without unreadable samples; remove the blocks.

    All ranks must call it when all blocks exist; they share the files. Memory for one array of a
    block is sufficient.

    Args:
        blocks: ``.npz`` files with some of `ARRAYS`, and with ``captions`` and ``errors`` as
            `packed` writes them; their samples in order are those of ``numbers``.
        numbers: ``(S,)`` sample numbers in the training set.
    """
    masks: list[NDArray[Any]] = []  # of each block, which of its samples could be read
    unreadable: list[list[Any]] = []
    begin = 0
    for block in _column(blocks, "errors"):
        errors = _unpacked(block)
        masks.append(np.array([not error for error in errors], bool))
        unreadable += [[int(numbers[begin + k]), error] for k, error in enumerate(errors) if error]
        begin += len(errors)
    good = np.concatenate(masks)
    rows = int(good.sum())
    first = read_npz(blocks[0])
    names = [name for name in _ARRAYS if name in first]

    def write_rows(name: str) -> None:
        parts = (block[own] for block, own in zip(_column(blocks, name), masks, strict=True))
        _write_parts(folder / f"{name}.npy", parts, rows)

    def write_captions() -> None:
        ends, end, position = np.empty(rows, np.int64), 0, 0
        with atomic_write(folder / CAPTIONS) as file:
            for block, own in zip(_column(blocks, "captions"), masks, strict=True):
                for caption, readable in zip(_unpacked(block), own, strict=True):
                    if readable:
                        end += file.write(caption.encode(*_UTF_8))
                        ends[position] = end
                        position += 1
        _write_parts(folder / ENDS, iter([ends]), rows)
        _write_parts(folder / f"{_NUMBERS}.npy", iter([numbers[good]]), rows)

    jobs: list[Callable[[], None]] = [write_captions]
    jobs += [partial(write_rows, name) for name in names]
    for job in jobs[get_rank() :: get_world_size()]:
        job()
    barrier()
    if is_main_process():
        write_json(folder / _COMPLETE, {"samples": len(numbers), "unreadable": unreadable})
        for path in blocks:
            path.unlink()
        remove_partial_files(folder, "*")
    barrier()


def _write_parts(path: Path, parts: Iterator[NDArray[Any]], rows: int) -> None:
    """Write an ``.npy`` file of ``rows`` rows from consecutive parts, of which there is at least
    one."""
    with atomic_write(path) as file:
        for number, part in enumerate(parts):
            if not number:
                shape = (rows, *part.shape[1:])
                descr = np.lib.format.dtype_to_descr(part.dtype)
                header = {"descr": descr, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(np.ascontiguousarray(part).tobytes())


def read_arrays(folder: Path) -> dict[str, Tensor]:
    """Return the arrays of `ARRAYS` that exist, memory-mapped."""
    paths = {name: folder / f"{name}.npy" for name in _ARRAYS}
    # Copy on write: PyTorch warns of arrays that it cannot write to; nobody does write.
    return {
        name: torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
        for name, path in paths.items()
        if path.is_file()
    }


def read_numbers(folder: Path) -> NDArray[Any]:
    """Return the numbers ``(S,)`` of the readable samples, memory-mapped."""
    return np.asarray(np.load(folder / f"{_NUMBERS}.npy", mmap_mode="r", allow_pickle=False))


def read_captions(folder: Path) -> _StoredTexts:
    """Return the captions of the readable samples."""
    ends = np.load(folder / ENDS, mmap_mode="r", allow_pickle=False)
    return _StoredTexts(folder / CAPTIONS, ends)


def read_unreadable(folder: Path) -> list[tuple[int, str]]:
    """Return number and error of each sample that could not be read."""
    content = json.loads((folder / _COMPLETE).read_text(encoding="utf-8"))
    return [(int(number), str(error)) for number, error in content["unreadable"]]


def packed(texts: Iterable[str]) -> NDArray[Any]:
    """Encode strings as the bytes of JSON.

    An array of strings would use the width of the longest string for each of them.
    """
    return np.frombuffer(json.dumps(list(texts)).encode(), np.uint8)


def _unpacked(content: NDArray[Any]) -> list[str]:
    """Decode `packed`."""
    return list(json.loads(content.tobytes().decode()))


def _column(blocks: Sequence[Path], name: str) -> Iterator[NDArray[Any]]:
    for path in blocks:
        yield read_npz(path, name)[name]
