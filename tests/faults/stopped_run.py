"""Under a launcher, every rank trains the cases of ``FOLDER/cases.json`` uninterrupted and stopped
at every step, and writes what it read to ``<case>/rank<r>.json``: ``stopped_run.py FOLDER``.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from faulty_runs import stopped_at_every_step, train_uninterrupted


def main(folder: Path) -> None:
    init_process_group = dist.init_process_group
    # Every run initialises the process group; in these processes it exists already.
    dist.init_process_group = lambda *a, **k: (
        None if dist.is_initialized() else init_process_group(*a, **k)
    )
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        case_folder = folder / str(number)
        expected = train_uninterrupted(case_folder / "whole", **case)
        trained = stopped_at_every_step(case_folder / "cut", len(expected), **case)
        content = {"expected": expected, "read": trained}
        (case_folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(content))
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
