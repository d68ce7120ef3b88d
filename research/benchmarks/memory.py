"""Measure the peak memory of a step with and without Con-D, and of a step in chunks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lavis_mafa.algorithm.step import run_step
from lavis_mafa.families import AlbefMafa
from lavis_mafa.judges.discriminators import ModelDiscriminator
from research.benchmarks.harness import Row, Sizes, peak_memory
from research.benchmarks.step_models import FixedVerdicts, albef_config, mini_batch
from research.benchmarks.steps import GRIT_VLP, MAFA, Step

BATCH = {"quick": 8, "cpu": 4, "gpu": 96}


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure a step of MAFA in which a quarter of the pairs are converted, and a step in
    chunks."""
    size = sizes.batch or BATCH[sizes.name]

    def peak(*given: Any) -> float:
        return peak_memory(partial(_one_step, sizes, *given), sizes.device)

    yield Row.of(
        f"peak memory of a step, MAFA / GRIT-VLP, 25 % converted, B={size}",
        f"ALBEF in {sizes.precision}; weights, gradients and activations, and Con-D in bf16; "
        "without the optimiser's state, which both sides have; one run of each; Con-D's weights "
        "are constant: in a small mini-batch they are a large share",
        [peak(size, True)],
        [peak(size)],
        unit="MiB",
    )
    yield Row.of(
        f"peak memory of a step in chunks of {size} / whole mini-batch, B={4 * size}",
        f"run.cached_batch; ALBEF in {sizes.precision}, weights and gradients included; one run of "
        "each",
        [peak(4 * size, False, size)],
        [peak(4 * size)],
        unit="MiB",
    )


def _one_step(
    sizes: Sizes, size: int, with_con_d: bool = False, cached_batch: int | None = None
) -> None:
    """Build ALBEF, and Con-D if wanted, and run one step, in chunks if wanted."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = albef_config(sizes, Path(folder))
        samples = mini_batch(size, cfg, sizes.device)
        torch.manual_seed(0)
        con_d: Any = None
        if with_con_d:
            judge = AlbefMafa.from_config(cfg).to(sizes.device)
            con_d = FixedVerdicts(ModelDiscriminator(judge, precision="bf16"))
        model = AlbefMafa.from_config(cfg).to(sizes.device).train()
        model.cached_batch = cached_batch
        settings = MAFA if with_con_d else GRIT_VLP
        forward = partial(run_step, model.step_backbone, samples, settings, con_d)
        Step(model, forward, sizes)()
