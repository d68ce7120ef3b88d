"""Record which model and data a folder of results was made from, and check it before reuse."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lavis_mafa.io.files import write_json
from lavis_mafa.io.processes import barrier, is_main_process

IDENTITY_FILE = "identity.json"
_HASHED_PER_TENSOR = 4096  # elements of each weight tensor that `fingerprint` hashes, at least


def fingerprint(model: torch.nn.Module) -> str:
    """Return a short identity of a model's weights; equal weights give equal identities."""
    return f"{type(model).__name__} {weights_digest(model.state_dict())}"


def weights_digest(state: Mapping[str, torch.Tensor]) -> str:
    """Return a short hash of a state dict; equal weights give equal hashes."""
    return digest(*_sampled_weights(state))


def _sampled_weights(state: Mapping[str, torch.Tensor]) -> Iterator[npt.NDArray[Any]]:
    for name, value in state.items():
        yield np.frombuffer(name.encode(), np.uint8)
        # Every k-th element only: hashing all of a billion weights would take seconds to minutes,
        # and training or loading another checkpoint changes practically all of them.
        stride = max(1, value.numel() // _HASHED_PER_TENSOR)
        yield value.detach().flatten()[::stride].float().cpu().numpy()


def digest(*arrays: npt.NDArray[Any]) -> str:
    """Return a short hash of the content of arrays."""
    found = hashlib.sha256()
    for array in arrays:
        # Contiguous first: the bytes of a view would depend on how it was cut.
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def claim_folder(folder: Path, identity: Mapping[str, str]) -> None:
    """Check the identity of a folder, then record it on the main process; all ranks must call it.

    Raises:
        ValueError: if the folder has another identity.
    """
    check_identity(folder, identity)
    barrier()  # every rank has read the old file before the main process replaces it
    if is_main_process():
        write_json(folder / IDENTITY_FILE, identity)
    barrier()


def check_identity(folder: Path, identity: Mapping[str, str]) -> None:
    """Refuse a folder that records another identity; one without an identity file is accepted.

    Raises:
        ValueError: naming every entry that differs, or if the identity file is damaged.
    """
    path = folder / IDENTITY_FILE
    if not path.is_file():
        return
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}), so the identity of {folder} is unknown: "
            "remove that folder"
        ) from error
    wrong = [name for name, value in identity.items() if found.get(name) != value]
    if wrong:
        differences = "; ".join(
            f"{name}: {found.get(name)} recorded, {identity[name]} expected" for name in wrong
        )
        raise ValueError(
            f"{folder} was written for something else ({differences}). Use another folder, or "
            "remove this one"
        )
