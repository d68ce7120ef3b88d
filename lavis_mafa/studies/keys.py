"""The keys of a study file and their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_mafa.config.check import suggest

TOP: dict[str, Any] = {
    **dict.fromkeys(("title", "source", "about", "base", "folders", "gallery", "headline"), str),
    **dict.fromkeys(("notes", "rows", "shows", "seeds", "curves", "claims"), list),
    **dict.fromkeys(("options", "settings", "shared", "stages", "vary", "titles"), dict),
    **dict.fromkeys(("parameters", "columns", "tables", "reference", "measure"), dict),
    **dict.fromkeys(("figure", "paper", "at"), dict),
    **dict.fromkeys(("at_once", "processes"), int),
}
CONFIG = {"script": str, "config": str, "options": dict, "uses": list}
MODULE = {"module": str, "arguments": list, "writes": str}
GIVEN = {"checkpoint": str}
ROWS: dict[str, Any] = {
    **{"name": str, "marks": dict, "uses": list, "options": dict},
    **{"run": str, "source": str, "stages": dict},
}
COLUMN: dict[str, Any] = {
    **{"title": str, "key": (str, list), "stage": str, "kind": str, "split": str},
    **{"scale": (int, float), "digits": int, "best": str},
}
FIGURE = {"x": str, "y": list}
CURVE = {"title": str, "key": (str, list), "kind": str, "lines": list}
CLAIM = dict.fromkeys(("claim", "source", "row", "than", "column", "better"), str)
MEASURE = {"function": str, "judges": list}
REFERENCE = {"row": str, "columns": list, "after": str}
PAPER = {"about": str, "columns": list, "rows": (list, dict)}
TEXTS = ("uses", "shows", "y", "lines", "judges")  # lists of names
WORDS = {str: "text", list: "a list", dict: "a mapping", int: "a whole number", float: "a number"}


def typed(
    content: Any, kinds: Mapping[str, Any], where: str, problems: list[str]
) -> dict[str, Any]:
    """Return the entries that are known and of the right type; add the others to ``problems``."""
    if not isinstance(content, dict):
        problems.append(f"{where}: is {content!r}, expected a mapping")
        return {}
    kept = {}
    for key, value in content.items():
        kind, name = kinds.get(key), f"{where}.{key}" if where else str(key)
        if kind is None:
            problems.append(f"{name}: unknown; {suggest(str(key), list(kinds))}")
        elif value is None:
            continue
        elif not isinstance(value, kind) or isinstance(value, bool):
            words = " or ".join(WORDS[k] for k in (kind if isinstance(kind, tuple) else (kind,)))
            problems.append(f"{name}: is {value!r}, expected {words}")
        elif isinstance(value, dict) and not all(isinstance(one, str) for one in value):
            problems.append(f"{name}: is {value!r}, expected names in text")
        elif key in TEXTS and not all(isinstance(one, str) for one in value):
            problems.append(f"{name}: is {value!r}, expected a list of texts")
        else:
            kept[key] = value
    return kept
