"""Checkpoints as safetensors files: weights under LAVIS's names, without the state of a run."""

from __future__ import annotations

from pathlib import Path

from lavis_mafa.io.checkpoints import (
    model_config,
    problem_of_state,
    read_checkpoint,
    weights_of,
)
from lavis_mafa.io.hub_folders import write_safetensors
from lavis_mafa.models.recorded_sizes import shareable_model

_SUFFIX = ".safetensors"


def export_safetensors(checkpoint: str, out: Path) -> int:
    """Write the weights of a checkpoint of any model to the file ``out``.

    Its header records the sizes of the model, so that this package loads it like the checkpoint;
    it has no files of this machine.

    Returns:
        The number of tensors written.

    Raises:
        FileExistsError: if ``out`` exists.
        FileNotFoundError, ValueError: from reading the checkpoint, or for another suffix.
        ImportError: without safetensors.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists already")
    if out.suffix != _SUFFIX:
        raise ValueError(f"{out}: expected a name that ends in {_SUFFIX}, by which it is read")
    content = read_checkpoint(checkpoint)
    state, recorded = weights_of(content), model_config(content)
    problem = problem_of_state(state, checkpoint)
    if problem:
        raise ValueError(problem)
    record = {name: content[name] for name in ("vocabulary", "family") if content.get(name)}
    if isinstance(recorded.get("arch"), str):
        record["config"] = {"model": shareable_model(recorded, recorded["arch"])}
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.tmp")
    try:
        write_safetensors(state, record, unfinished)
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    return len(state)
