"""Read a study file and its bases; all problems in them are reported together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lavis_mafa.config.check import suggest
from lavis_mafa.io.project_files import PROJECTS, project_file
from lavis_mafa.io.yaml_files import check_yaml_file
from lavis_mafa.runners.checkpoint import LAST
from lavis_mafa.studies.keys import (
    CLAIM,
    COLUMN,
    CONFIG,
    CURVE,
    FIGURE,
    GIVEN,
    MEASURE,
    MODULE,
    PAPER,
    REFERENCE,
    ROWS,
    TOP,
    typed,
)
from lavis_mafa.studies.parts import (
    MEASURED,
    ROW,
    Claim,
    Column,
    LogCurve,
    Paper,
    Reference,
    Row,
    Step,
    Study,
    StudyError,
    placeholders,
)

PARAMETER = re.compile(r"(?<!\$)\{(\w+)(?:([*/-])(\d+))?\}")
STUDIES = PROJECTS / "mafa" / "studies"
OWN = ("seed", "folder")  # placeholders that stand for no checkpoint
SCRIPTS = ("train.py", "evaluate.py")
SHARED = "shared/seed_{seed}/{name}"  # where shared runs write, below the output folder
KINDS = ("step", "epoch")
BETTER = ("higher", "lower")


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
        StudyError: with all problems of all files.
    """
    try:
        path, problems = project_file(path), list[str]()
    except ValueError as error:  # the name of several shipped files
        raise StudyError(path, [str(error)]) from None
    own = _load(path, problems)
    files, name = [(path, own)], at or ""
    base = _base_of(path, own, at, problems)
    if base is not None and "base" not in own:
        name = base.stem.removeprefix("base_")
    while base is not None:
        content = _load(base, problems)
        files.append((base, content))
        base = _next_to(base, str(content["base"])) if "base" in content else None
    sections_known = {section for _, content in files for section in content.get("at") or {}}
    if "base" in own and name not in {"", *sections_known}:
        problems.append(f"--at {at}: there is no section {at}; {suggest(name, sections_known)}")
    if problems:
        raise StudyError(path, problems)
    layers = []
    for place, content in reversed(files):
        layer = typed(content, TOP, "" if place == path else str(place), problems)
        sections = {
            at: typed(section or {}, TOP, f"at.{at}", problems)
            for at, section in layer.pop("at", {}).items()
        }
        layers += [layer, sections.get(name, {})]
    try:
        whole: Any = OmegaConf.to_container(OmegaConf.merge(*layers))
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise StudyError(path, [*problems, f"it does not fit its base: {error}"]) from None
    known = whole.get("parameters") or {}
    for one in parameters or ():
        if one not in known:
            problems.append(f"parameters: there is no {one}; {suggest(one, known)}")
    whole["parameters"] = known = {**known, **(parameters or {})}
    whole = {**_replaced(whole, known), "parameters": known}
    reader = _Reader(whole, problems)
    study = reader.study(path, name)
    if not problems and whole.get("paper"):
        # The paper's rows are those of the file, even if a section changes ours.
        theirs = {**whole, "rows": own.get("rows") or [], "vary": own.get("vary") or {}}
        study = reader.with_paper(study, _Reader(theirs, []).rows())
    if problems:
        raise StudyError(path, problems)
    return study


def _load(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        check_yaml_file(path)
        loaded = OmegaConf.load(path)
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror or error})")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        problems.append(f"{path}: is not YAML ({' '.join(str(error).split())})")
        return {}
    if not isinstance(loaded, DictConfig):
        problems.append(f"{path}: is no mapping of title, rows, stages ...")
        return {}
    plain: dict[str, Any] = OmegaConf.to_container(loaded)  # type: ignore[assignment]
    return plain


def _base_of(
    path: Path, own: Mapping[str, Any], at: str | None, problems: list[str]
) -> Path | None:
    """Return the path of a file's base; None if it needs none."""
    if "base" in own:
        return _next_to(path, str(own["base"]))
    rows = own.get("rows") or []
    complete = "stages" in own or any(isinstance(row, dict) and "run" in row for row in rows)
    if at is None and complete:
        return None
    at = at or "toy"
    if at.endswith((".yaml", ".yml")):
        return Path(at)
    folders = list(dict.fromkeys((path.parent.resolve(), STUDIES)))
    found = [f / f"base_{at}.yaml" for f in folders if (f / f"base_{at}.yaml").is_file()]
    if not found:
        known = sorted({p.stem[5:] for folder in folders for p in folder.glob("base_*.yaml")})
        problems.append(f"--at {at}: there is no base_{at}.yaml; {suggest(at, known)}")
    return found[0] if found else None


def _next_to(path: Path, base: str) -> Path:
    """Return the path of a base next to a file, or of this project's study of that name."""
    beside, shipped = path.parent / base, STUDIES / base
    return shipped if shipped.is_file() and not beside.is_file() else beside


def _replaced(value: Any, parameters: Mapping[str, Any]) -> Any:
    """Return a value with the parameters' values in the places of their names, at any depth.

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

    found = PARAMETER.fullmatch(value)
    return of(found) if found else PARAMETER.sub(lambda found: str(of(found)), value)


def _cell(value: Any) -> str:
    """Return a mark or value as a cell of a table."""
    if isinstance(value, bool):
        return "✓" if value else "✗"
    return "" if value is None else str(value)


def _keys(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of logged figures that ``key`` gives, as one text or a list."""
    key = given.get("key", [])
    return tuple(map(str, key if isinstance(key, list) else [key]))


class _Reader:
    """Build the parts of a study from its content; errors are added to ``problems``."""

    def __init__(self, content: dict[str, Any], problems: list[str]) -> None:
        self.content, self.problems = content, problems
        self.titles = {key: str(value) for key, value in self._mapping("titles").items()}
        given = self._mapping("settings")
        kept = typed(given, dict.fromkeys(given, dict), "settings", problems)
        self.settings: dict[str, Any] = {**dict.fromkeys(given, {}), **kept}

    def study(self, path: Path, at: str) -> Study:
        c = self.content
        shared = {name: self._step("shared", name) for name in self._mapping("shared")}
        stages = {name: self._step("stages", name) for name in self._mapping("stages")}
        for name in [*shared, *stages]:
            if name in OWN or (name in shared and name in stages):
                self.problems.append(f"stages.{name}: there is another {name}; rename one of them")
            if not name.isidentifier():
                self.problems.append(f"{name}: expected a name of letters, digits and _")
        rows = self._with_runs(self.rows(), shared, stages)
        if not stages and not any(row.run for row in rows):
            self.problems.append("stages: missing; name what is run for each row, or a base: --at")
        self._check_placeholders(shared, stages, rows)
        columns = self._columns(stages)
        x, y = self._figure(columns)
        tables = {str(k): [str(one) for one in v] for k, v in self._mapping("tables").items()}
        listed = [name for names in tables.values() for name in names]
        shown = [str(one) for one in c.get("shows") or listed or columns]
        self._known("shows", "column", shown, columns)
        hidden = [name for name in y if name not in shown]
        self.problems += [f"figure.y: {name} is not among the columns shown" for name in hidden]
        reference, measure = self._reference(rows, columns, tables), None
        curves = self._curves(rows)
        if given := typed(self._mapping("measure"), MEASURE, "measure", self.problems):
            measure = (given.get("function", ""), given.get("judges", []))
            self._known("measure.judges", "shared run", measure[1], shared)
        elif any(column.kind == MEASURED for column in columns.values()):
            self.problems.append(f"measure: missing; columns of kind {MEASURED} need its function")
        if c.get("gallery"):
            self._known("gallery", "shared run", [c["gallery"]], shared)
        seeds = c.get("seeds") or [42]
        if not all(isinstance(seed, int) and seed >= 0 for seed in seeds):
            self.problems.append(f"seeds: are {seeds}, expected whole numbers >= 0")
            seeds = []
        for name in ("at_once", "processes"):
            if c.get(name, 1) < 1:
                self.problems.append(f"{name}: is {c[name]}, expected at least 1")
        return Study(
            path=path,
            at=at,
            title=c.get("title") or path.stem,
            source=c.get("source") or "",
            about=c.get("about") or "",
            notes=[str(note) for note in c.get("notes") or []],
            seeds=list(dict.fromkeys(seeds)),
            at_once=c.get("at_once", 1),
            processes=c.get("processes", 1),
            parameters=c["parameters"],
            folders=c.get("folders") or SHARED,
            shared=shared,
            stages=stages,
            rows=rows,
            titles=self.titles,
            columns=[columns[name] for name in shown if name in columns],
            catalogue=columns,
            tables=tables,
            reference=reference,
            claims=self._claims(rows, columns),
            measure=measure,
            curves=curves,
            gallery=c.get("gallery") or "",
            headline=c.get("headline") or "",
            x=x,
            y=y,
            paper=None,
        )

    def with_paper(self, study: Study, rows: Sequence[Row]) -> Study:
        """Return the study with the paper's numbers; they must fit the rows."""
        given = typed(self.content["paper"], PAPER, "paper", self.problems)
        columns, numbers = [str(one) for one in given.get("columns", [])], given.get("rows", [])
        if isinstance(numbers, dict):
            names = [row.name for row in rows]
            unknown = [name for name in numbers if name not in names]
            self.problems += [f"paper.rows: no row {n}; {suggest(str(n), names)}" for n in unknown]
            numbers = [numbers.get(name) or [] for name in names]
        elif len(numbers) != len(rows):
            self.problems.append(f"paper.rows: {len(numbers)} rows for the {len(rows)} of the file")
        for place, one in enumerate(numbers):
            if not isinstance(one, list) or len(one) not in (0, len(columns)):
                name = rows[place].name if place < len(rows) else place
                self.problems.append(f"paper.rows: {name} has {one}, expected {len(columns)} cells")
        paper = Paper(given.get("about", ""), columns, numbers, [row.cells for row in rows])
        return replace(study, paper=paper)

    def rows(self) -> list[Row]:
        """Return every row with every combination of the values that vary."""
        vary = self._mapping("vary")
        for key, values in vary.items():
            if not isinstance(values, list) or not values:
                self.problems.append(f"vary.{key}: is {values!r}, expected a list of values")
        vary = {key: values for key, values in vary.items() if isinstance(values, list)}
        bases = self.content.get("rows") or ([{}] if vary else [])
        if not bases:
            self.problems.append("rows: missing; list rows, or values of keys under vary")
        found = []
        for place, one in enumerate(bases):
            where = f"rows.{place}"
            given = typed(one, ROWS, where, self.problems)
            base = given.get("name", "")
            if not base and "rows" in self.content and self.content["rows"]:
                self.problems.append(f"{where}.name: missing")
            marks = {str(title): _cell(value) for title, value in given.get("marks", {}).items()}
            cells = {ROW: base, **marks} if base else marks
            options = self._options(given, where)
            more = {key: given[key] for key in ("run", "stages", "source") if key in given}
            for values in itertools.product(*vary.values()):
                varied = dict(zip(vary, values, strict=True))
                named = {self.titles.get(key, key): _cell(value) for key, value in varied.items()}
                parts = [base] if base else []
                name = ", ".join([*parts, *(f"{title}={cell}" for title, cell in named.items())])
                cells_here, options_here = {**cells, **named}, {**options, **varied}
                found.append(Row(name, cells_here, base, varied, options_here, **more))
        names = [row.name for row in found]
        twice = dict.fromkeys(name for name in names if names.count(name) > 1)
        self.problems += [f"rows: there are two called {name!r}" for name in twice]
        return found

    def _with_runs(
        self, rows: Sequence[Row], shared: Mapping[str, Step], stages: Mapping[str, Step]
    ) -> list[Row]:
        """Give rows that show a shared run what is peculiar to them as their options."""
        for row in rows:
            if row.run:
                self._known(f"row {row.name}: run", "shared run", [row.run], shared)
            if row.run and (stages or row.stages):
                why = "a row with run has no stages of its own"
                self.problems.append(f"row {row.name}: {why}")
            for name, options in row.stages.items():
                self._known(f"row {row.name}: stages", "stage", [name], stages)
                if not isinstance(options, dict):
                    self.problems.append(f"row {row.name}: stages.{name}: expected a mapping")
        shown = {
            row.name: {**shared[row.run].options, **row.options}
            for row in rows
            if row.run in shared
        }
        common = [
            key
            for key, value in next(iter(shown.values()), {}).items()
            if all(options.get(key) == value for options in shown.values())
        ]
        return [
            replace(row, options={k: v for k, v in shown[row.name].items() if k not in common})
            if row.name in shown
            else row
            for row in rows
        ]

    def _known(self, where: str, what: str, names: Sequence[str], known: Collection[str]) -> None:
        for name in names:
            if name not in known:
                self.problems.append(f"{where}: no {what} {name}; {suggest(name, known)}")

    def _reference(
        self, rows: Sequence[Row], columns: Mapping[str, Column], tables: Collection[str]
    ) -> Reference | None:
        given = typed(self._mapping("reference"), REFERENCE, "reference", self.problems)
        row, shown = given.get("row", ""), [str(one) for one in given.get("columns", [])]
        after = given.get("after", "")
        if not shown:
            return None
        self._known("reference.row", "row", [row], [one.name for one in rows])
        self._known("reference.columns", "column", shown, columns)
        self._known("reference.after", "table", [after] if after else [], tables)
        return Reference(row, shown, after)

    def _claims(self, rows: Sequence[Row], columns: Mapping[str, Column]) -> list[Claim]:
        found, names = [], [row.name for row in rows]
        for place, one in enumerate(self.content.get("claims") or []):
            where = f"claims.{place}"
            given = typed(one, CLAIM, where, self.problems)
            lacking = [key for key in ("claim", "row", "than", "column") if key not in given]
            if lacking or given.get("better", "higher") not in BETTER:
                known = " or ".join(BETTER)
                self.problems.append(
                    f"{where}: expected claim, row, than and column, and better: {known}"
                )
                continue
            self._known(where, "row", [given["row"], given["than"]], names)
            self._known(where, "column", [given["column"]], columns)
            if given["column"] in columns:
                column = columns[given.pop("column")]
                found.append(Claim(**{"source": "", **given}, column=column))
        return found

    def _curves(self, rows: Sequence[Row]) -> list[LogCurve]:
        """Return the curves of logs; a line is called as its row."""
        found, names = [], [row.name for row in rows]
        for place, one in enumerate(self.content.get("curves") or []):
            where = f"curves.{place}"
            given = typed(one, CURVE, where, self.problems)
            keys, kind, lines = _keys(given), given.get("kind", "epoch"), given.get("lines")
            if not keys or kind not in KINDS:
                self.problems.append(f"{where}: expected a key, and a kind: {' or '.join(KINDS)}")
            self._known(f"{where}.lines", "row", lines or [], names)
            title = given.get("title", ", ".join(keys))
            found.append(LogCurve(title, keys, kind, lines or names))
        return found

    def _mapping(self, key: str) -> dict[str, Any]:
        return {str(name): value for name, value in (self.content.get(key) or {}).items()}

    def _options(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the settings that ``uses`` names, overridden by the options."""
        settings, found = self.settings, dict[str, Any]()
        for name in given.get("uses", []):
            if name in settings:
                found |= settings[name]
            else:
                self.problems.append(f"{where}.uses: no setting {name}; {suggest(name, settings)}")
        found |= given.get("options", {})
        for key, value in found.items():
            if isinstance(value, dict):
                self.problems.append(f"{where}.options.{key}: is a mapping; write {key}.name: ...")
        return found

    def _step(self, kind: str, name: str) -> Step:
        where, given = f"{kind}.{name}", self.content[kind][name]
        form: dict[str, Any] = CONFIG
        if kind == "shared" and isinstance(given, dict):
            form = MODULE if "module" in given else GIVEN if "checkpoint" in given else CONFIG
        one = typed(given, form, where, self.problems)
        if form is GIVEN:
            return Step(name, given=one.get("checkpoint", ""))
        if form is MODULE:
            arguments = tuple(str(value) for value in one.get("arguments", []))
            return Step(
                name,
                module=one.get("module", ""),
                arguments=arguments,
                writes=one.get("writes", ""),
            )
        script = one.get("script", "train.py")
        if script not in SCRIPTS:
            self.problems.append(f"{where}.script: is {script}, expected {' or '.join(SCRIPTS)}")
        if "config" not in one:
            self.problems.append(f"{where}.config: missing; name a YAML file of {script}")
        options = {**self._mapping("options"), **self._options(one, where)}
        writes = LAST if script == "train.py" else ""
        return Step(name, script, one.get("config", ""), options, writes=writes)

    def _check_placeholders(
        self, shared: Mapping[str, Step], stages: Mapping[str, Step], rows: Sequence[Row]
    ) -> None:
        """Check that every placeholder names an earlier run."""
        earlier = {name: step for name, step in shared.items() if step.given}
        for kind, steps in (("shared", shared), ("stages", stages)):
            for place, step in enumerate(steps.values()):
                self._check_names(f"{kind}.{step.name}", step.names, earlier)
                of_first_stage = [] if place else list(rows)
                shown = [row for row in rows if row.run == step.name]
                for row in shown if kind == "shared" else of_first_stage:
                    values = [*row.options.values()]
                    self._check_names(f"row {row.name}", placeholders(values), earlier)
                earlier[step.name] = step

    def _check_names(self, where: str, names: set[str], earlier: Mapping[str, Step]) -> None:
        for name in sorted(names - {*OWN}):
            if name not in earlier:
                why = f"{{{name}}} is not an earlier run; {suggest(name, earlier)}"
                self.problems.append(f"{where}: {why}")
            elif not earlier[name].writes:
                why = f"{name} writes no checkpoint, so {{{name}}} cannot be used here"
                self.problems.append(f"{where}: {why}")

    def _columns(self, stages: Mapping[str, Step]) -> dict[str, Column]:
        found, known = {}, list(stages) or [""]
        for name, given in self._mapping("columns").items():
            one = typed(given, COLUMN, f"columns.{name}", self.problems)
            keys, stage = _keys(one) or (name,), one.get("stage") or known[-1]
            self._known(f"columns.{name}.stage", "stage", [stage], known)
            if one.get("best", "max") not in ("max", "min"):
                self.problems.append(f"columns.{name}.best: is {one['best']}, expected max or min")
            rest = {k: v for k, v in one.items() if k not in ("title", "key", "stage")}
            found[name] = Column(name, one.get("title", name), keys, stage, **rest)
        if not found:
            self.problems.append("columns: missing; name figures of the log that the table shows")
        return found

    def _figure(self, columns: Mapping[str, Column]) -> tuple[str, list[str]]:
        given = typed(self.content.get("figure", {}), FIGURE, "figure", self.problems)
        x, y = given.get("x", ROW), given.get("y", [])
        keys = [*self._mapping("vary"), ROW]
        if x not in keys:
            self.problems.append(f"figure.x: {x} does not vary; {suggest(x, keys)}")
        self._known("figure.y", "column", y, columns)
        return x, [name for name in y if name in columns]
