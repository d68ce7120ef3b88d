"""Measure a training step of every method of the study of methods against GRIT-VLP's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lavis_mafa.algorithm.parts import build_parts
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.io.project_files import project_file
from lavis_mafa.models import AlbefMafa
from lavis_mafa.models.con_d.discriminator import ModelDiscriminator
from research.benchmarks.harness import Row, Sizes, Timed, in_turn, progress
from research.benchmarks.step_models import albef_config, mini_batch
from research.benchmarks.steps import BATCH, Step, vit_name
from research.studies.study_file import read_study

STUDY, REFERENCE = "projects/mafa/studies/methods.yaml", "GRIT-VLP"
MAFA = "model.mafa."
SAMPLES = 1000  # of a training set, for methods with a number for each


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure each row of the study whose step differs from those before it."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = albef_config(sizes, Path(folder))
        size = sizes.batch or BATCH[sizes.name]
        samples = mini_batch(size, cfg, sizes.device)
        samples["loaded_index"] = torch.arange(size, device=sizes.device)
        torch.manual_seed(0)
        model = AlbefMafa.from_config(cfg).to(sizes.device).train()
        judge = AlbefMafa.from_config(cfg).to(sizes.device)
        con_d = ModelDiscriminator(judge, precision="bf16")
        steps = {
            name: step_of(mafa, model, con_d, samples, sizes) for name, mafa in settings_of_study()
        }
        progress(f"{len(steps)} methods")
        times = in_turn(steps, sizes.repeats, device=sizes.device)
    note = (
        f"ALBEF {vit_name(cfg)}, B={size}, {'bf16' if sizes.gpu else 'fp32'}; random weights, so "
        "that how much is mined is arbitrary; without grouping and the optimizer"
    )
    for name in steps:
        if name != REFERENCE:
            timed = Timed.of(times[name], times[REFERENCE])
            yield timed.row(f"step of {name} / {REFERENCE}", "", note)


def settings_of_study() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows of the study with their settings of the step, equal ones once."""
    seen: list[dict[str, Any]] = []
    study = read_study(project_file(STUDY))
    for row in sorted(study.rows, key=lambda one: one.name != REFERENCE):
        mafa = nested(row.options)
        if mafa not in seen and (mafa.get("con_d") or {}).get("arch") != "oracle":
            seen.append(mafa)
            yield row.name, mafa


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``model.mafa`` as a mapping of mappings."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        if key.startswith(MAFA):
            *sections, name = key.removeprefix(MAFA).split(".")
            place = found
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
    return found


def step_of(
    mafa: Mapping[str, Any],
    model: AlbefMafa,
    con_d: ModelDiscriminator,
    samples: Mapping[str, Any],
    sizes: Sizes,
) -> Step:
    """Return the step of ``model.mafa`` settings; all methods train the same model."""
    parts = build_parts(StepSettings.from_config(mafa), con_d if mafa.get("con_d") else None)
    parts.allocate(SAMPLES)
    for one in parts.objects.values():
        if isinstance(one, torch.nn.Module):
            one.to(sizes.device)
    forward = partial(run_step, model.backbone, samples, parts)
    return Step(model, forward, sizes.device, sizes.gpu)
