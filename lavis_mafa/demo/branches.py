"""The runs that the demonstration compares, each a call of train.py."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lavis_mafa.demo.families import FAMILIES, Family
from lavis_mafa.demo.runs import Run, command_of
from lavis_mafa.runners.checkpoint import LAST


@dataclass
class Branch(Run):
    """One run of train.py by a family's toy config."""

    family: Family = FAMILIES["albef"]


def make_branches(args: argparse.Namespace, folder: Path, image_start: Path) -> dict[str, Branch]:
    """The runs, the most urgent first; all but the warm-up start from its weights."""
    family = FAMILIES[args.family]
    common: dict[str, Any] = {
        "run.seed": args.seed,
        "run.valid_splits": [],
        "run.test_splits": [],
        "datasets.toy_scenes.build_info.train_size": args.train_size,
        "datasets.toy_scenes.build_info.test_size": args.test_size,
    }
    plain = {"run.grit.enabled": False, "model.mafa.soft_labels.type": "one_hot"}
    compared = {**common, "run.max_epoch": args.epochs, "run.warmup_steps": 30}
    warm_up = {
        **common,
        **plain,
        "run.max_epoch": args.warm_up_epochs,
        "run.init_lr": 2e-3,
        # Hardest negatives from the start leave ITM on a plateau.
        "model.mafa.negatives": "sampled",
    }
    plain_labels: dict[str, Any] = {"model.mafa.soft_labels.type": "one_hot"}
    if family.consistency:
        plain_labels = {
            "model.mafa.soft_labels.type": "consistency",
            "model.mafa.soft_labels.start_epoch": 0,
        }
    fine_tuning = {
        **compared,
        **plain,
        "run.max_epoch": max(1, args.epochs // 2),
        "model.mafa.negatives": "sampled",
        "model.mafa.loss_weights.lm": 0.0,
    }
    grouped = {**compared, "run.grit.start_epoch": 1}
    sampled = {"model.mafa.negatives": "sampled"}

    def branch(
        name: str,
        title: str,
        options: dict[str, Any],
        start: str | None = "warm_up",
        con_d: str | None = None,
    ) -> Branch:
        begin = family.begin_with(image_start, folder / start / LAST if start else None)
        options = {**options, **begin}
        if con_d:
            options["model.mafa.con_d.arch"] = family.arch
            options["model.mafa.con_d.model_type"] = "tiny"
            options["model.mafa.con_d.checkpoint"] = folder / con_d / LAST
        command = command_of("train.py", family.config, folder / name, options)
        needs = frozenset(other for other in (start, con_d) if other)
        return Branch(name, title, command, folder / name, needs, family)

    branches = [
        branch("warm_up", "shared warm-up, random mini-batches", warm_up, start=None),
        branch("s_itc", "S-ITC", grouped),
        branch("base", family.base, {**compared, **plain, **sampled}),
        branch("con_d", "Con-D's fine-tuning for retrieval", fine_tuning, start=family.con_d_from),
        branch("mafa", "MAFA", grouped, con_d="con_d"),
        branch("grit", family.grit, {**grouped, **plain_labels}),
    ]
    # Others wait for what Con-D begins with.
    urgent = ("warm_up", family.con_d_from, "con_d", "mafa")
    branches.sort(key=lambda one: one.name not in urgent)
    return {branch.name: branch for branch in branches}
