"""Compute digests of what a run depends on: the content of files and code, not their names."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from functools import cache
from glob import escape, glob
from pathlib import Path
from typing import Any

import yaml

from lavis_mafa.io.files import ROOT


def digest_of(content: Any) -> str:
    """Return a short digest of plain data."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def with_contents(value: Any, folders: bool = False) -> Any:
    """Return plain data in which every text that names a file is extended by a digest of its
    content.

    A text names a file as a path, or as ``key=path``.

    Args:
        folders: also replace folders, by the JSON files in them; not for folders to which runs
            write.
    """
    if isinstance(value, dict):
        return {str(key): with_contents(item, folders) for key, item in value.items()}
    if isinstance(value, list):
        return [with_contents(item, folders) for item in value]
    name = value.rpartition("=")[2] if isinstance(value, str) else ""
    path = os.path.join(ROOT, name)
    files = [path] if os.path.isfile(path) else []
    if name and folders:
        files += sorted(glob(f"{escape(path)}/*.json"))
    stats = [(one, os.stat(one)) for one in files]
    found = [_digest_of_file(one, stat.st_mtime_ns, stat.st_size) for one, stat in stats]
    return [value, *found] if found else value


@cache
def _digest_of_file(path: str, time: int, size: int) -> str:
    """Return the digest of a file that was last changed at the given time (ns)."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def yaml_of(path: Path) -> Any:
    """Return the content of a config, or its text if it is not YAML, which `check` reports."""
    text = text_if_any(path) or ""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def source_of(module: str) -> str:
    """Return the code of a module without its imports; "" for no module."""
    spec = importlib.util.find_spec(module) if module else None
    return text_if_any(Path(spec.origin)) or "" if spec and spec.origin else ""


def text_if_any(path: Path) -> str | None:
    """Return the text of a file; None if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
