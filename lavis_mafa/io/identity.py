"""What a folder of results belongs to, so that nobody goes on with what is of something else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from lavis.common.dist_utils import is_main_process

from lavis_mafa.io.files import write_json
from lavis_mafa.io.processes import barrier


def fingerprint(model: torch.nn.Module) -> str:
    """A name for a model's weights: equal weights have an equal one."""
    return f"{type(model).__name__} {digest(*_strided(model))}"


def _strided(model: torch.nn.Module) -> Iterator[np.ndarray]:
    for name, value in model.state_dict().items():
        yield np.frombuffer(name.encode(), np.uint8)
        # Some of each: hashing all of a billion weights would take longer than it is worth.
        yield value.detach().flatten()[:: max(1, value.numel() // 4096)].float().cpu().numpy()


def require_same(path: Path, identity: dict[str, str]) -> None:
    """Note on the main process what a folder belongs to; all ranks must call it.

    Raises:
        ValueError: if ``path`` says that it belongs to something else.
    """
    refuse_other(path, identity)
    barrier()
    if is_main_process():
        write_json(path, identity)
    barrier()


def refuse_other(path: Path, identity: dict[str, str]) -> None:
    """Refuse a folder whose file ``path`` says that it belongs to something else."""
    if not path.is_file():
        return
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged, so it is not known what {path.parent} belongs to ({error}): "
            "remove that folder"
        ) from error
    wrong = [name for name, value in identity.items() if found.get(name) != value]
    if wrong:
        told = "; ".join(f"{name}: {found.get(name)} there, {identity[name]}" for name in wrong)
        raise ValueError(
            f"{path.parent} belongs to something else ({told}). Write into another folder, or "
            "remove that one"
        )


def digest(*arrays: np.ndarray) -> str:
    """A name for the content of arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]
