"""Compare what the ranks of a run were given: ranks that differ must not start to train.

DDP averages the gradients of ranks whatever they compute. Another learning rate, another order of
the annotation file or another Con-D on one rank would train without an error.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
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
from lavis_mafa.io.processes import all_gather_objects, from_main_process
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


def require_agreement(given: Mapping[str, Any]) -> None:
    """Refuse to continue unless all ranks pass the same values; all ranks must call it.

    Args:
        given: what is compared, as short values by the names that a message shows.

    Raises:
        DisagreementError: on every rank, naming each value that differs, and on which ranks.
    """
    mine = {name: str(value) for name, value in given.items()}
    first = from_main_process(lambda: mine)
    lines = [
        f"{name}: {first.get(name, _ABSENT)} on rank 0, {mine.get(name, _ABSENT)}"[:_WIDTH]
        for name in {**first, **mine}
        if first.get(name) != mine.get(name)
    ]
    ranks_of: dict[str, list[str]] = {}
    for rank, differing in enumerate(all_gather_objects(lines[:_LINES])):
        for line in differing:
            ranks_of.setdefault(line, []).append(str(rank))
    if ranks_of:
        found = [f"{line} on rank {', '.join(ranks)}" for line, ranks in ranks_of.items()]
        left_out = [f"and {len(found) - _LINES} more"] if len(found) > _LINES else []
        raise DisagreementError(
            "the ranks of this run were not given the same, and nothing was trained:\n  "
            + "\n  ".join([*found[:_LINES], *left_out])
            + "\nStart all ranks with the same command, files, weights, code and packages."
        )


def require_same_config(config: Mapping[str, Any]) -> None:
    """Refuse ranks with different settings, packages or code.

    Paths may differ between machines. What they name is compared: here by the content of small
    files, later by rows and weights. Registered classes and functions that the config may use are
    compared by their source files.

    Args:
        config: plain and complete.

    Raises:
        DisagreementError: see `require_agreement`.
    """
    if get_world_size() == 1:
        return
    settings = {
        key: _content(value)
        if isinstance(value, str) and not key.startswith("datasets.")
        else value
        for key, value in _leaves(config)
        if key not in _OF_ONE_RANK
    }
    require_agreement(
        {
            **{key: _shown(key, value) for key, value in settings.items()},
            **{f"package {name}": _version(name) for name in _PACKAGES},
            "package lavis_mafa": f"{lavis_mafa.__version__}, source {_source_of_package()}",
            **dict(_registered(config)),
        }
    )


def require_same_data(datasets: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse ranks with different rows, or rows in another order, in any split.

    Args:
        datasets: data sets by name and split.

    Raises:
        DisagreementError: see `require_agreement`.
    """
    if get_world_size() > 1:
        require_agreement(
            {
                f"rows of datasets.{name}, split {split}": digest_of_rows(data)
                for name, splits in datasets.items()
                for split, data in splits.items()
            }
        )


def require_same_models(model: Any) -> None:
    """Refuse ranks with another vocabulary, other modules, or other weights of frozen models.

    Weights of the model itself may differ as long as DDP has not given all ranks those of rank 0.

    Args:
        model: that is trained, not wrapped, with its frozen models as attributes.

    Raises:
        DisagreementError: see `require_agreement`.
    """
    if get_world_size() == 1:
        return
    given: dict[str, Any] = {"modules of the model": _modules(model)}
    for key in ("", *FROZEN_MODELS):
        owner = getattr(model, key, None) if key else model
        part = owner if isinstance(owner, nn.Module) else getattr(owner, "model", None)
        if isinstance(part, nn.Module):
            title = f"model.mafa.{key}" if key else "the model"
            given[f"vocabulary of {title}"] = vocabulary_of(getattr(part, "tokenizer", None))
            if key:
                given[f"weights of {title}"] = fingerprint(part)
    require_agreement(given)


def require_same_state(model: nn.Module, progress: Any) -> None:
    """Refuse ranks with different weights or progress, once a run has begun or resumed.

    Args:
        model: not wrapped.
        progress: how far the run has come.

    Raises:
        DisagreementError: see `require_agreement`.
    """
    if get_world_size() > 1:
        weights = weights_digest(trained_state(model))
        require_agreement({"weights of the model": weights, "progress of the run": progress})


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
    if isinstance(value, str):
        looks_like_path = "/" in value and not any(map(str.isspace, value))
        if looks_like_path or os.path.isfile(value):
            return "a path"
    return repr(redact(value, key))


def _content(value: str) -> str:
    """Return the digest of a small file that a string names, else the string."""
    try:
        path = Path(value).expanduser()
        if path.suffix in _SMALL_FILES and path.is_file() and path.stat().st_size <= _SMALL:
            return f"a file with content {_digest(path.read_bytes())}"
    except (OSError, ValueError, RuntimeError):
        pass
    return value


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _ABSENT


def _source_of_package() -> str:
    """Return a digest of the code and the configs of this package."""
    root = Path(lavis_mafa.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json", ".yaml"))
    return _digest(
        b"".join(f"{path.relative_to(root)}\n".encode() + path.read_bytes() for path in files)
    )


def _registered(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the registered objects whose names occur in a config, and what they are."""
    words = {str(value) for _, value in _leaves(config) if isinstance(value, str)}
    words |= {word for key, _ in _leaves(config) for word in key.split(".")}
    tables: dict[str, Mapping[str, Any]] = {
        table.removesuffix("_name_mapping"): content
        for table, content in registry.mapping.items()
        if table.endswith("_name_mapping")
    }
    tables |= {one.kind: one for one in (*MAFA.registries, HARDNESS, DISCRIMINATORS)}
    for kind, table in tables.items():
        for name in sorted(words & set(table)):
            yield f"{kind} {name}", _described(table[name])


def _described(value: Any) -> str:
    """Return the name and a digest of the source files of a class, with its bases, or function."""
    files = []
    for one in getattr(value, "__mro__", (value,)):
        path = getattr(sys.modules.get(getattr(one, "__module__", "")), "__file__", None)
        if path and path not in files:
            files.append(path)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    # The file's name rather than the module's, which contains the folder of a plugin.
    where = f" of {Path(files[0]).name}" if files else ""
    return f"{name}{where}, source {_digest(''.join(map(_source, files)).encode())}"


@functools.cache
def _source(path: str) -> str:
    return _digest(Path(path).read_bytes()) if Path(path).is_file() else ""


def _modules(model: nn.Module) -> str:
    """Return a digest of a model's modules with their sizes and rates."""
    return _digest(re.sub(r" at 0x[0-9a-f]+", "", repr(model)).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
