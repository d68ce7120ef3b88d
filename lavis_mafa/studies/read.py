"""Reads a study file and its base; everything wrong in them is told together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lavis_mafa.config.check import suggest
from lavis_mafa.io.files import ROOT
from lavis_mafa.runners.checkpoint import LAST
from lavis_mafa.studies.keys import COLUMN, CONFIG, FIGURE, GIVEN, MODULE, PAPER, ROWS, TOP, typed
from lavis_mafa.studies.parts import ROW, Column, Paper, Row, Step, Study, StudyError, placeholders

BASES = ROOT / "projects" / "mafa" / "studies"
OWN = ("seed", "folder")  # placeholders that are no checkpoints
SCRIPTS = ("train.py", "evaluate.py")


def read_study(path: str | Path, at: str | None = None) -> Study:
    """Read a study file and its base.

    Args:
        at: name of a base (``base_NAME.yaml`` beside the file, or of this repository), or a YAML
            file; None: ``toy``, or no base if the file has stages itself.

    Raises:
        StudyError: with all problems of both.
    """
    path, problems = Path(path), list[str]()
    own = _load(path, problems)
    base_path = _base_of(path, at, "stages" in own, problems)
    base = _load(base_path, problems) if base_path else {}
    if problems:
        raise StudyError(path, problems)
    name = base_path.stem.removeprefix("base_") if base_path else ""
    own, base = typed(own, TOP, "", problems), typed(base, TOP, str(base_path), problems)
    sections = own.pop("at", {})
    here = {
        at: typed(content or {}, TOP, f"at.{at}", problems) for at, content in sections.items()
    }.get(name, {})
    try:
        whole: Any = OmegaConf.to_container(OmegaConf.merge(base, own, here))
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise StudyError(path, [*problems, f"it does not fit its base: {error}"]) from None
    reader = _Reader(whole, problems)
    study = reader.study(path, name)
    if not problems and "paper" in whole:
        # The paper's rows are those of the file, whatever a section makes of them.
        theirs = {**whole, "rows": own.get("rows") or [], "vary": own.get("vary") or {}}
        study = reader.with_paper(study, _Reader(theirs, []).rows())
    if problems:
        raise StudyError(path, problems)
    return study


def _load(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
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
    plain: Any = OmegaConf.to_container(loaded)
    return plain


def _base_of(path: Path, at: str | None, whole: bool, problems: list[str]) -> Path | None:
    if at is None and whole:
        return None
    at = at or "toy"
    if at.endswith((".yaml", ".yml")):
        return Path(at)
    folders = list(dict.fromkeys((path.parent.resolve(), BASES)))
    found = [f / f"base_{at}.yaml" for f in folders if (f / f"base_{at}.yaml").is_file()]
    if not found:
        there = sorted({p.stem[5:] for folder in folders for p in folder.glob("base_*.yaml")})
        problems.append(f"--at {at}: there is no base_{at}.yaml; {suggest(at, there)}")
    return found[0] if found else None


def _told(value: Any) -> str:
    """A mark or value as a cell of a table."""
    if isinstance(value, bool):
        return "✓" if value else "✗"
    return "" if value is None else str(value)


class _Reader:
    """Makes the parts of a study of a file's content; what is wrong goes to ``problems``."""

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
                self.problems.append(f"stages.{name}: there is another {name}; name it otherwise")
            if not name.isidentifier():
                self.problems.append(f"{name}: expected a name of letters, digits and _")
        if not stages:
            self.problems.append("stages: missing; name what is run for each row, or a base: --at")
        rows = self.rows()
        self._check_placeholders(shared, stages, rows)
        columns = self._columns(stages)
        x, y = self._figure(columns)
        shown = c.get("shows") or list(columns)
        for name in shown:
            if name not in columns:
                self.problems.append(f"shows: no column {name}; {suggest(str(name), columns)}")
        hidden = [name for name in y if name not in shown]
        self.problems += [f"figure.y: {name} is not among the columns shown" for name in hidden]
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
            source=c.get("source", ""),
            about=c.get("about", ""),
            notes=[str(note) for note in c.get("notes", [])],
            seeds=list(dict.fromkeys(seeds)),
            at_once=c.get("at_once", 1),
            processes=c.get("processes", 1),
            shared=shared,
            stages=stages,
            rows=rows,
            titles=self.titles,
            columns=[columns[name] for name in shown if name in columns],
            catalogue=columns,
            x=x,
            y=y,
            paper=None,
        )

    def with_paper(self, study: Study, rows: Sequence[Row]) -> Study:
        """The paper's numbers, if they fit the rows."""
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
        return Study(**{**vars(study), "paper": paper})

    def rows(self) -> list[Row]:
        """Every row with every combination of the values that vary."""
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
            marks = {str(title): _told(value) for title, value in given.get("marks", {}).items()}
            cells = {ROW: base, **marks} if base else marks
            options = self._options(given, where)
            for values in itertools.product(*vary.values()):
                varied = dict(zip(vary, values, strict=True))
                named = {self.titles.get(key, key): _told(value) for key, value in varied.items()}
                parts = [base] if base else []
                name = ", ".join([*parts, *(f"{title}={cell}" for title, cell in named.items())])
                found.append(Row(name, {**cells, **named}, base, varied, {**options, **varied}))
        names = [row.name for row in found]
        twice = dict.fromkeys(name for name in names if names.count(name) > 1)
        self.problems += [f"rows: there are two called {name!r}" for name in twice]
        return found

    def _mapping(self, key: str) -> dict[str, Any]:
        return {str(name): value for name, value in (self.content.get(key) or {}).items()}

    def _options(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The settings that ``uses`` names, then the options, as one."""
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
        """Checkpoints can be taken from what comes before."""
        there = {name: step for name, step in shared.items() if step.given}
        for kind, steps in (("shared", shared), ("stages", stages)):
            for place, step in enumerate(steps.values()):
                self._check_names(f"{kind}.{step.name}", step.names, there)
                for row in rows if kind == "stages" and not place else ():
                    names = placeholders(list(row.options.values()))
                    self._check_names(f"row {row.name}", names, there)
                there[step.name] = step

    def _check_names(self, where: str, names: set[str], there: Mapping[str, Step]) -> None:
        for name in sorted(names - {*OWN}):
            if name not in there:
                why = f"{{{name}}} is no run before it; {suggest(name, there)}"
                self.problems.append(f"{where}: {why}")
            elif not there[name].writes:
                self.problems.append(f"{where}: {name} leaves no checkpoint for {{{name}}}")

    def _columns(self, stages: Mapping[str, Step]) -> dict[str, Column]:
        found = {}
        for name, given in self._mapping("columns").items():
            one = typed(given, COLUMN, f"columns.{name}", self.problems)
            key, stage = one.get("key", name), one.get("stage") or (list(stages) or [""])[-1]
            keys = tuple(map(str, key if isinstance(key, list) else [key]))
            if stage not in stages:
                why = f"no stage {stage}; {suggest(stage, stages)}"
                self.problems.append(f"columns.{name}.stage: {why}")
            rest = {k: v for k, v in one.items() if k in ("kind", "split", "scale", "digits")}
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
        for name in y:
            if name not in columns:
                why = f"no column {name}; {suggest(str(name), columns)}"
                self.problems.append(f"figure.y: {why}")
        return x, [name for name in y if name in columns]
