"""Files of checkpoints: their names, their weights, and whether a run may resume from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lavis_mafa.algorithm.grit import HARDNESS
from lavis_mafa.algorithm.momentum import GROUP_QUEUE
from lavis_mafa.checkpoints.checkpoints import (
    not_resumable_message,
    problem_of_types,
    read_checkpoint,
)
from lavis_mafa.checkpoints.downloads import local_file
from lavis_mafa.io.files import atomic_write, flat
from lavis_mafa.io.processes import on_main_process

LAST, BEST = "checkpoint_last.pth", "checkpoint_best.pth"
# Keys of `model` on which the shapes of weights and queues, or what they mean, depend. Frozen
# weights are not saved.
_SHAPES = (
    "arch image_size vit.patch_size vit.width vit.depth vit.heads vit.stem vit_type vit_model "
    "feature_width embed_dim queue_size memory_size num_query_token cross_attention_freq "
    "num_classes hidden_size freeze_vit mafa.learn_temperature"
).split()
EVERY = "checkpoint_*.pth"  # pattern of these and of those kept by run.keep_every_epochs


def save_atomically(content: dict[str, Any], path: Path) -> None:
    """Write a checkpoint atomically.

    ``content`` must be plain values and tensors, so that ``weights_only`` loading accepts it.
    """
    with atomic_write(path) as file:
        torch.save(content, file)


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict without frozen weights, as LAVIS saves it, but with momentum encoders.

    Momentum encoders (``*_m``) take no gradient but change nevertheless.
    """
    frozen = {
        name
        for name, value in model.named_parameters(remove_duplicate=False)  # tied weights
        if not value.requires_grad and not any(part.endswith("_m") for part in name.split("."))
    }
    return {key: value for key, value in model.state_dict().items() if key not in frozen}


def load_trained_state(model: nn.Module, state: dict[str, torch.Tensor], origin: str) -> None:
    """Load what `trained_state` returned; only frozen weights may be missing.

    Raises:
        ValueError: naming the keys that are missing or unknown to the model.
    """
    # Data without groups have no groups of a queue: all its entries count as other groups.
    expected = set(trained_state(model)) - {GROUP_QUEUE}
    missing, unknown = expected - state.keys(), state.keys() - model.state_dict().keys()
    unknown -= {GROUP_QUEUE}  # of data that had groups then and have none now
    # Constants that transformers' BERT saves in some versions only.
    missing, unknown = (
        {key for key in keys if not key.endswith(".position_ids")} for keys in (missing, unknown)
    )
    if missing or unknown:
        raise ValueError(
            f"{origin} was saved by another model. Missing: {sorted(missing)[:5] or 'none'}; "
            f"unknown: {sorted(unknown)[:5] or 'none'}"
        )
    problem = problem_of_types(state, model.state_dict())
    if problem:
        raise ValueError(f"{origin} cannot be resumed from: {problem}")
    # Not strictly: that would demand the frozen weights, which no checkpoint has.
    model.load_state_dict(state, strict=False)


def check_resumption(cfg: Any) -> None:
    """Refuse a checkpoint of other settings before anything is built; all ranks must call it.

    Raises:
        ValueError: naming every setting that may not change, with both values.
    """
    run_cfg = cfg.run_cfg
    if run_cfg.evaluate or not run_cfg.get("resume_ckpt_path"):
        return
    path = local_file(run_cfg.resume_ckpt_path)

    def check() -> None:
        content, now = read_checkpoint(path, mapped=True), cfg.unresolved()
        before, run = content.get("config"), content.get("run")
        if not (isinstance(before, dict) and isinstance(run, dict) and "ranks" in run):
            if run_cfg.get("runner") in (None, "runner_mafa"):
                raise ValueError(not_resumable_message(path))
            return  # of another runner, which reads it itself
        _check_same_settings(before, now, path, (len(run["ranks"]), int(run_cfg.world_size)))

    on_main_process(check)


def _check_same_settings(
    before: dict[str, Any], now: dict[str, Any], origin: str, ranks: tuple[int, int] = (1, 1)
) -> None:
    """Refuse to resume with other settings where the order of samples or the state depend on them.

    The number of ranks may change if all ranks together read as many pairs a step as before.

    Args:
        before, now: the config of the checkpoint and of this run.
        ranks: how many saved the checkpoint, and how many resume.

    Raises:
        ValueError: naming every such setting with both values.
    """
    old, new = before.get("run", {}), now.get("run", {})
    # The seed orders the samples; the others say what saved gradients and loss scales mean.
    names = ("accum_grad_iters", "seed", "amp", "amp_dtype")
    pairs = [(f"run.{name}", old.get(name), new.get(name)) for name in names]
    grit_before = old.get("grit", {})
    # Neither `save_order` nor `lr_factor` affects the order or the saved state, and `first_order`
    # matters only where the first epoch began.
    skipped = {"save_order", "lr_factor", "first_order"}
    # Settings of a hardness schedule that is not chosen have no effect.
    skipped |= set(HARDNESS) - {new.get("grit", {}).get("schedule")}
    grit = [name for name in new.get("grit", {}) if name not in skipped]
    pairs += [(f"run.grit.{name}", grit_before.get(name), new["grit"][name]) for name in grit]
    shapes, shapes_now = (dict(flat(config.get("model", {}))) for config in (before, now))
    pairs += [(f"model.{name}", shapes.get(name), shapes_now.get(name)) for name in _SHAPES]
    data, data_now = (dict(flat(config.get("datasets", {}))) for config in (before, now))
    subsets = [key for key in data_now if key.rsplit(".", 1)[-1] in ("subset", "subset_seed")]
    pairs += [(f"datasets.{key}", data.get(key), data_now[key]) for key in subsets]
    changed = [f"{name}: {was} before, {now_} now" for name, was, now_ in pairs if was != now_]
    changed += _batch_problem(int(old["batch_size_train"]), int(new["batch_size_train"]), *ranks)
    if changed:
        raise ValueError(
            f"{origin} cannot be resumed with other settings:\n  "
            + "\n  ".join(changed)
            + "\nRestore these settings, or start a new run from its weights by model.pretrained."
        )


def _batch_problem(before: int, now: int, ranks: int, ranks_now: int) -> list[str]:
    if before * ranks == now * ranks_now:
        return []
    change = f"run.batch_size_train: {before} before, {now} now"
    if ranks == ranks_now:
        return [change]
    fitting, rest = divmod(before * ranks, ranks_now)
    cure = f"use {fitting}" if not rest else f"{before * ranks} pairs cannot be split evenly"
    return [f"{change}, on {ranks} rank(s) before, {ranks_now} now: {cure}"]
