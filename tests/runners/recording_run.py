"""Train by session.run; write every rank's samples and losses to ``rank<r>.json`` in a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lavis_mafa  # noqa: F401  before LAVIS, which lacks names of newer transformers

# isort: split
from lavis.common.dist_utils import get_rank

from lavis_mafa.runners import RunnerMafa
from lavis_mafa.runners.session import exit_status, run


def main(folder: str, config: str, *options: str) -> None:
    steps: list[dict] = []
    record_step = RunnerMafa._record_step

    def record(self, output, losses, samples, bar):
        steps.append({"index": samples["index"].tolist(), "epoch": samples["epoch"], **losses})
        record_step(self, output, losses, samples, bar)

    RunnerMafa._record_step = record
    run(config, options)
    Path(folder, f"rank{get_rank()}.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(*sys.argv[1:])))
