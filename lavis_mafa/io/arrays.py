"""Read `.npz` files that may come from someone else."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_npz(path: str | os.PathLike[str], *names: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file of `numpy.savez`, all or those of ``names``; no pickle is read.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming the file, if it is not one of `numpy.savez`, or lacks one of ``names``.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in names if name not in file.files]
            found = {name: file[name] for name in names or file.files if name not in missing}
    except OSError:
        raise
    # A damaged file makes NumPy raise nearly anything; a wrong header asks for too much memory.
    except Exception as error:
        raise ValueError(
            f"{path} is not a file of arrays (.npz), or is damaged: expected plain numbers and "
            "texts as numpy.savez writes them"
        ) from error
    if missing:
        raise ValueError(f"{path} has no array {missing[0]!r}")
    return found
