"""Read `.npz` files that may come from someone else."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_npz(path: str | os.PathLike[str], *names: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file of `numpy.savez`, all or those of ``names``.

    They take no more memory than the file has bytes: arrays that are compressed, or larger than
    what is stored of them, are refused before memory is asked for. No pickle is read.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming the file, if it is not one of `numpy.savez`, or lacks one of ``names``.
    """
    try:
        with zipfile.ZipFile(path) as file:
            members = {one.filename.removesuffix(".npy"): one for one in file.infolist()}
            if sum(one.file_size for one in members.values()) > os.path.getsize(path):
                raise ValueError("its arrays are larger than the file")
            return {name: _read(file, members[name]) for name in names or members}
    except KeyError as error:
        raise ValueError(f"{path} has no array {error}") from error
    # A damaged zip raises classes of its own, and NotImplementedError for an unknown compression.
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise ValueError(f"{path} is not a file of arrays (.npz): {error}") from error


def _read(file: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """Read one array, whose header must ask for exactly the bytes that follow it."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{member.filename} is compressed")
    with file.open(member) as stored:
        version = np.lib.format.read_magic(stored)
        header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if header is None:
            raise ValueError(f"{member.filename} has the unknown version {version}")
        shape, fortran, dtype = header(stored)
        content = bytearray(stored.read())  # so that the array can be written to
    if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"{member.filename} has the type {dtype}, expected plain numbers or text")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(
            f"{member.filename} has {len(content)} bytes, but its header names {shape} of {dtype}"
        )
    found: NDArray[Any] = np.frombuffer(content, dtype)
    return found.reshape(shape, order="F" if fortran else "C")
