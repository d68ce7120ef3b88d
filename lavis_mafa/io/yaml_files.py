"""Refuse YAML that grows without limit when it is read: by anchors, or by its depth."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from lavis_mafa.io.files import require_regular

MOST_NODES = 10_000  # keys and values with every alias written out; our largest file has 600


def check_yaml_file(path: str | os.PathLike[str]) -> None:
    """Refuse a file as `check_yaml` does.

    Raises:
        OSError: if it cannot be read.
        UnicodeDecodeError: if it is not UTF-8.
        ValueError: if it is a pipe or device.
        yaml.YAMLError: as `check_yaml`.
    """
    require_regular(path)
    check_yaml(Path(path).read_text(encoding="utf-8"))


def check_yaml(text: str) -> None:
    """Refuse YAML whose aliases contain themselves or, written out, make it very large.

    OmegaConf writes every alias out: nine lines of ten aliases each would fill the memory.

    Raises:
        yaml.YAMLError: saying which, or that the text is not YAML.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        count = _size(root, {}, set())
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    if count > MOST_NODES:
        raise yaml.YAMLError(
            f"with its aliases written out it has {count} values, expected at most {MOST_NODES}"
        )


def _size(node: yaml.Node | None, known: dict[int, int], above: set[int]) -> int:
    """Return the number of nodes below a node, with every alias counted anew."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    own = id(node)
    if own in above:
        raise yaml.YAMLError(f"an alias contains itself, line {node.start_mark.line + 1}")
    if own not in known:
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        known[own] = 1 + sum(_size(part, known, above | {own}) for part in parts)
    return known[own]
