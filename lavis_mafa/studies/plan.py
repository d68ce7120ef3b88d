"""The runs of a study: what each does and needs, and the check of their configs.

A stage's folder is named by a digest of all that its weights depend on: rows that are the same, in
one study or in several with one output folder, are run once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lavis_mafa.config import ConfigError, MafaConfig, load_config
from lavis_mafa.config.check import suggest
from lavis_mafa.io.project_files import project_file
from lavis_mafa.studies.parts import PLACEHOLDER, Row, Step, Study, StudyError
from lavis_mafa.studies.runs import Run, command_of

RESUME = "run.resume_ckpt_path=auto"


@dataclass
class Job(Run):
    """A run of a study.

    Attributes:
        key: digest of all that it depends on except the seed.
        form: digest of its config and options, whatever runs it takes checkpoints from.
        script, config, options: of train.py or evaluate.py; "" and () of a module.
        writes: the checkpoint that it writes to its folder.
    """

    script: str = ""
    config: str = ""
    options: tuple[str, ...] = ()
    writes: str = ""
    key: str = ""
    form: str = ""

    @property
    def checkpoint(self) -> Path:
        return self.folder / self.writes


@dataclass
class Plan:
    """All runs of some rows and seeds.

    Attributes:
        jobs: by name, in the order in which they should start.
        of: by row, seed and stage, its job; a row that shows a shared run has one stage, "".
        judges: by seed, the runs that the measuring function judges by.
        given: existing checkpoints that replace shared runs, by name.
        command: reproduces the study.
        results: where the report is written.
        recorded: recorded results to pool instead of running, by path (`recorded.read_recorded`);
            ``jobs``, ``of`` and ``judges`` are then empty.
    """

    study: Study
    output: Path
    seeds: Sequence[int]
    results: Path
    jobs: dict[str, Job] = field(default_factory=dict)
    of: dict[str, dict[int, dict[str, Job]]] = field(default_factory=dict)
    judges: dict[int, list[Job]] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    command: str = ""
    recorded: Mapping[Path, Mapping[str, Any]] = field(default_factory=dict)


def narrowed(
    study: Study,
    rows: Sequence[str] | None = None,
    shows: Sequence[str] | None = None,
    given: Mapping[str, str] | None = None,
) -> Study:
    """Return the study with only some rows and columns, and given checkpoints for shared runs.

    Args:
        rows: names of rows, or of the shared runs that rows show as they are.

    Raises:
        StudyError: for unknown names.
    """
    problems = []
    called = {
        row.name: {row.name, *([row.run] if shows_shared(study, row) else [])} for row in study.rows
    }
    known = {"--rows": list(itertools.chain(*called.values()))}
    known |= {"--given": list(study.shared), "--columns": list(study.catalogue)}
    chosen = {"--rows": rows, "--columns": shows, "--given": given}
    for option, names in chosen.items():
        for name in names or ():
            if name not in known[option]:
                problems.append(f"{option}: no {name}; {suggest(name, known[option])}")
    if problems:
        raise StudyError(study.path, problems)
    places = {name: Step(name, given=path) for name, path in (given or {}).items()}
    kept = [row for row in study.rows if rows is None or called[row.name] & {*rows}]
    shown = {row.name for row in kept}
    return replace(
        study,
        shared={**study.shared, **places},
        rows=kept,
        claims=[claim for claim in study.claims if {claim.row, claim.than} <= shown],
        columns=study.columns if shows is None else [study.catalogue[name] for name in shows],
    )


def shows_shared(study: Study, row: Row) -> bool:
    """Return whether a row shows a shared run as it is, not a variant of it."""
    step = study.shared.get(row.run)
    return step is not None and _with(step, row.options) == step


def make_plan(study: Study, output: Path, seeds: Sequence[int]) -> Plan:
    """Return the runs of all rows and seeds, and of what they need, the first seed's first.

    Args:
        output: shared runs write below it as the study's ``folders`` says, stages of rows into
            folders below ``runs/seed_K``.
    """
    plan = Plan(study, output, seeds, output / study.path.stem)
    for seed in seeds:
        maker = _Maker(plan, seed)
        for row in study.rows:
            plan.of.setdefault(row.name, {})[seed] = maker.row(row)
        judges = [maker.shared(name) for name in study.measure[1]] if study.measure else []
        plan.judges[seed] = [job for job in judges if isinstance(job, Job)]
    plan.jobs = _by_urgency(plan)
    return plan


def _by_urgency(plan: Plan) -> dict[str, Job]:
    """Return a plan's jobs seed by seed; those first that most runs wait for one after another."""
    chain = dict.fromkeys(plan.jobs, 1)
    for name, job in reversed(plan.jobs.items()):  # each comes after those that it needs
        for need in job.needs:
            chain[need] = max(chain[need], chain[name] + 1)
    seeds = [str(seed) for seed in plan.seeds]
    place = {name: (seeds.index(name.rpartition("/")[2]), -chain[name]) for name in plan.jobs}
    return {name: plan.jobs[name] for name in sorted(plan.jobs, key=place.__getitem__)}


class _Maker:
    """Build the jobs of one seed."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan, self.seed = plan, seed

    def row(self, row: Row) -> dict[str, Job]:
        """Return the jobs of the stages that columns need, and of the stages that these need."""
        if row.run:
            return {"": self._run_of(row)}
        stages = self.plan.study.stages
        first = next(iter(stages))
        own = {**stages, first: _with(stages[first], row.options)}
        own |= {name: _with(own[name], options) for name, options in row.stages.items()}
        made: dict[str, Job] = {}
        for column in self.plan.study.columns:
            self._stage(column.stage, own, made, row.name)
        return made

    def _run_of(self, row: Row) -> Job:
        """Return the shared run that a row shows, or its own if it sets other options.

        Raises:
            StudyError: for a row that shows a given checkpoint, which has no logs.
        """
        step = self.plan.study.shared[row.run]
        if shows_shared(self.plan.study, row):
            job = self.shared(row.run)
        else:
            own = _with(step, row.options)
            job = self._job(own, {name: self.shared(name) for name in self._needed(own)}, row.name)
        if isinstance(job, str):
            why = f"row {row.name}: {row.run} was replaced by --given and has no results"
            cure = "exclude this row with --rows"
            raise StudyError(self.plan.study.path, [f"{why}; {cure}"])
        return job

    def _stage(self, name: str, stages: Mapping[str, Step], made: dict[str, Job], row: str) -> Job:
        if name not in made:
            needs: dict[str, Job | str] = {
                n: self._stage(n, stages, made, row) if n in stages else self.shared(n)
                for n in self._needed(stages[name])
            }
            title = f"{row}, {name}" if len(stages) > 1 else row
            made[name] = self._job(stages[name], needs, title)
        return made[name]

    def shared(self, name: str) -> Job | str:
        """Return the job of a shared run, or the path of a given checkpoint."""
        step = self.plan.study.shared[name]
        if step.given:
            self.plan.given[name] = step.given
            return step.given
        place = f"{name}/{self.seed}"
        if place not in self.plan.jobs:
            needs = {n: self.shared(n) for n in self._needed(step)}
            folder = self.plan.study.folders.format(seed=self.seed, name=name)
            self._job(step, needs, name, self.plan.output / folder)
        return self.plan.jobs[place]

    def _needed(self, step: Step) -> list[str]:
        return sorted(step.names - {"seed", "folder"})

    def _job(
        self, step: Step, needs: Mapping[str, Job | str], title: str, folder: Path | None = None
    ) -> Job:
        form = self._form(step)
        key = _hashed([form, {name: getattr(one, "key", one) for name, one in needs.items()}])
        own = self.plan.output / "runs" / f"seed_{self.seed}" / f"{step.name}-{key}"
        folder = folder or own
        place = f"{folder.name}/{self.seed}"
        if place in self.plan.jobs:
            return self.plan.jobs[place]
        names = {
            n: str(one.checkpoint if isinstance(one, Job) else one) for n, one in needs.items()
        }
        names |= {"seed": str(self.seed), "folder": str(folder)}
        job = Job(
            place,
            f"{title}, seed {self.seed}",
            self._command(step, folder, names),
            folder,
            frozenset(one.name for one in needs.values() if isinstance(one, Job)),
            script=step.script if step.config else "",
            config=str(project_file(step.config)) if step.config else "",
            writes=step.writes,
            key=key,
            form=form,
        )
        if step.config:
            job.options = tuple(job.command[job.command.index("--options") + 1 :])
        self.plan.jobs[place] = job
        return job

    def _command(self, step: Step, folder: Path, names: Mapping[str, str]) -> list[str]:
        if step.module:
            return ["-m", step.module, *(_filled(one, names) for one in step.arguments)]
        options = {"run.seed": self.seed, **dict(sorted(step.options.items()))}
        options = {key: _filled(value, names) for key, value in options.items()}
        command = command_of(step.script, step.config, folder, options)
        command += [RESUME] if step.script == "train.py" else []
        if self.plan.study.processes == 1:
            return command
        count = f"--nproc_per_node={self.plan.study.processes}"
        return ["-m", "torch.distributed.run", "--standalone", count, *command]

    def _form(self, step: Step) -> str:
        content = [step.script, step.config, step.options, step.module, step.arguments]
        return _hashed([*content, self.plan.study.processes])


def _hashed(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def _with(step: Step, options: Mapping[str, Any]) -> Step:
    return replace(step, options={**step.options, **options})


def _filled(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value; in a text, placeholders are replaced."""
    if not isinstance(value, str):
        return value
    return PLACEHOLDER.sub(lambda found: names[found[1]], value)


def check(plan: Plan) -> None:
    """Check every config with its options as training and evaluation would; count the steps.

    Raises:
        StudyError: with all problems, each once with the runs that have it.
    """
    problems: dict[str, list[str]] = {}
    steps: dict[str, int] = {}
    splits: dict[str, list[str]] = {}
    for form, jobs in _by_form(plan).items():
        job = jobs[0]
        only = ["run.evaluate=True"] if job.script == "evaluate.py" else []
        try:
            cfg = load_config(job.config, [*job.options, *only], machine=False)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).extend(job.title for job in jobs)
            continue
        steps[form], splits[form] = _steps(cfg), list(cfg.run_cfg.test_splits)
    for row, by_seed in plan.of.items():
        for column in plan.study.columns:
            job = by_seed[plan.seeds[0]][column.stage]
            known = splits.get(job.form)
            if column.kind == "eval" and known is not None and column.split not in known:
                problem = (
                    f"column {column.name} reads split {column.split}, run.test_splits: {known}"
                )
                problems.setdefault(problem, []).append(row)
    for job in plan.jobs.values():
        job.steps = steps.get(job.form, 0)
    if problems:
        lines = [f"{_some(where)}: {problem}" for problem, where in problems.items()]
        raise StudyError(plan.study.path, lines)


def _by_form(plan: Plan) -> dict[str, list[Job]]:
    """Return the first seed's jobs that have a config, grouped by equal configs and options."""
    found: dict[str, list[Job]] = {}
    for job in plan.jobs.values():
        if job.config and job.name.endswith(f"/{plan.seeds[0]}"):
            found.setdefault(job.form, []).append(job)
    return found


def _some(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _steps(cfg: MafaConfig) -> int:
    """Return the number of training steps if the config holds the number of pairs, otherwise 0."""
    run = cfg.run_cfg
    sizes = [one.get("build_info", {}).get("train_size") for one in cfg.datasets_cfg.values()]
    if run.evaluate or None in sizes:
        return 0
    steps: int = int(run.max_epoch) * sum(sizes) // int(run.batch_size_train)
    return steps
