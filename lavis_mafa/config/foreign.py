"""Decide what is used of a config that a file names: the log of a run, or a file of judged pairs.

Such a file may come from someone else, and must not choose what this machine executes, fetches or
overwrites. This is the rule:

- Used are numbers, flags, names of registered classes, plain texts, local files and folders to
  read (annotations, images, vocabularies, weights), and what a default YAML of the same model or
  data set says, such as the URL of published weights.
- Not used are places to write (``run.output_dir``, ``cache_dir``), loggers that
  send figures elsewhere, and URLs of annotations. Defaults replace them, with a note.
- Refused are plugins, which are code, other URLs, and other names on the Hugging Face hub.

A value that the user gives as well is the user's, and so is a file in a folder that the user trusts
(``--trust FOLDER``). What is used of a checkpoint is less, see `lavis_mafa.models.recorded_sizes`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lavis.common.registry import registry
from lavis.common.utils import get_cache_path
from pydantic.fields import FieldInfo

from lavis_mafa.config.check import Report, key_at, listed, value_at
from lavis_mafa.config.defaults import default_or_report
from lavis_mafa.config.key import UNSET, Keys, kind_of, option_of
from lavis_mafa.config.registered import MODEL, OURS, PARTS
from lavis_mafa.io.checkpoints import find_config
from lavis_mafa.models.con_d.frozen import FROZEN_MODELS
from lavis_mafa.plugins import is_imported

# Places to write, and their values in place of the recorded ones.
_WRITTEN = {"output_dir": "output", "cache_dir": None}
_WEIGHTS = ("pretrained", "finetuned")  # without a kind of path in the schema
_LOCAL_LOGGERS = ("tensorboard",)
_Path = tuple[str, ...]


def usable(
    config: dict[str, Any],
    keys: Keys,
    file: Path,
    is_given: Callable[[_Path], bool] = lambda path: False,
    data_only: bool = False,
) -> tuple[list[str], list[str]]:
    """Change a config that a file names into what may be used of it.

    Args:
        config: plain data, without interpolations.
        keys: of the config.
        file: that names it.
        is_given: whether the user gives the value at a path of the config as well.
        data_only: neither the model nor a logger is built, and nothing is written.

    Returns:
        The problems, and notes on what is not used.
    """
    problems: list[str] = []
    notes: list[str] = []
    origin = f"is named by {file}, not by you"
    trust = f"or trust its folder: --trust {file.parent}"

    run = _section(config, "run")
    names = [] if is_given(("run", "plugins")) else listed(run.get("plugins"))
    if not all(isinstance(name, str) and is_imported(name) for name in names):
        del run["plugins"]
        cure = f"give --plugin {' --plugin '.join(map(str, names))}, {trust}"
        problems.append(f"run.plugins: {names} {origin}: code of others is not run; {cure}")
    loggers = [name for name in listed(run.get("loggers")) if name in _LOCAL_LOGGERS]
    for name, value in {"loggers": loggers, "logger_options": {}}.items():
        if run.get(name) not in (None, value) and not is_given(("run", name)):
            if not data_only:
                notes.append(f"run.{name}: {run[name]!r} {origin}: not used")
            run[name] = value
    model = _section(config, "model")
    if model.get("load_finetuned") is True or model.get("load_pretrained") is False:
        if not is_given(("model", "pretrained")) and "pretrained" in model:
            model["pretrained"] = None  # is not read
    for name, dataset in _section(config, "datasets").items():
        for path, info in _downloads(dataset, ("datasets", name)):
            if not is_given((*path, "url")) and not _is_there(info):
                if not _is_shipped(config, path, {n: info[n] for n in ("url", "storage")}):
                    notes.append(f"{'.'.join(path)}.url: {info['url']!r} {origin}: not fetched")
                    info["url"] = None
    parts = {name: _section(config, name) for name in ("run", "model", "datasets")}
    for path, value, parent in _texts(parts, ()):
        name, key = path[-1], ".".join(path)
        if is_given(path) or (data_only and path[0] == "model") or name == "prompt":
            continue
        if name in _WRITTEN:
            if value not in (_WRITTEN[name], "") and not _is_shipped(config, path, value):
                parent[name] = _WRITTEN[name]
                if not data_only:
                    instead = _WRITTEN[name] or "the default"
                    notes.append(f"{key}: {value!r} {origin}: {instead} is used")
        elif (problem := _problem(path, value, key_at(keys, path))) and not _is_shipped(
            config, path, value
        ):
            problems.append(
                f"{key}: {value!r} {origin}: {problem}; give --options {key}=..., {trust}"
            )
    return problems, notes


def _problem(path: _Path, text: str, key: FieldInfo | None) -> str:
    """Return why a text that no default YAML has is not used; empty if it is."""
    if key is not None and text == key.default:
        return ""
    if "://" in text or text.strip().startswith("pipe:") or "::pipe:" in text:
        return "it is not fetched"
    if key is None or kind_of(key).name == "any":  # such as those of a Con-D's `model`
        key = {**MODEL, **OURS, **PARTS}.get(path[-1])
    kind = "any" if key is None else kind_of(key).name
    place = "" if key is None else option_of(key).path
    by_hub = " or " in place or kind == "any" or path[-1] in _WEIGHTS
    words = ("",) if key is None else option_of(key).words
    if not by_hub or text in words or os.path.exists(os.path.expanduser(text)):
        return ""
    try:
        find_config(text)  # a file of this package
    except (OSError, ValueError):
        return "no such local file, and names of files elsewhere are not followed"
    return ""


def _section(config: Any, name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _texts(value: Any, path: _Path) -> Iterator[tuple[_Path, str, Any]]:
    """Yield the path, text and mapping or list of every text below a value."""
    for name, inner in list(value.items()):
        for one in [inner] if not isinstance(inner, list) else inner:
            if isinstance(one, dict):
                yield from _texts(one, (*path, str(name)))
            elif isinstance(one, list):
                yield from _texts({name: one}, path)
            elif isinstance(one, str):
                yield (*path, str(name)), one, value


def _downloads(value: Any, path: _Path) -> Iterator[tuple[_Path, dict[str, Any]]]:
    """Yield the mappings below a value that name a URL and where it is stored."""
    if isinstance(value, dict):
        if value.get("url") and "storage" in value:
            yield path, value
        for name, inner in value.items():
            yield from _downloads(inner, (*path, str(name)))


def _is_there(info: dict[str, Any]) -> bool:
    """Return whether the files of a URL are there, and let ``storage`` alone name them."""
    urls, stored = listed(info["url"]), listed(info["storage"])
    if urls and all(map(os.path.isfile, urls)):
        info["storage"] = info["url"]  # nothing is copied to where a file says
        return True
    if stored and all(os.path.isfile(p) or os.path.isfile(get_cache_path(p)) for p in stored):
        info["url"] = None
        return True
    return False


def _is_shipped(config: Any, path: _Path, value: Any) -> bool:
    """Return whether a default YAML of the same model or data set has a value at a path."""
    part, *rest = path
    cls, root = None, rest
    if part == "datasets":
        cls, root = registry.get_builder_class(rest[0]), rest[1:]
    elif part == "model":
        model = _section(config, "model")
        if rest[0] == "mafa" and len(rest) > 3 and rest[1] in FROZEN_MODELS and rest[2] == "model":
            model, root = _section(_section(model, "mafa"), rest[1]), rest[3:]
        arch = model.get("arch")
        cls = registry.get_model_class(arch) if isinstance(arch, str) else None
    table = "PRETRAINED_MODEL_CONFIG_DICT" if part == "model" else "DATASET_CONFIG_DICT"
    for kind in getattr(cls, table, {}):
        found = default_or_report("", cls, kind, Report({})).get(part, {})
        found = next(iter(found.values()), {}) if part == "datasets" else found
        own = value_at(found, root)
        if isinstance(value, dict) and isinstance(own, dict):
            own = {name: own.get(name) for name in value}
        if own is not UNSET and (own == value or (isinstance(own, list) and value in own)):
            return True
    return False
