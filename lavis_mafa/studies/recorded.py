"""Pool the figures of recorded results, such as seeds that were run on several machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lavis_mafa.studies.parts import Column, Study, StudyError
from lavis_mafa.studies.self_checks import CONTENT, Checks

Pooled = dict[str, dict[int, dict[str, float | None]]]


def read_recorded(paths: Sequence[Path]) -> dict[Path, Mapping[str, Any]]:
    """Return the content of JSON files that studies wrote next to their Markdown, by path.

    Raises:
        ValueError: if a file is missing or is not one of these.
    """
    found: dict[Path, Mapping[str, Any]] = {}
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            known = _are_results(content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(_not_results(path, f"{type(error).__name__}: {error}")) from None
        if not known:
            raise ValueError(_not_results(path, "its rows have no figures by seed"))
        found[path] = content
    return found


def _are_results(content: Any) -> bool:
    rows = content["rows"].values()
    objects = [content["parameters"], content["columns"], *(row["options"] for row in rows)]
    seeds, checks = [row["seeds"] for row in rows], [row.get("self_check", {}) for row in rows]
    return (
        all(isinstance(one, dict) for one in objects)
        and all(map(_are_seeds, [*seeds, *checks]))
        and all(set(CONTENT) <= set(check) for own in checks for check in own.values())
    )


def _not_results(path: Path, why: str) -> str:
    return f"--recorded {path}: {why}; expected the JSON file next to the results of a study"


def _are_seeds(seeds: Any) -> bool:
    return isinstance(seeds, dict) and all(
        seed.isdigit() and isinstance(own, dict) for seed, own in seeds.items()
    )


def seeds_of(recorded: Mapping[Path, Mapping[str, Any]]) -> list[int]:
    """Return all seeds of the files, ascending."""
    rows = [row for content in recorded.values() for row in content["rows"].values()]
    return sorted({int(seed) for row in rows for seed in row["seeds"]})


def shared_columns(study: Study, recorded: Mapping[Path, Mapping[str, Any]]) -> list[Column]:
    """Return the study's columns that all files have."""
    files = recorded.values()
    return [one for one in study.columns if all(one.name in file["columns"] for file in files)]


def pooled_figures(study: Study, recorded: Mapping[Path, Mapping[str, Any]]) -> Pooled:
    """Return figures by row, seed and column of `shared_columns`.

    Raises:
        StudyError: if a file has other parameters, lacks a row of the study or has other options
            for it, or if two files have the same seed of a row.
    """
    names = [column.name for column in shared_columns(study, recorded)]
    problems: list[str] = []
    pooled: Pooled = {row.name: {} for row in study.rows}
    for path, content in recorded.items():
        if content["parameters"] != _as_json(study.parameters):
            problems.append(f"{path}: was run with other parameters: {content['parameters']}")
        for row in study.rows:
            found = content["rows"].get(row.name)
            if found is None:
                problems.append(f"{path}: has no row {row.name!r}; leave it out by --rows")
                continue
            if found["options"] != _as_json(row.options):
                problems.append(f"{path}: row {row.name!r} was run with other options")
            for seed, own in found["seeds"].items():
                if int(seed) in pooled[row.name]:
                    problems.append(f"{path}: row {row.name!r}: another file has seed {seed} too")
                pooled[row.name][int(seed)] = {name: own.get(name) for name in names}
    if problems:
        raise StudyError(study.path, problems)
    return pooled


def pooled_checks(study: Study, recorded: Mapping[Path, Mapping[str, Any]]) -> Checks:
    """Return Con-D's self-checks by row and seed, of rows with one for every seed."""
    pooled: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in study.rows:
        parts = [content["rows"][row.name] for content in recorded.values()]
        checks = {int(s): own for part in parts for s, own in part.get("self_check", {}).items()}
        if checks and checks.keys() == {int(seed) for part in parts for seed in part["seeds"]}:
            pooled[row.name] = checks
    return pooled


def notes_on(recorded: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    """Return for each file which seeds it has, and which versions wrote it."""
    return [
        f"Seeds {', '.join(map(str, seeds_of({path: content})))}: {path.name}, "
        f"lavis_mafa {content.get('version')}, torch {content.get('torch')}, {content.get('date')}."
        for path, content in recorded.items()
    ]


def _as_json(values: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(dict(values), default=str))
