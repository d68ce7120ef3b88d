"""Digests of what a run of a study depends on: the content of files and code, not their names."""

from __future__ import annotations

import ast
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
    """Return plain data with a digest of the content of every file that a text in them names.

    A text names a file as a path, or as ``key=path``.

    Args:
        folders: a folder stands for the JSON files in it; not where runs write into folders.
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
    """Return the digest of a file that was last changed at this time (ns)."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def yaml_of(path: Path) -> Any:
    """Return the content of a config; if it is not YAML, which `check` reports, its text."""
    text = text_if_any(path) or ""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def sources_of(module: str) -> dict[str, str]:
    """Return the code of a module, and of the modules next to it that it imports, by name."""
    found: dict[str, str] = {}
    left, folder, package = {module} - {""}, None, module.rpartition(".")[0]
    while left:
        name = left.pop()
        try:
            spec = importlib.util.find_spec(name)
            path = Path(spec.origin or "") if spec else Path()
            if path.parent != (folder or path.parent):
                continue
            text = text_if_any(path) or ""
            nodes = list(ast.walk(ast.parse(text)))
        except (ImportError, SyntaxError, ValueError):  # `function_named` or the run reports it
            continue
        folder, found[name] = path.parent, text
        for node in nodes:
            if isinstance(node, ast.Import):
                left |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom):
                start = f"{package}.{node.module or ''}" if node.level else str(node.module)
                left |= {f"{start}.{one.name}".strip(".") for one in node.names} | {start}
        # Not attributes of modules: to look for these would import them.
        left = {one for one in left - found.keys() if one.rpartition(".")[0] == package}
    return found


def text_if_any(path: Path) -> str | None:
    """Return the text of a file; None if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
