"""The runs of a study: which there are, what each needs, and whether their configs work.

A stage's folder is named by all that its weights depend on: rows that are the same, in one table
or in several that write below one folder, are run once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lavis_mafa.config import ConfigError, MafaConfig, load_config
from lavis_mafa.config.check import suggest
from lavis_mafa.io.files import ROOT
from lavis_mafa.studies.parts import PLACEHOLDER, Row, Step, Study, StudyError
from lavis_mafa.studies.runs import Run, command_of

RESUME = "run.resume_ckpt_path=auto"


@dataclass
class Job(Run):
    """A run of a study.

    Attributes:
        key: stands for all that it depends on but the seed.
        form: stands for its config and options, whatever runs it takes checkpoints from.
        script, config, options: of train.py or evaluate.py; "" and () of a module.
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
    """All that is to be run for some rows and seeds.

    Attributes:
        jobs: by name, the most urgent first.
        of: by row, seed and stage, its job.
        given: checkpoints that are taken and not made, by name of the shared run.
        command: what was asked for, as people would type it again.
    """

    study: Study
    output: Path
    seeds: Sequence[int]
    jobs: dict[str, Job] = field(default_factory=dict)
    of: dict[str, dict[int, dict[str, Job]]] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    command: str = ""


def narrowed(
    study: Study,
    rows: Sequence[str] | None = None,
    shows: Sequence[str] | None = None,
    given: Mapping[str, str] | None = None,
) -> Study:
    """A study with some rows and columns alone, and checkpoints in the place of shared runs.

    Raises:
        StudyError: for names that it does not have.
    """
    problems = []
    known = {"--rows": [row.name for row in study.rows], "--given": list(study.shared)}
    known["--columns"] = list(study.catalogue)
    asked = {"--rows": rows, "--columns": shows, "--given": given}
    for option, names in asked.items():
        for name in names or ():
            if name not in known[option]:
                problems.append(f"{option}: no {name}; {suggest(name, known[option])}")
    if problems:
        raise StudyError(study.path, problems)
    places = {name: Step(name, given=path) for name, path in (given or {}).items()}
    return replace(
        study,
        shared={**study.shared, **places},
        rows=[row for row in study.rows if rows is None or row.name in rows],
        columns=study.columns if shows is None else [study.catalogue[name] for name in shows],
    )


def make_plan(study: Study, output: Path, seeds: Sequence[int]) -> Plan:
    """The runs of all rows and seeds, and of what they need, the first seed's first.

    Args:
        output: what rows share is below ``shared/seed_K``, their own runs below ``runs/seed_K``.
    """
    plan = Plan(study, output, seeds)
    for seed in seeds:
        maker = _Maker(plan, seed)
        for row in study.rows:
            plan.of.setdefault(row.name, {})[seed] = maker.row(row)
    return plan


class _Maker:
    """Makes the jobs of one seed."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan, self.seed = plan, seed

    def row(self, row: Row) -> dict[str, Job]:
        """The jobs of the stages that columns ask for, and of those that these need."""
        stages = self.plan.study.stages
        first = next(iter(stages))
        own = {**stages, first: _with(stages[first], row.options)}
        made: dict[str, Job] = {}
        for column in self.plan.study.columns:
            self._stage(column.stage, own, made, row.name)
        return made

    def _stage(self, name: str, stages: Mapping[str, Step], made: dict[str, Job], row: str) -> Job:
        if name not in made:
            needs: dict[str, Job | str] = {
                n: self._stage(n, stages, made, row) if n in stages else self._shared(n)
                for n in self._needed(stages[name])
            }
            title = f"{row}, {name}" if len(stages) > 1 else row
            made[name] = self._job(stages[name], needs, title)
        return made[name]

    def _shared(self, name: str) -> Job | str:
        step = self.plan.study.shared[name]
        if step.given:
            self.plan.given[name] = step.given
            return step.given
        place = f"{name}/{self.seed}"
        if place not in self.plan.jobs:
            needs = {n: self._shared(n) for n in self._needed(step)}
            self._job(step, needs, name, self.plan.output / "shared" / f"seed_{self.seed}" / name)
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
            config=str(ROOT / step.config) if step.config else "",
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
    """With what the placeholders of a text stand for."""
    if not isinstance(value, str):
        return value
    return PLACEHOLDER.sub(lambda found: names[found[1]], value)


def check(plan: Plan) -> None:
    """Check every config with its options as train.py and evaluate.py would; count the steps.

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
            there = splits.get(job.form)
            if column.kind == "eval" and there is not None and column.split not in there:
                problem = (
                    f"column {column.name} reads split {column.split}, run.test_splits: {there}"
                )
                problems.setdefault(problem, []).append(row)
    for job in plan.jobs.values():
        job.steps = steps.get(job.form, 0)
    if problems:
        told = [f"{_some(where)}: {problem}" for problem, where in problems.items()]
        raise StudyError(plan.study.path, told)


def _by_form(plan: Plan) -> dict[str, list[Job]]:
    """The first seed's jobs that have a config, those whose configs are alike together."""
    found: dict[str, list[Job]] = {}
    for job in plan.jobs.values():
        if job.config and job.name.endswith(f"/{plan.seeds[0]}"):
            found.setdefault(job.form, []).append(job)
    return found


def _some(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _steps(cfg: MafaConfig) -> int:
    """Training steps where the config tells how many pairs there are; otherwise 0."""
    run = cfg.run_cfg
    sizes = [one.get("build_info", {}).get("train_size") for one in cfg.datasets_cfg.values()]
    if run.evaluate or None in sizes:
        return 0
    return int(run.max_epoch) * sum(sizes) // int(run.batch_size_train)
