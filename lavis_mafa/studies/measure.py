"""Call a study's measuring function, and keep what it returns with the runs."""

from __future__ import annotations

import importlib
import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

from lavis_mafa.io.files import write_json
from lavis_mafa.studies.parts import StudyError
from lavis_mafa.studies.plan import Job, Plan, shows_shared
from lavis_mafa.studies.spread import over_seeds

FIGURES = "figures.json"


def function_of(plan: Plan) -> Callable[..., Any] | None:
    """Return the measuring function that the study names as ``module:function``, if any.

    Raises:
        StudyError: if it cannot be imported.
    """
    return (
        _imported(plan, "measure.function", plan.study.measure[0]) if plan.study.measure else None
    )


def headline_of(plan: Plan) -> str:
    """Return the study's headline of what was measured so far; "" if it has none.

    Raises:
        StudyError: if its function cannot be imported.
    """
    if not plan.study.headline:
        return ""
    figures: dict[str, dict[str, Any]] = {}
    for row in plan.study.rows:
        jobs = plan.of[row.name] if shows_shared(plan.study, row) else {}
        shown = [found for seed in jobs if (found := measured(jobs[seed][""]))]
        means = {key: spread.mean for key, spread in over_seeds(shown).items()}
        if means:
            figures[row.run] = {**means, "name": row.name}
    text: str = _imported(plan, "headline", plan.study.headline)(figures)
    return text


def _imported(plan: Plan, key: str, given: str) -> Callable[..., Any]:
    module, _, name = given.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        problem = f"{key}: {given!r}: {error}; expected module:function"
        raise StudyError(plan.study.path, [problem]) from None
    return function


def measure_all(plan: Plan, complete: bool = True) -> None:
    """Measure every completed run of the rows that was not measured yet.

    The function is called for each seed with the runs and those that they are judged by: the runs
    that the study names, otherwise all runs of this seed.

    Args:
        complete: no other run will be done: judge by those that are, if the study names none.
    """
    function = function_of(plan)
    for seed in plan.seeds if function else ():
        found = {job.name: job for own in plan.of.values() for job in own[seed].values()}
        runs = [job for job in found.values() if job.done]
        judges = plan.judges[seed] or (runs if complete else list(found.values()))
        todo = [job for job in runs if not measured(job, judges)]
        if not todo or not all(judge.done for judge in judges):
            continue
        print(f"           measuring {'; '.join(job.title for job in todo)}", flush=True)
        with _quiet():
            for job, figures in function(todo, judges):  # type: ignore[misc]
                write_json(job.folder / FIGURES, {"judges": _names(judges), "figures": figures})


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars and INFO lines of every model; warnings are still logged."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def measured(job: Job, judges: list[Job] | None = None) -> dict[str, Any]:
    """Return what was measured of a run; {} if nothing was, or by other judges than these."""
    path = job.folder / FIGURES
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    same = judges is None or content["judges"] == _names(judges)
    figures: dict[str, Any] = content["figures"]
    return figures if same else {}


def _names(judges: list[Job]) -> list[str]:
    return [f"{judge.name}:{judge.key}" for judge in judges]
