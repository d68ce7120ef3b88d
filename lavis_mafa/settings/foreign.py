"""Decide what is used of a config that a file names: the log of a run, or a file of judged pairs.

Such a file may come from a stranger. What it may do is decided here alone, by the four rules of
`usable`; what the user gives as well is the user's, and so is a file in a folder that the user
trusts (``--trust FOLDER``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lavis.common.registry import registry

from lavis_mafa.io.plugins import is_imported
from lavis_mafa.io.project_files import find_config
from lavis_mafa.settings.check import listed
from lavis_mafa.settings.registered import default_or_none, types_of

# Keys by which weights, tokenizers and language models may be downloaded.
_FETCHED = {"pretrained", "finetuned", "checkpoint", "vit_weights", "bert_weights", "tokenizer"}
_FETCHED |= {"q_former_model", "opt_model", "t5_model", "med_config_path", "q_former_config"}


def usable(
    config: dict[str, Any], file: Path, given: Mapping[str, Any], data_only: bool = False
) -> tuple[list[str], list[str]]:
    """Take from a config that a stranger's file names what may run here; everything else is used.

    1. It runs no code: plugins are refused.
    2. It fetches nothing: URLs, names on a hub and interpolations are refused, except those of the
       default YAML of the same model or data set. So are files that are not there.
    3. It chooses no place to write and no logger: the defaults are used.
    4. A checkpoint that it names gives weights, sizes and names of ours, see
       `lavis_mafa.checkpoints.recorded_sizes`.

    Args:
        config: plain data without defaults; changed in place.
        file: that names it.
        given: what the user gives of the config.
        data_only: only the data are built.

    Returns:
        The problems, and notes on what is not used.
    """
    origin, trust = f"is named by {file}, not by you", f"or trust its folder: --trust {file.parent}"
    problems: list[str] = []
    notes: list[str] = []
    run, own = (one if isinstance(one := of.get("run"), dict) else {} for of in (config, given))
    names = listed(run.get("plugins"))
    imported = all(isinstance(name, str) and is_imported(name) for name in names)
    if not imported and own.get("plugins") != run["plugins"]:
        del run["plugins"]
        cure = f"give --plugin {' --plugin '.join(map(str, names))}, {trust}"
        problems.append(f"run.plugins: {names} {origin}: code of others is not run; {cure}")
    loggers = [name for name in listed(run.get("loggers")) if name == "tensorboard"]
    places = {"loggers": loggers, "output_dir": "output"}
    for name, value in places.items():
        if run.get(name) not in (None, value) and own.get(name) != run[name]:
            if not data_only:
                notes.append(f"run.{name}: {run[name]!r} {origin}: {value!r} is used")
            run[name] = value
    shipped, mine = _texts_of_defaults(config), {one[:2] for one in _texts(given, ())}
    parts = ("run", "model", "datasets")
    for path, value, parent in list(_texts({part: config.get(part) for part in parts}, ())):
        name, key = path[-1], ".".join(path)
        if value in shipped or (path, value) in mine:
            continue
        is_used = name != "prompt" and (path[0] == "datasets" or not data_only)
        if "${" not in value and not is_used:
            continue
        if name == "cache_dir":
            parent[name] = None
            notes.append(f"{key}: {value!r} {origin}: the default is used")
        elif name == "url" and "storage" in parent:
            # LAVIS copies what `url` names to `storage`, a place to write.
            parent["url"] = None
            notes.append(f"{key}: {value!r} {origin}: not fetched")
        elif reason := _reason(name, value, path[0] == "model"):
            cure = f"give --options {key}=..., {trust}"
            problems.append(f"{key}: {value!r} {origin}: {reason}; {cure}")
    return problems, notes


def _reason(name: str, text: str, in_model: bool) -> str:
    """Return why a text is not used; empty if it is."""
    if "${" in text:
        return "it is not resolved"
    if "://" in text or text.strip().startswith("pipe:") or "::pipe:" in text:
        return "it is not fetched"
    by_hub = name in _FETCHED or (in_model and "/" in text and " " not in text)
    if not by_hub or text in ("", "published"):
        return ""
    if os.path.exists(os.path.expanduser(text)):
        return ""
    try:
        find_config(text)  # a file of this package
    except (OSError, ValueError):
        return "no such local file, and names of files elsewhere are not followed"
    return ""


def _texts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yield the path, the text, and the mapping that holds it, of every text below a value."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        for one in listed(inner):
            if isinstance(one, dict):
                yield from _texts(one, (*path, str(name)))
            elif isinstance(one, list):
                yield from _texts({name: one}, path)
            elif isinstance(one, str):
                yield (*path, str(name)), one, value


def _texts_of_defaults(config: Mapping[str, Any]) -> set[str]:
    """Return the texts in the default YAMLs of the models and data sets that a config names."""
    archs = [text for path, text, _ in _texts(config.get("model"), ()) if path[-1] == "arch"]
    classes = [registry.get_model_class(arch) for arch in archs]
    datasets = config.get("datasets")
    if isinstance(datasets, dict):
        classes += [registry.get_builder_class(str(name)) for name in datasets]
    found: set[str] = set()
    for cls in classes:
        for kind in types_of(cls):
            found |= {text for _, text, _ in _texts(default_or_none("", cls, kind)[0], ())}
    return found
