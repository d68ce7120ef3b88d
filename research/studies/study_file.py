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

from lavis_mafa.io.project_files import PROJECTS, check_yaml_file, project_file
from lavis_mafa.settings.check import suggest
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
        at: name of a base (``base_NAME.yaml`` next to the file, or of this project), a YAML file,
            or a section of the file; None: ``toy``, or no base if the file is complete itself.
        parameters: values that override those of the files.

    Raises:
        StudyError: with all problems.
    """
    try:
        path = project_file(path)
    except ValueError as error:  # the name of several shipped files
        raise StudyError(path, [str(error)]) from None
    own, name = _load(path), at or ""
    contents, base = [own], _base_of(path, own, at)
    if base is not None and "base" not in own:
        name = base.stem.removeprefix("base_")
    while base is not None:
        contents.append(_load(base))
        base = _next_to(base, str(contents[-1]["base"])) if "base" in contents[-1] else None
    sections = [dict(content.pop("at", None) or {}) for content in contents]
    known = set(itertools.chain(*sections))
    if "base" in own and name not in {"", *known}:
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
    # The paper's rows come from the file, even if a section changes our rows.
    rows = {key: _replaced(own.get(key), values) for key in ("rows", "vary")}
    theirs = _parsed(path, {**given, **rows}) if given.get("paper") else resolver.file
    paper = resolver.paper(_Resolver(theirs).rows())
    if resolver.problems:
        raise StudyError(path, resolver.problems)
    return replace(study, paper=paper)


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


def _base_of(path: Path, own: Mapping[str, Any], at: str | None) -> Path | None:
    """Return the path of a file's base; None if it needs none."""
    if "base" in own:
        return _next_to(path, str(own["base"]))
    rows = own.get("rows") or []
    complete = "stages" in own or any(isinstance(row, dict) and "run" in row for row in rows)
    if complete and (at is None or at in (own.get("at") or {})):
        return None
    at = at or "toy"
    if at.endswith((".yaml", ".yml")):
        return Path(at)
    folders = list(dict.fromkeys((path.parent.resolve(), STUDIES)))
    found = [f / f"base_{at}.yaml" for f in folders if (f / f"base_{at}.yaml").is_file()]
    if not found:
        known = sorted({p.stem[5:] for folder in folders for p in folder.glob("base_*.yaml")})
        problem = f"--at {at}: there is no base_{at}.yaml; {suggest(at, known)}"
        raise StudyError(path, [problem])
    return found[0]


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
        rows = self._of_runs(self.rows(), shared)
        if not stages and not any(row.run for row in rows):
            self.problems.append("stages: missing; name what is run for each row, or a base: --at")
        columns = {
            name: one.model_copy(
                update={
                    "name": name,
                    "title": one.title or name,
                    "stage": one.stage or ([*stages] or [""])[-1],
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

    def rows(self) -> list[Row]:
        """Return every row with every combination of the values that vary."""
        vary, titles = self.file.vary, self.file.titles
        bases = self.file.rows or ([GivenRow()] if vary else [])
        if not bases:
            self.problems.append("rows: missing; list rows, or values of keys under vary")
        found = []
        for place, given in enumerate(bases):
            if not given.name and self.file.rows:
                self.problems.append(f"rows.{place}.name: missing")
            marks = {title: _cell(value) for title, value in given.marks.items()}
            cells = {ROW: given.name, **marks} if given.name else marks
            options = self._options(f"rows.{place}", given)
            for values in itertools.product(*vary.values()):
                varied = dict(zip(vary, values, strict=True))
                named = {titles.get(key, key): _cell(value) for key, value in varied.items()}
                parts = [given.name] if given.name else []
                name = ", ".join([*parts, *(f"{title}={cell}" for title, cell in named.items())])
                row = Row(
                    name=name,
                    cells={**cells, **named},
                    base=given.name,
                    values=varied,
                    options={**options, **varied},
                    run=given.run,
                    source=given.source,
                )
                found.append(row)
        names = [row.name for row in found]
        twice = dict.fromkeys(name for name in names if names.count(name) > 1)
        self.problems += [f"rows: there are two called {name!r}" for name in twice]
        return found

    def paper(self, rows: Sequence[Row]) -> list[tuple[Mapping[str, str], Sequence[Any]]]:
        """Return the paper's numbers with the cells of their rows; they must fit the rows."""
        given = self.file.paper
        if given is None:
            return []
        if len(given.rows) != len(rows):
            count = f"{len(given.rows)} rows for the {len(rows)} of the file"
            self.problems.append(f"paper.rows: {count}")
        found = list(zip(rows, given.rows, strict=False))
        for row, one in found:
            if len(one) not in (0, len(given.columns)):
                expected = f"expected {len(given.columns)} cells"
                self.problems.append(f"paper.rows: {row.name} has {one}, {expected}")
        return [(row.cells, one) for row, one in found]

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
        peculiar = {
            name: {key: value for key, value in options.items() if key not in common}
            for name, options in shown.items()
        }
        return [
            replace(row, options=peculiar[row.name]) if row.name in peculiar else row
            for row in rows
        ]

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
        writes = LAST if given.script == "train.py" else ""
        return given.model_copy(update={"options": options, "writes": writes})
