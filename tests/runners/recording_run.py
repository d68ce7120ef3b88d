"""Trains by session.run; writes every rank's samples and losses to ``rank<r>.json`` in a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lavis.common.dist_utils import get_rank

from lavis_mafa.runners import RunnerMafa
from lavis_mafa.runners.session import exit_status, run


def main(folder: str, config: str, *options: str) -> None:
    read: list[dict] = []
    note = RunnerMafa._record_step

    def recorded(self, output, losses, samples, bar):
        read.append({"index": samples["index"].tolist(), "epoch": samples["epoch"], **losses})
        note(self, output, losses, samples, bar)

    RunnerMafa._record_step = recorded
    run(config, options)
    Path(folder, f"rank{get_rank()}.json").write_text(json.dumps(read))


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(*sys.argv[1:])))
