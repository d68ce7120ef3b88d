"""Plan the runs of a study, with their dependencies, and check their configs.

A run's key is a digest of everything that its weights depend on: options, the content of the files
it names, code, versions, seed, and the keys of the runs whose checkpoints it uses. Stages are in
folders named by the key, so that equal rows of one or several studies are run once, and a run is
not used after anything in its key has changed.
"""

from __future__ import annotations

import itertools
import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lavis_mafa._version import __version__
from lavis_mafa.algorithm.options import suggest
from lavis_mafa.io.project_files import project_file
from lavis_mafa.settings import ConfigError, load_config
from research.studies.run_key import digest_of, source_of, text_if_any, with_contents, yaml_of
from research.studies.study_file import OWN
from research.studies.study_parts import PLACEHOLDER, Row, Step, Study, StudyError

RESUME = "run.resume_ckpt_path=auto"
DONE, COMMAND, FIGURES = "done", "command.txt", "figures.json"

logger = logging.getLogger(__name__)


@dataclass
class Job:
    """A run of a study: one call of a script or module of this repository.

    Attributes:
        name: short name for progress and folders; ``title`` is the name in reports.
        command: the script and its arguments, as a user would type them after ``python``.
        folder: the folder to which it writes.
        needs: names of jobs that must be done before.
        config, options: call of ``lavis-mafa train``; empty for a module.
        writes: the checkpoint that it writes to its folder.
        key: digest of everything that it depends on.
        form: digest of its config and options, without the runs whose checkpoints it uses.
    """

    name: str
    title: str
    command: list[str]
    folder: Path
    needs: frozenset[str] = frozenset()
    config: str = ""
    options: tuple[str, ...] = ()
    writes: str = ""
    key: str = ""
    form: str = ""

    @property
    def checkpoint(self) -> Path:
        return self.folder / self.writes

    @property
    def done(self) -> bool:
        """Return whether this run (not another one) was completed in its folder."""
        return text_if_any(self.folder / DONE) == self.key

    @property
    def record(self) -> str:
        """Return the content of `COMMAND`: the key and the command."""
        return f"# {self.key}\n{self.shown_command}\n"

    @property
    def displaced(self) -> bool:
        """Return whether its folder holds another run."""
        found = text_if_any(self.folder / COMMAND)
        return found is not None and found.partition("\n")[0] != f"# {self.key}"

    @property
    def shown_command(self) -> str:
        """Return the command as a user types it."""
        return shlex.join(["python", *self.command])


@dataclass
class Plan:
    """The runs of some rows and seeds.

    Attributes:
        output: folder of all runs. Shared runs write below it as the study's ``folders`` says,
            stages of rows below ``runs/seed_K``.
        jobs: jobs by name, each after the jobs that it needs.
        of: jobs by row, seed and stage; a row that shows a shared run has one stage, "".
        judges: the runs by which the measuring function judges, by seed.
        given: existing checkpoints that replace shared runs, by name.
        page: folder of the page.
        command: command that reproduces the study.
        measured_by: digest of the measuring function's code.
    """

    study: Study
    output: Path
    seeds: Sequence[int]
    page: Path
    command: str
    jobs: dict[str, Job] = field(default_factory=dict)
    of: dict[str, dict[int, dict[str, Job]]] = field(default_factory=dict)
    judges: dict[int, list[Job]] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    measured_by: str = ""


def narrowed(
    study: Study,
    rows: Sequence[str] | None = None,
    shows: Sequence[str] | None = None,
    given: Mapping[str, str] | None = None,
) -> Study:
    """Return the study with only some rows and columns, and given checkpoints for shared runs.

    Args:
        rows: names of rows, or of shared runs that rows show unchanged.

    Raises:
        StudyError: for unknown names.
    """
    called = {
        row.name: {row.name, *([row.run] if shows_shared(study, row) else [])} for row in study.rows
    }
    known = {"--rows": set(itertools.chain(*called.values()))}
    known |= {"--given": {*study.shared}, "--columns": {*study.catalogue}}
    chosen = {"--rows": rows, "--columns": shows, "--given": given}
    problems = [
        f"{option}: no {name}; {suggest(name, known[option])}"
        for option, names in chosen.items()
        for name in names or ()
        if name not in known[option]
    ]
    if problems:
        raise StudyError(study.path, problems)
    places = {name: Step(checkpoint=path) for name, path in (given or {}).items()}
    kept = [row for row in study.rows if rows is None or called[row.name] & {*rows}]
    shown = {row.name for row in kept}
    claims = [claim for claim in study.file.claims if {claim.row, claim.than} <= shown]
    return replace(
        study,
        file=study.file.model_copy(update={"claims": claims}),
        shared={**study.shared, **places},
        rows=kept,
        columns=study.columns if shows is None else [study.catalogue[name] for name in shows],
    )


def shows_shared(study: Study, row: Row) -> bool:
    """Return whether a row shows a shared run unchanged, rather than a variant of it."""
    step = study.shared.get(row.run)
    return step is not None and _with(step, row.options) == step


def make_plan(
    study: Study, output: Path, seeds: Sequence[int], page: Path | None = None, command: str = ""
) -> Plan:
    """Return the plan of all rows and seeds with the runs they need, in the order of seeds."""
    plan = Plan(study, output, seeds, page or output, command)
    if study.file.measure:
        module = study.file.measure.function.partition(":")[0]
        plan.measured_by = digest_of([source_of(module), __version__])
    for seed in seeds:
        maker = _Maker(plan, seed)
        for row in study.rows:
            plan.of.setdefault(row.name, {})[seed] = maker.row(row)
        judges = study.file.measure.judges if study.file.measure else []
        made = [maker.shared(name) for name in judges]
        plan.judges[seed] = [job for job in made if isinstance(job, Job)]
    return plan


class _Maker:
    """Build the jobs of one seed."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan, self.study, self.seed = plan, plan.study, seed

    def row(self, row: Row) -> dict[str, Job]:
        """Return the jobs of the stages that columns need, directly or by way of other stages."""
        if row.run:
            return {"": self._run_of(row)}
        stages = self.study.stages
        first = next(iter(stages))
        own = {**stages, first: _with(stages[first], row.options)}
        made: dict[str, Job] = {}
        for column in self.study.columns:
            self._stage(column.stage, own, made, row.name)
        return made

    def _run_of(self, row: Row) -> Job:
        """Return the job of the shared run that a row shows, or its own job if it sets other
        options."""
        if not shows_shared(self.study, row):
            return self._job(row.run, _with(self.study.shared[row.run], row.options), row.name)
        job = self.shared(row.run)
        if isinstance(job, str):  # a given checkpoint has no logs
            problem = f"row {row.name}: {row.run} was replaced by --given and has no results"
            raise StudyError(self.study.path, [f"{problem}; exclude this row with --rows"])
        return job

    def _stage(self, name: str, stages: Mapping[str, Step], made: dict[str, Job], row: str) -> Job:
        if name not in made:
            names = stages[name].names & {*stages}
            earlier = {one: self._stage(one, stages, made, row) for one in sorted(names)}
            title = f"{row}, {name}" if len(stages) > 1 else row
            made[name] = self._job(name, stages[name], title, earlier)
        return made[name]

    def shared(self, name: str) -> Job | str:
        """Return the job of a shared run, or the path of a given checkpoint."""
        step = self.study.shared[name]
        if step.checkpoint:
            self.plan.given[name] = step.checkpoint
            return step.checkpoint
        folder = self.plan.output / self.study.file.folders.format(seed=self.seed, name=name)
        known = self.plan.jobs.get(f"{name}/{self.seed}")
        return known or self._job(name, step, name, folder=folder)

    def _job(
        self,
        name: str,
        step: Step,
        title: str,
        earlier: Mapping[str, Job] | None = None,
        folder: Path | None = None,
    ) -> Job:
        """Return the job of a step.

        Args:
            earlier: jobs of this row's earlier stages; other placeholders name shared runs.
            folder: folder to which it writes; if None, or if another run is there, a folder named
                by its key.
        """
        needs: dict[str, Job | str] = dict(earlier or {})
        needs |= {one: self.shared(one) for one in sorted(step.names - OWN - {*needs})}
        config = yaml_of(project_file(step.config)) if step.config else None
        files = with_contents([config, step.options]), with_contents(step.arguments, folders=True)
        # "train.py" distinguishes nothing, but is part of the keys of finished runs.
        code = ["train.py", step.module, source_of(step.module), __version__, torch.__version__]
        form = digest_of([step.config, *files, *code, self.study.file.processes])
        sources = {one: getattr(job, "key", with_contents(job)) for one, job in needs.items()}
        key = digest_of([form, self.seed, sources])
        place = f"{folder.name if folder else f'{name}-{key}'}/{self.seed}"
        if place in self.plan.jobs:
            return self.plan.jobs[place]
        names = {one: str(getattr(job, "checkpoint", job)) for one, job in needs.items()}
        own = self.plan.output / "runs" / f"seed_{self.seed}" / f"{name}-{key}"
        if folder and Job(name, title, [], folder, key=key).displaced:
            logger.warning(
                "%s holds a run of other settings, files, code or versions (see its %s): this one "
                "is in %s",
                folder,
                COMMAND,
                own,
            )
            folder = own
        folder = folder or own
        names |= {"seed": str(self.seed), "folder": str(folder)}
        job = Job(
            place,
            f"{title}, seed {self.seed}",
            self._command(step, folder, names),
            folder,
            frozenset(one.name for one in needs.values() if isinstance(one, Job)),
            writes=step.writes,
            key=key,
            form=form,
        )
        if step.config:
            job.config = str(project_file(step.config))
            job.options = tuple(job.command[job.command.index("--options") + 1 :])
        self.plan.jobs[place] = job
        return job

    def _command(self, step: Step, folder: Path, names: Mapping[str, str]) -> list[str]:
        if step.module:
            arguments = [str(_filled(one, names)) for one in step.arguments]
            own = [f"{key}={written(value)}" for key, value in step.options.items()]
            return ["-m", step.module, *arguments, *own]
        options = {"run.seed": self.seed, **dict(sorted(step.options.items()))}
        options = {key: _filled(value, names) for key, value in options.items()}
        options |= {"run.output_dir": folder.parent, "run.job_id": folder.name}
        command = ["-m", "lavis_mafa", "train", "--cfg-path", str(project_file(step.config))]
        command += ["--options", *(f"{key}={written(value)}" for key, value in options.items())]
        command.append(RESUME)
        if self.study.file.processes == 1:
            return command
        count = f"--nproc_per_node={self.study.file.processes}"
        return ["-m", "torch.distributed.run", "--standalone", count, *command]


def written(value: Any) -> str:
    """Return a value as a user types it after ``key=`` in options."""
    plain = value is None or isinstance(value, (list, dict, bool))
    return json.dumps(value) if plain else str(value)


def _with(step: Step, options: Mapping[str, Any]) -> Step:
    return step.model_copy(update={"options": {**step.options, **options}})


def _filled(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value, with placeholders replaced if it is a text."""
    if not isinstance(value, str):
        return value
    return PLACEHOLDER.sub(lambda found: names[found[1]], value)


def check(plan: Plan) -> None:
    """Check every config with its options as training would.

    Raises:
        StudyError: with all problems, each listed once with the runs that have it.
    """
    problems: dict[str, list[str]] = {}
    splits: dict[str, list[str]] = {}
    forms: dict[str, list[Job]] = {}
    for job in plan.jobs.values():
        if job.config and job.name.endswith(f"/{plan.seeds[0]}"):
            forms.setdefault(job.form, []).append(job)
    for form, jobs in forms.items():
        try:
            cfg = load_config(jobs[0].config, list(jobs[0].options), machine=False)
            splits[form] = list(cfg.run_cfg.test_splits)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).extend(job.title for job in jobs)
    for row, by_seed in plan.of.items():
        for column in plan.study.columns:
            known = splits.get(by_seed[plan.seeds[0]][column.stage].form)
            if column.kind == "eval" and known is not None and column.split not in known:
                reads = f"column {column.name} reads split {column.split}"
                problems.setdefault(f"{reads}, run.test_splits: {known}", []).append(row)
    if problems:
        lines = [f"{_some(where)}: {problem}" for problem, where in problems.items()]
        raise StudyError(plan.study.path, lines)


def _some(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
