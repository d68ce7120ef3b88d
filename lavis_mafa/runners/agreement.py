"""Compare what the ranks of a run were given: ranks that differ must not start to train.

DDP averages the gradients of ranks whatever they compute. Another learning rate, another order of
the annotation file or another Con-D on one rank would train without an error.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lavis.common.dist_utils import get_world_size
from lavis.common.registry import registry
from torch import nn

import lavis_mafa
from lavis_mafa.algorithm.grit import HARDNESS
from lavis_mafa.algorithm.registry import MAFA
from lavis_mafa.datasets.data_identity import digest_of_rows
from lavis_mafa.io.checkpoints import vocabulary_of
from lavis_mafa.io.identity import fingerprint, weights_digest
from lavis_mafa.io.processes import all_gather_objects
from lavis_mafa.loggers.redact import redact
from lavis_mafa.models.con_d.discriminators import DISCRIMINATORS
from lavis_mafa.models.con_d.frozen import FROZEN_MODELS
from lavis_mafa.runners.checkpoint import trained_state

_PACKAGES = ("torch", "salesforce-lavis", "transformers", "timm")
# Keys of a config that may differ: they describe a process or its machine.
_OF_ONE_RANK = {f"run.{key}" for key in ("rank", "gpu", "device", "num_workers", "dist_url")}
_ABSENT = "nothing"
# Files named by a config that are small enough to compare by content.
_SMALL_FILES, _SMALL = (".json", ".yaml", ".yml", ".txt", ".py"), 2**22  # bytes
_LINES, _WIDTH = 20, 300  # of a message


class DisagreementError(RuntimeError):
    """The ranks of a run were given different data, settings, weights or code.

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
                line = f"{name}: {was} on rank 0, {found}"[:_WIDTH]
                ranks_of.setdefault(line, []).append(str(rank))
    if ranks_of:
        lines = [f"{line} on rank {', '.join(ranks)}" for line, ranks in ranks_of.items()]
        left_out = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
        raise DisagreementError(
            "the ranks of this run were not given the same, and nothing was trained:\n  "
            + "\n  ".join([*lines[:_LINES], *left_out])
            + "\nStart all ranks with the same command, files, weights, code and packages."
        )


def of_config(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings of a plain and complete config, the packages and the code.

    Paths may differ between machines. What they name is compared: here by the content of small
    files, later by rows and weights. Registered classes and functions that the config may use are
    compared by their source files.
    """
    leaves = dict(_leaves(config))
    for key, value in leaves.items():
        if key not in _OF_ONE_RANK:
            yield key, _shown(key, value)
    for name in _PACKAGES:
        yield f"package {name}", version(name)
    yield "package lavis_mafa", f"{lavis_mafa.__version__}, source {_source_of_package()}"
    words = {value for value in leaves.values() if isinstance(value, str)}
    words |= {word for key in leaves for word in key.split(".")}
    tables: dict[str, Mapping[str, Any]] = {
        table.removesuffix("_name_mapping"): content
        for table, content in registry.mapping.items()
        if table.endswith("_name_mapping")
    }
    tables |= {one.kind: one for one in (*MAFA.registries, HARDNESS, DISCRIMINATORS)}
    for kind, table in tables.items():
        for name in sorted(words & set(table)):
            yield f"{kind} {name}", _described(table[name])


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
    for key in FROZEN_MODELS:
        owner = getattr(model, key, None)
        part = owner if isinstance(owner, nn.Module) else getattr(owner, "model", None)
        if isinstance(part, nn.Module):
            yield f"vocabulary of model.mafa.{key}", vocabulary_of(getattr(part, "tokenizer", None))
            yield f"weights of model.mafa.{key}", fingerprint(part)


def of_state(model: nn.Module, progress: Any) -> Iterator[tuple[str, Any]]:
    """Yield the weights of a model that is not wrapped, and how far the run has come, once it has
    begun or resumed."""
    yield "weights of the model", weights_digest(trained_state(model))
    yield "progress of the run", progress


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a config by their dotted keys."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and value:
        for place, item in enumerate(value):
            yield from _leaves(item, f"{path}[{place}]")
    else:
        yield path, value


def _shown(key: str, value: Any) -> str:
    """Return a value of a config for comparison: without secrets, and not where a file lies."""
    if not isinstance(value, str):
        return repr(redact(value, key))
    path = Path(os.path.expanduser(value))
    try:
        is_file = path.is_file()
        if is_file and path.suffix in _SMALL_FILES and not key.startswith("datasets."):
            if path.stat().st_size <= _SMALL:
                return f"a file with content {_digest(path.read_bytes())}"
    except (OSError, ValueError):
        is_file = False  # such as too long a text
    looks_like_path = "/" in value and not any(map(str.isspace, value))
    return "a path" if is_file or looks_like_path else repr(redact(value, key))


def _source_of_package() -> str:
    """Return a digest of the code and the configs of this package."""
    root = Path(lavis_mafa.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json", ".yaml"))
    return _digest(
        b"".join(f"{path.relative_to(root)}\n".encode() + path.read_bytes() for path in files)
    )


def _described(value: Any) -> str:
    """Return the name and a digest of the source files of a class, with its bases, or function."""
    parts = getattr(value, "__mro__", (value,))
    modules = [sys.modules.get(getattr(one, "__module__", "")) for one in parts]
    paths = dict.fromkeys(getattr(module, "__file__", None) or "" for module in modules)
    files = [Path(path) for path in paths if os.path.isfile(path)]
    name = getattr(value, "__qualname__", type(value).__qualname__)
    # The file's name rather than the module's, which contains the folder of a plugin.
    where = f" of {files[0].name}" if files else ""
    return f"{name}{where}, source {_digest(b''.join(one.read_bytes() for one in files))}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
