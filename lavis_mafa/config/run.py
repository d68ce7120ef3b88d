"""Check ``run``: task, schedule, generated texts and output folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lavis.common.registry import registry
from lavis.tasks.image_text_pretrain import ImageTextPretrainTask

from lavis_mafa.config.check import Report, Settings, ask_class
from lavis_mafa.config.lavis_classes import declared
from lavis_mafa.loggers import LOGGERS, names_of_loggers
from lavis_mafa.models.traits import traits_of

LONGEST_NAME = 255  # bytes of a file's or folder's name, on nearly all file systems

LARGEST_SEED = 2**32 - 2**16  # NumPy's limit is 2**32 - 1, and the rank is added to the seed


def check_run(config: Mapping[str, Any], report: Report) -> None:
    """Check constraints between keys of ``run``, after single keys are checked and filled."""
    s = Settings(config, report)
    by_steps = s["run.runner"] == "runner_iter" and s["run.max_iters"] is not None
    if s.training and s["run.max_epoch"] is None and not by_steps:
        report.missing("run.max_epoch", "expected a whole number >= 1 (epochs to train)")
    _check_task(s, report)
    if s.training:
        _check_schedule(s, report)
    _check_texts(s, report)
    ask_class(registry.get_task_class(s["run.task"] or ""), "run", config, report)
    _check_loggers(config, report)
    _check_folder(s, report)
    if (s["run.seed"] or 0) > LARGEST_SEED:
        report.add("run.seed", f"{s['run.seed']} is too large; expected at most {LARGEST_SEED}")


def _check_task(s: Settings, report: Report) -> None:
    """Check that the model has the method that the task evaluates by."""
    task, name = s["run.task"], s["model.arch"]
    arch = registry.get_model_class(name or "")
    evaluates = [key for key in ("valid_splits", "test_splits") if s[f"run.{key}"]]
    method = declared("task", task, "asks_of_model")
    if arch and evaluates and method and not hasattr(arch, method):
        able = [one for one in registry.list_models() if _can(one, method)]
        why = f"{task} evaluates by {method}(), which {name} lacks; models that have it: "
        report.add("run.task", why + ", ".join(able))
    silent = evaluates_nothing(task)
    if silent and s["run.evaluate"]:
        why = "evaluates nothing; name a task that does, such as mafa_retrieval"
        report.add("run.task", f"{task} {why}")
    if s["run.evaluate"] and s.traits.loads_with_our_loader:
        if not (s["model.load_finetuned"] or s["model.load_pretrained"]):
            why = "is False and so is load_pretrained: random weights are evaluated"
            report.note("model.load_finetuned", why)
    if silent and evaluates and not s["run.evaluate"]:
        report.note(f"run.{evaluates[0]}", f"has no effect: task {task} evaluates nothing")
    if s["run.k_test"] == 0 and not s.traits.ranks_without_itm:
        why = f"0 (ITC only) is supported by models of lavis_mafa; {name} needs >= 1"
        report.add("run.k_test", why)
    if evaluates and not s.traits.ranks_without_itm:
        for key, given in (("rerank_by", "sum"), ("retrieval_max_txt_len", 35)):
            if s[f"run.{key}"] != given and f"run.{key}" not in report.bad:
                why = f"is read by models of lavis_mafa; {name} uses {given}: remove it"
                report.add(f"run.{key}", f"{s[f'run.{key}']} {why}, or use albef_mafa")
    if s["run.k_test"] is None and s.traits.reranks and declared("task", task, "requires_k_test"):
        report.missing("run.k_test", f"task {task} needs it; use for example 128")


def evaluates_nothing(task: str | None) -> bool:
    """Return whether a task evaluates nothing, whatever splits are given."""
    evaluation = getattr(registry.get_task_class(task or ""), "evaluation", None)
    return evaluation is ImageTextPretrainTask.evaluation


def _can(arch: str, method: str) -> bool:
    cls = registry.get_model_class(arch)
    return traits_of(cls).loads_with_our_loader and hasattr(cls, method)


def _check_schedule(s: Settings, report: Report) -> None:
    schedule, high, low = s["run.lr_sched"], s["run.init_lr"], s["run.min_lr"]
    if schedule == "linear_warmup_step_lr" and s["run.lr_decay_rate"] is None:
        report.missing("run.lr_decay_rate", "linear_warmup_step_lr needs it; use for example 0.9")
    if None not in (high, low) and low > high:
        why = f"{low} is more than run.init_lr: the learning rate would rise; use at most {high}"
        report.add("run.min_lr", why)
    first, steps = s["run.warmup_lr"], s["run.warmup_steps"]
    if steps and None not in (high, first) and first > high:
        report.note(
            "run.warmup_lr",
            f"{first} is more than run.init_lr {high}: the rate falls during warm-up",
        )
    epochs, horizon = s["run.max_epoch"], s["run.lr_horizon"]
    if epochs and horizon and horizon < epochs and "cosine" in str(schedule):
        why = f"{horizon} is less than run.max_epoch {epochs}: the cosine would rise again"
        report.add("run.lr_horizon", f"{why}; use {epochs} or more, or null")
    limit = s["run.max_steps"]
    if steps and limit and steps >= limit:
        why = f"{steps} is not below run.max_steps {limit}: run.init_lr is never reached"
        report.note("run.warmup_steps", why)
    keep = s["run.keep_every_epochs"]
    if keep and epochs and keep > epochs:
        why = f"{keep} is more than run.max_epoch {epochs}: no checkpoint is kept except the last"
        report.note("run.keep_every_epochs", why)


def _check_texts(s: Settings, report: Report) -> None:
    """Check the lengths of generated texts and the annotations that they are scored against."""
    for short, long in (("min_len", "max_len"), ("cap_min_length", "cap_max_length")):
        least, most = s[f"run.{short}"], s[f"run.{long}"]
        if None not in (least, most) and least > most:
            report.add(f"run.{short}", f"{least} is more than run.{long}; use at most {most}")
    if s["run.metrics"] == []:
        report.add("run.metrics", "is empty; name a metric, or set run.report_metric: False")
    given = s["run.annotation_file"]
    by_split = given if isinstance(given, Mapping) else {"": given}
    for split, path in by_split.items():
        where = f"{split}: " if split else ""
        if path is not None and not isinstance(path, str):
            why = f"{where}{path!r} is not a path; give one, or a mapping {{val: path, test: path}}"
            report.add("run.annotation_file", why)
        elif path is not None and report.machine and not os.path.isfile(path):
            report.add("run.annotation_file", f"{where}no such file: {path!r}")


def _check_loggers(config: Mapping[str, Any], report: Report) -> None:
    """Ask the loggers that a config names whether they can work."""
    run = config.get("run")
    if isinstance(run, Mapping) and "run.loggers" not in report.bad:
        for name in names_of_loggers(run):
            if name in LOGGERS:  # otherwise reported already
                ask_class(LOGGERS[name], "run", config, report)


def _check_folder(s: Settings, report: Report) -> None:
    job = s["run.job_id"]
    if job and (job in (".", "..") or {"/", "\\", "\0"} & set(job)):
        why = f"{job!r} is not the name of one folder; put its parents into run.output_dir"
        report.add("run.job_id", why)
    elif job and len(os.fsencode(job)) > LONGEST_NAME:
        report.add("run.job_id", f"{len(os.fsencode(job))} bytes, expected at most {LONGEST_NAME}")
    folder = s["run.output_dir"]
    if folder and report.machine:
        try:
            problem = _problem_of_folder(Path(os.path.abspath(os.path.expanduser(folder))))
        except (OSError, ValueError) as error:  # a name that is too long, or with NUL
            problem = f"{folder!r:.80} cannot be a folder: {error}"
        if problem:
            report.add("run.output_dir", problem)


def _problem_of_folder(folder: Path) -> str | None:
    """Return why nothing can be written to a folder, which need not exist yet; None if it can."""
    # A folder that does not exist yet is made where its nearest parent can be written to.
    nearest = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    if not nearest.is_dir():
        return f"{nearest} is a file; name a folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} is not writable; name another folder, or change its permissions"
    return None
