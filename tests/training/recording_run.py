"""Train by session.run; write every rank's samples and losses to ``rank<r>.json`` in a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lavis_mafa  # noqa: F401  before LAVIS, which lacks names of newer transformers

# isort: split
from lavis.common.dist_utils import get_rank
from runs import recording

from lavis_mafa.training.exit_status import exit_status
from lavis_mafa.training.session import run


def main(folder: str, config: str, *options: str) -> None:
    with recording() as steps:
        run(config, options)
    Path(folder, f"rank{get_rank()}.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(*sys.argv[1:])))
