"""Checkpoints: one file with everything a run needs to go on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lavis.common.dist_utils import get_rank, get_world_size
from torch import nn

FORMAT = 1
LAST, BEST = "checkpoint_last.pth", "checkpoint_best.pth"


def save_atomically(content: dict[str, Any], path: Path) -> None:
    """Write a file that is either whole or not there.

    ``content`` must be plain values and tensors, so that ``weights_only`` loading accepts it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def from_all_ranks(state: Any) -> list[Any] | None:
    """Every rank's ``state`` in rank order on rank 0, None on the others."""
    if get_world_size() == 1:
        return [state]
    gathered: list[Any] | None = [None] * get_world_size() if get_rank() == 0 else None
    dist.gather_object(state, gathered, dst=0)
    return gathered


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict less frozen weights, as LAVIS saves it."""
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    return {key: value for key, value in model.state_dict().items() if key not in frozen}


def load_trained_state(model: nn.Module, state: dict[str, torch.Tensor], origin: str) -> None:
    """Load what `trained_state` gave; only frozen weights may be missing.

    Raises:
        ValueError: naming the keys that are missing, or unknown to the model.
    """
    expected = set(trained_state(model))
    missing, unknown = expected - state.keys(), state.keys() - model.state_dict().keys()
    if missing or unknown:
        raise ValueError(
            f"{origin} was saved by another model. Missing: {sorted(missing)[:5] or 'none'}; "
            f"unknown: {sorted(unknown)[:5] or 'none'}"
        )
    model.load_state_dict(state, strict=False)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest ``checkpoint_last.pth`` in a folder or in the job folders below it."""
    found = [folder / LAST, *folder.glob(f"*/{LAST}")]
    there = [path for path in found if path.is_file()]
    return max(there, key=lambda path: path.stat().st_mtime) if there else None
