"""Inject NaN or infinity into a run; as a script, into one of its ranks.

    poison.py FOLDER {"what": "loss_itm", "value": "nan", "steps": [3], "rank": 1} CONFIG OPTION...

``what`` is a loss term, the gradient of a weight (``gradient of text_proj.weight``) or ``con_d``.
Each rank writes what it trained and its final weights to FOLDER as ``rank<r>.pt``.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import lavis_mafa  # noqa: F401  before LAVIS, which lacks names of newer transformers

# isort: split
import torch
from lavis.common.dist_utils import get_rank

from lavis_mafa.judges.discriminators import _Oracle
from lavis_mafa.training import RunnerMafa
from lavis_mafa.training.checkpoint import trained_state

GRADIENT = "gradient of "


class Poison:
    """Wraps methods of the runner; records every step's samples and the state before it."""

    def __init__(self, what, value, steps, rank=0):
        self.what, self.value, self.steps, self.rank = what, float(value), set(steps), rank
        self.runner = None
        self.read: list[list[int]] = []
        self.before: list[dict[str, torch.Tensor]] = []

    @property
    def now(self) -> bool:
        return get_rank() == self.rank and self.runner.progress.global_step in self.steps

    def install(self, patch):
        """Patch the methods by ``patch(owner, name, function)``."""
        train, step = RunnerMafa._train, RunnerMafa._train_step
        forward, judge = RunnerMafa._forward, _Oracle.judge

        def poisoned_train(runner):
            self.runner = runner
            if self.what.startswith(GRADIENT):
                weight = dict(runner._model.named_parameters())[self.what.removeprefix(GRADIENT)]
                weight.register_hook(lambda g: g * self.value if self.now else g)
            train(runner)

        def poisoned_step(runner, samples, *rest):
            self.read.append(samples["index"].tolist())
            state = trained_state(runner._model)
            self.before.append({name: value.clone() for name, value in state.items()})
            return step(runner, samples, *rest)

        def poisoned_forward(runner, model, samples):
            output = forward(runner, model, samples)
            if self.what.startswith("loss") and self.now:
                part = self.what.removeprefix("loss_")
                losses = {**output.losses, part: output.losses[part] * self.value}
                output = replace(output, losses=losses, loss=output.loss * self.value)
            return output

        def poisoned_judge(oracle, *args, **kwargs):
            verdict = judge(oracle, *args, **kwargs)
            return verdict * self.value if self.what == "con_d" and self.now else verdict

        patch(RunnerMafa, "_train", poisoned_train)
        patch(RunnerMafa, "_train_step", poisoned_step)
        patch(RunnerMafa, "_forward", poisoned_forward)
        patch(_Oracle, "judge", poisoned_judge)
        return self

    @property
    def after(self) -> dict[str, torch.Tensor]:
        return trained_state(self.runner._model)


def main(folder: str, poison: str, config: str, *options: str) -> int:
    from lavis_mafa.cli import main as run

    poison_ = Poison(**json.loads(poison)).install(setattr)
    before = RunnerMafa.train

    def save_record(runner):
        try:
            before(runner)
        finally:
            record = {"read": poison_.read, "before": poison_.before, "after": poison_.after}
            # A launcher whose other rank has failed ends this one.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            torch.save(record, Path(folder) / f"rank{get_rank()}.pt")

    RunnerMafa.train = save_record
    return run(["train", "--cfg-path", config, "--options", *options])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
