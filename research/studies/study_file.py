"""Read a study from its file and its bases.

Each part is checked by its class in `research.studies.study_parts`; `_Resolver` then checks
references between parts. All problems are reported together.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from lavis_mafa.algorithm.options import suggest
from lavis_mafa.io.project_files import PROJECTS, check_yaml_file, project_file
from lavis_mafa.training.checkpoint import LAST
from research.studies.study_parts import (
    ROW,
    Column,
    GivenRow,
    Row,
    Step,
    Study,
    StudyError,
    StudyFile,
)

STUDIES = PROJECTS / "mafa" / "studies"
_PARAMETER = re.compile(r"(?<!\$)\{(\w+)(?:([*/-])(\d+))?\}")
OWN = {"seed", "folder"}  # placeholders that do not stand for a checkpoint
MEASURED = "measured"  # kind of a column whose figure the study's measuring function returns


def read_study(
    path: str | Path, at: str | None = None, parameters: Mapping[str, Any] | None = None
) -> Study:
    """Read a study file and its bases.

    Args:
        path: a file, or the name of a shipped one, such as ``compare``.
        at: name of a section, and what ``{at}`` stands for in the name of the base; None: ``toy``
            for such a base, otherwise no section.
        parameters: values that override those of the files.

    Raises:
        ValueError: if several shipped files have the name.
        StudyError: with all problems.
    """
    path = project_file(path)
    contents, file = [_load(path)], path
    by_name = "{at}" in str(contents[0].get("base"))
    name = at or ("toy" if by_name else "")
    while "base" in contents[-1]:
        file = _next_to(file, str(contents[-1]["base"]).replace("{at}", name))
        contents.append(_load(file))
    sections = [dict(content.pop("at", None) or {}) for content in contents]
    known = set(itertools.chain(*sections))
    if not by_name and name not in {"", *known}:
        raise StudyError(path, [f"--at {at}: there is no section {at}; {suggest(name, known)}"])
    pairs = zip(reversed(contents), reversed(sections), strict=True)
    try:
        layers = [layer for one, section in pairs for layer in (one, section.get(name) or {})]
        whole: Any = OmegaConf.to_container(OmegaConf.merge(*layers))
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise StudyError(path, [f"it does not fit its base: {error}"]) from None
    values = whole.get("parameters") or {}
    unknown = [one for one in parameters or () if one not in values]
    if unknown:
        raise StudyError(
            path, [f"parameters: there is no {one}; {suggest(one, values)}" for one in unknown]
        )
    values = {**values, **(parameters or {})}
    given = {**_replaced(whole, values), "parameters": values}
    resolver = _Resolver(_parsed(path, given))
    study = resolver.study(path, name)
    if resolver.problems:
        raise StudyError(path, resolver.problems)
    return study


def _load(path: Path) -> dict[str, Any]:
    try:
        check_yaml_file(path)
        loaded = OmegaConf.load(path)
    except OSError as error:
        raise StudyError(path, [f"it cannot be read ({error.strerror or error})"]) from None
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise StudyError(path, [f"it is not YAML ({' '.join(str(error).split())})"]) from None
    if not isinstance(loaded, DictConfig):
        raise StudyError(path, ["it is no mapping of title, rows, stages ..."])
    plain: dict[str, Any] = OmegaConf.to_container(loaded)  # type: ignore[assignment]
    return plain


def _next_to(path: Path, base: str) -> Path:
    """Return the path of a base next to a file, or of this project's study of that name."""
    beside, shipped = path.parent / base, STUDIES / base
    return shipped if shipped.is_file() and not beside.is_file() else beside


def _replaced(value: Any, parameters: Mapping[str, Any]) -> Any:
    """Return a value with parameter names replaced by their values, at any depth.

    A text that is one placeholder becomes the value itself, with its type. ``{name*2}``,
    ``{name/2}`` and ``{name-2}`` compute a value; the last two give a whole number of at least 1.
    """
    if isinstance(value, dict):
        return {key: _replaced(item, parameters) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, parameters) for item in value]
    if not isinstance(value, str):
        return value

    def of(found: re.Match[str]) -> Any:
        name, sign, number = found.groups()
        one = parameters.get(name, found[0])
        if name not in parameters or not sign:
            return one
        if sign == "*":
            return one * int(number)
        return max(1, one // int(number) if sign == "/" else one - int(number))

    found = _PARAMETER.fullmatch(value)
    return of(found) if found else _PARAMETER.sub(lambda found: str(of(found)), value)


def _parsed(path: Path, content: Mapping[str, Any]) -> StudyFile:
    try:
        return StudyFile.model_validate(content)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise StudyError(path, problems) from None


def _cell(value: Any) -> str:
    """Return a mark or value as a cell of a table."""
    if isinstance(value, bool):
        return "✓" if value else "✗"
    return "" if value is None else str(value)


class _Resolver:
    """Combines the parts of a file, and collects what does not fit in ``problems``."""

    def __init__(self, file: StudyFile) -> None:
        self.file, self.problems = file, list[str]()

    def study(self, path: Path, at: str) -> Study:
        file = self.file
        file.title = file.title or path.stem
        shared = {name: self._step(f"shared.{name}", one) for name, one in file.shared.items()}
        stages = {name: self._step(f"stages.{name}", one) for name, one in file.stages.items()}
        rows = self._of_runs(self._rows(), shared)
        if not stages and not any(row.run for row in rows):
            self.problems.append("stages: missing; name what is run for each row, or a base: --at")
        columns = {
            name: one.model_copy(
                update={
                    "name": name,
                    "title": one.title or name,
                    "stage": one.stage or next(reversed(stages), ""),
                }
            )
            for name, one in file.columns.items()
        }
        listed = list(itertools.chain(*file.tables.values()))
        shown = file.shows or listed or list(columns)
        self._check_names_of(rows, columns, shown, stages)
        return Study(
            path,
            at,
            file,
            shared,
            stages,
            rows,
            columns=[columns[name] for name in shown if name in columns],
            catalogue=columns,
        )

    def _check_names_of(
        self,
        rows: Sequence[Row],
        columns: Mapping[str, Column],
        shown: Sequence[str],
        stages: Mapping[str, Step],
    ) -> None:
        """Check that everything named in the file exists."""
        file, names = self.file, [row.name for row in rows]
        self._known("shows", "column", shown, columns)
        for name, column in columns.items():
            self._known(f"columns.{name}.stage", "stage", [column.stage], list(stages) or [""])
        for place, claim in enumerate(file.claims):
            self._known(f"claims.{place}", "row", [claim.row, claim.than], names)
            self._known(f"claims.{place}", "column", claim.columns, columns)
        if file.measure:
            self._known("measure.judges", "shared run", file.measure.judges, file.shared)
        elif any(column.kind == MEASURED for column in columns.values()):
            self.problems.append(f"measure: missing; columns of kind {MEASURED} need its function")

    def _rows(self) -> list[Row]:
        """Return every row with every combination of the values that vary."""
        vary, titles = self.file.vary, self.file.titles
        found = []
        for place, given in enumerate(self.file.rows):
            marks = {title: _cell(value) for title, value in given.marks.items()}
            options = self._options(f"rows.{place}", given)
            for values in itertools.product(*vary.values()):
                varied = dict(zip(vary, values, strict=True))
                named = {titles.get(key, key): _cell(value) for key, value in varied.items()}
                row = Row(
                    name=", ".join([given.name, *("=".join(pair) for pair in named.items())]),
                    cells={ROW: given.name, **marks, **named},
                    options={**options, **varied},
                    run=given.run,
                    source=given.source,
                )
                found.append(row)
        names = [row.name for row in found]
        twice = dict.fromkeys(name for name in names if names.count(name) > 1)
        self.problems += [f"rows: there are two called {name!r}" for name in twice]
        return found

    def _of_runs(self, rows: Sequence[Row], shared: Mapping[str, Step]) -> list[Row]:
        """Set the options of rows that show a shared run to those that differ from other rows."""
        for row in rows:
            self._known(f"row {row.name}: run", "shared run", [row.run] if row.run else [], shared)
        shown = {
            row.name: {**shared[row.run].options, **row.options}
            for row in rows
            if row.run in shared
        }
        common = {
            key
            for key, value in next(iter(shown.values()), {}).items()
            if all(options.get(key) == value for options in shown.values())
        }
        found = []
        for row in rows:
            options = shown.get(row.name, row.options)
            if row.name in shown:
                options = {key: value for key, value in options.items() if key not in common}
            found.append(replace(row, options=options))
        return found

    def _known(self, where: str, what: str, names: Iterable[str], known: Collection[str]) -> None:
        for name in names:
            if name not in known:
                self.problems.append(f"{where}: no {what} {name}; {suggest(name, known)}")

    def _options(self, where: str, given: Step | GivenRow) -> dict[str, Any]:
        """Return the settings that ``uses`` names, overridden by the options."""
        self._known(f"{where}.uses", "setting", given.uses, self.file.settings)
        used = [self.file.settings.get(name) or {} for name in given.uses]
        return {key: value for one in [*used, given.options] for key, value in one.items()}

    def _step(self, where: str, given: Step) -> Step:
        if not given.config:
            return given
        options = {**self.file.options, **self._options(where, given)}
        return given.model_copy(update={"options": options, "writes": LAST})
