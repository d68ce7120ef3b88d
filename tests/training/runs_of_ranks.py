"""Train several small runs one after the other, some with other options on one rank than on the
others; write how each ended to ``ended<rank>.json`` in a folder.

``cases.json`` in the folder lists ``{"config", "options", "of_rank": {rank: options}}``. Of a run
that trained, a digest of every tensor of the model is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import lavis_mafa  # noqa: F401  before LAVIS, which lacks names of newer transformers

# isort: split
import torch
import torch.distributed as dist

from lavis_mafa.training.session import run


def digests(model: Any) -> dict[str, str]:
    """Return a digest of every tensor of a model, bit for bit."""
    return {
        name: hashlib.sha256(value.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in model.state_dict().items()
    }


def ended(config: str, options: list[str]) -> dict[str, Any]:
    """Train; return the error's type and message, or the digests of the model."""
    try:
        runner = run(config, options)
        return {"tensors": digests(runner._model)}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    finally:
        dist.destroy_process_group()


def main(folder: Path) -> None:
    rank, found = os.environ["RANK"], []
    for case in json.loads((folder / "cases.json").read_text()):
        found.append(ended(case["config"], case["options"] + case["of_rank"].get(rank, [])))
        (folder / f"ended{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
