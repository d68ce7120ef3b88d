"""Compare what the ranks of a run were given: ranks that differ must not start to train.

DDP averages the gradients of ranks whatever they compute. Another learning rate, another order of
the annotation file or another Con-D on one rank would train without an error.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import get_world_size
from torch import nn

from lavis_mafa._version import __version__
from lavis_mafa.checkpoints.checkpoints import vocabulary_of
from lavis_mafa.data.data_identity import digest_of_rows
from lavis_mafa.io.files import flat
from lavis_mafa.io.identity import fingerprint, weights_digest
from lavis_mafa.io.processes import all_gather_objects
from lavis_mafa.judges.frozen import FROZEN_MODELS
from lavis_mafa.training.checkpoint import trained_state

_PACKAGES = ("torch", "salesforce-lavis", "transformers", "timm")
# Keys of a config that may differ: they describe a process or its machine.
_OF_ONE_RANK = {f"run.{key}" for key in ("rank", "gpu", "device", "num_workers", "dist_url")}
_ABSENT = "nothing"
# Endings of files that are compared by content, if they have at most so many bytes. Weights and
# rows are compared by themselves once they are read.
_BY_CONTENT, _SMALL = (".json", ".yaml", ".yml", ".txt", ".py", ".npy"), 2**26


class DisagreementError(RuntimeError):
    """The ranks of a run were given different data, settings or weights.

    Attributes:
        exit_status: of the command.
    """

    exit_status = 2


def require_agreement(gather: Callable[..., Iterable[tuple[str, Any]]], *given: Any) -> None:
    """Refuse to continue unless a function finds the same on all ranks, which must all call this.

    Args:
        gather: one of those below: returns names for a message and short values. One process needs
            no agreement, and does not call it.
        given: its arguments.

    Raises:
        DisagreementError: on every rank, naming each value that differs, and on which ranks.
    """
    if get_world_size() == 1:
        return
    of_all = all_gather_objects({name: str(value) for name, value in gather(*given)})
    first, ranks_of = of_all[0], dict[str, list[str]]()
    for rank, own in enumerate(of_all):
        for name in {**first, **own}:
            was, found = first.get(name, _ABSENT), own.get(name, _ABSENT)
            if was != found:
                line = f"{name}: {was} on rank 0, {found}"[:300]
                ranks_of.setdefault(line, []).append(str(rank))
    if ranks_of:
        lines = [f"{line} on rank {', '.join(ranks)}" for line, ranks in ranks_of.items()]
        raise DisagreementError(
            "the ranks of this run differ, and nothing was trained:\n  "
            + "\n  ".join(lines[:20])
            + "\nStart all ranks with the same command, files, weights, code and packages."
        )


def of_config(cfg: Any) -> Iterator[tuple[str, str]]:
    """Yield the settings of a complete config, as `MafaConfig.unresolved` has them, and versions.

    Paths may differ between machines: files are compared by content.
    """
    resolved = dict(flat(cfg.to_dict()))
    for key, recorded in flat(cfg.unresolved()):
        if key not in _OF_ONE_RANK:
            yield key, _shown(key, resolved.get(key), recorded)
    for name in _PACKAGES:
        yield f"package {name}", version(name)
    yield "package lavis_mafa", __version__


def of_data(datasets: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the rows, in their order, of data sets by name and split."""
    for name, splits in datasets.items():
        for split, data in splits.items():
            yield f"rows of datasets.{name}, split {split}", digest_of_rows(data)


def of_models(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules, sizes and rates of a model that is not wrapped, its vocabulary, and the
    weights and vocabularies of its frozen models.

    Its own weights may differ as long as DDP has not given all ranks those of rank 0.
    """
    yield "modules of the model", _digest(re.sub(r" at 0x[0-9a-f]+", "", repr(model)).encode())
    yield "vocabulary of the model", vocabulary_of(getattr(model, "tokenizer", None))
    yield from judges_of(model).items()


def judges_of(model: Any) -> dict[str, str]:
    """Return identities of what judges pairs beside a model, and of what judges before it: weights
    and vocabularies of frozen models, and the arrays that a judge without weights has, such as
    vectors of captions."""
    found: dict[str, str] = {}
    for key in FROZEN_MODELS:
        owner = getattr(model, key, None)
        found |= _identity_of(f"model.mafa.{key}", owner)
        found |= _identity_of(f"model.mafa.{key}.first", getattr(owner, "first", None))
    return found


def _identity_of(key: str, owner: Any) -> dict[str, str]:
    part = owner if isinstance(owner, nn.Module) else getattr(owner, "model", None)
    if isinstance(part, nn.Module):
        vocabulary = vocabulary_of(getattr(part, "tokenizer", None))
        return {f"vocabulary of {key}": str(vocabulary), f"weights of {key}": fingerprint(part)}
    if owner is None:
        return {}
    arrays = {
        name: torch.from_numpy(value)
        for name, value in vars(owner).items()
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiu"
    }
    return {f"content of {key}": f"{type(owner).__name__} {weights_digest(arrays)}"}


def of_state(
    model: nn.Module, judges: Mapping[str, str], progress: Any
) -> Iterator[tuple[str, Any]]:
    """Yield the weights of a model that is not wrapped, its `judges_of`, and how far the run has
    come, once it has begun or resumed."""
    yield "weights of the model", weights_digest(trained_state(model))
    yield from judges.items()
    yield "progress of the run", progress


def _shown(key: str, value: Any, recorded: Any) -> str:
    """Return a value of a config for comparison, without what an environment variable holds."""
    if not isinstance(value, str):
        return repr(value)
    try:
        path = Path(value).expanduser()
        if path.suffix in _BY_CONTENT and path.is_file() and not key.startswith("datasets."):
            if path.stat().st_size <= _SMALL:
                return f"a file with content {_digest(path.read_bytes())}"
        if path.exists() or path.is_absolute():
            return "a path"
    except (OSError, ValueError, RuntimeError):
        pass  # such as too long a text
    return repr(value) if value == recorded else f"{recorded!r}, {_digest(value.encode())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
