"""The runs that are compared, each a call of train.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lavis_mafa.io.files import ROOT
from lavis_mafa.runners.checkpoint import LAST
from lavis_mafa.studies.demo.families import FAMILIES, Family
from lavis_mafa.studies.demo.systems import (
    CON_D,
    DEMO,
    ORACLE,
    WARM_UP,
    System,
    needs_of,
    systems_of,
    with_what_they_need,
)
from lavis_mafa.studies.runs import Run, command_of


@dataclass
class Branch(Run):
    """One run of train.py by a family's toy config."""

    family: Family = FAMILIES["albef"]


def make_branches(
    args: argparse.Namespace, folder: Path, image_start: Path, names: Sequence[str] = DEMO
) -> dict[str, Branch]:
    """The runs of the systems ``names`` and of all that they need, the most urgent first.

    Args:
        args: ``family``, ``seed``, ``epochs``, ``warm_up_epochs``, ``train_size``, ``test_size``.
        folder: each run writes into a folder of its own below.
        image_start: what the image encoder begins with.
    """
    family = FAMILIES[args.family]
    systems = systems_of(family, args.epochs, args.warm_up_epochs)
    wanted = with_what_they_need(names, systems)
    # Others wait for what Con-D begins with.
    urgent = (WARM_UP, family.con_d_from, CON_D, "mafa")
    ordered = sorted(wanted, key=lambda name: name not in urgent)
    return {name: _branch(systems[name], args, family, folder, image_start) for name in ordered}


def _branch(
    system: System, args: argparse.Namespace, family: Family, folder: Path, image_start: Path
) -> Branch:
    place = folder / system.name
    options: dict[str, Any] = {
        "run.seed": args.seed,
        "run.valid_splits": [],
        "run.test_splits": [],
        "datasets.toy_scenes.build_info.train_size": args.train_size,
        "datasets.toy_scenes.build_info.test_size": args.test_size,
        "run.max_epoch": system.epochs,
        **system.options,
        **family.begin_with(image_start, folder / system.start / LAST if system.start else None),
    }
    if system.con_d == ORACLE:
        options["model.mafa.con_d.arch"] = ORACLE
    elif system.con_d:
        options["model.mafa.con_d.arch"] = family.arch
        options["model.mafa.con_d.model_type"] = "tiny"
        options["model.mafa.con_d.checkpoint"] = folder / system.con_d / LAST
    command = command_of("train.py", family.config, place, options)
    batch = int(OmegaConf.load(ROOT / family.config).run.batch_size_train)
    steps = system.epochs * args.train_size // batch
    needs = needs_of(system)
    return Branch(system.name, system.title, command, place, needs, steps, family)
