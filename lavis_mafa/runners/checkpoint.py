"""Checkpoints: one file with everything a run needs to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lavis_mafa.algorithm.grit.collector import share_out
from lavis_mafa.io.checkpoints import not_resumable_message, vocabulary_of
from lavis_mafa.io.files import atomic_write
from lavis_mafa.io.processes import gather_objects
from lavis_mafa.models.traits import traits_of
from lavis_mafa.runners.launch import random_states, seed_everything, set_random_states
from lavis_mafa.tasks.tally import Tally

FORMAT = 2  # 1: no "skipped", "finished_epochs" and logs; it is read as well
LAST, BEST = "checkpoint_last.pth", "checkpoint_best.pth"
EVERY = "checkpoint_*.pth"  # these, and those kept of single epochs


def save_atomically(content: dict[str, Any], path: Path) -> None:
    """Write a file that is either whole or not there.

    ``content`` must be plain values and tensors, so that ``weights_only`` loading accepts it.
    """
    with atomic_write(path) as file:
        torch.save(content, file)


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict less frozen weights, as LAVIS saves it, but with momentum encoders.

    Momentum encoders (``*_m``) take no gradient and change all the same.
    """
    frozen = {
        name
        for name, value in model.named_parameters(remove_duplicate=False)  # tied weights
        if not value.requires_grad and not any(part.endswith("_m") for part in name.split("."))
    }
    return {key: value for key, value in model.state_dict().items() if key not in frozen}


def load_trained_state(model: nn.Module, state: dict[str, torch.Tensor], origin: str) -> None:
    """Load what `trained_state` gave; only frozen weights may be missing.

    Raises:
        ValueError: naming the keys that are missing, or unknown to the model.
    """
    # Checkpoints from before the queue knew its images: they count as unknown.
    expected = set(trained_state(model)) - {"idx_queue"}
    missing, unknown = expected - state.keys(), state.keys() - model.state_dict().keys()
    # Constants that transformers' BERT saves in some versions only.
    missing, unknown = (
        {key for key in keys if not key.endswith(".position_ids")} for keys in (missing, unknown)
    )
    if missing or unknown:
        raise ValueError(
            f"{origin} was saved by another model. Missing: {sorted(missing)[:5] or 'none'}; "
            f"unknown: {sorted(unknown)[:5] or 'none'}"
        )
    model.load_state_dict(state, strict=False)


def content_of(runner: Any, epoch: int, step: int) -> dict[str, Any] | None:
    """Everything of a run that goes on at ``step`` of ``epoch``; None on ranks that do not save.

    All ranks must call it. LAVIS's keys hold what LAVIS keeps there, ``run`` what is ours.
    """
    model = runner.unwrap_dist_model(runner.model)
    ranks = gather_objects(
        {
            "random": random_states(),
            # The orders of epochs are the same on all ranks, and long.
            "schedule": runner.schedule.state_dict(plans=runner.rank == 0),
            "unreadable": runner.unreadable.state_dict(),
            "tally": runner.tally.state_dict(),
            "logs": runner.log.sizes(runner.rank),
            # Inside an accumulation window these are this rank's own, and not used yet.
            "gradients": {
                name: value.grad.cpu()
                for name, value in model.named_parameters()
                if value.grad is not None
            },
        }
    )
    if ranks is None:
        return None
    return {
        "model": trained_state(model),
        "optimizer": runner.optimizer.state_dict(),
        "scaler": runner.scaler.state_dict() if runner.scaler else None,
        "config": runner.config.to_dict(),
        "vocabulary": vocabulary_of(getattr(model, "tokenizer", None)),
        "family": traits_of(model).family,
        "epoch": epoch - 1,  # LAVIS: the last epoch that is complete
        "run": {
            "format": FORMAT,
            "epoch": epoch,
            "step": step,
            "global_step": runner.global_step,
            "best": dict(runner.best),
            "finished_epochs": runner.finished_epochs,
            "skipped": runner.numbers.skipped,
            "ranks": ranks,
        },
    }


def check_same_settings(
    before: dict[str, Any], now: dict[str, Any], origin: str, ranks: tuple[int, int] = (1, 1)
) -> None:
    """Refuse to go on with settings that the order of samples and the state depend on.

    The number of ranks may change if all together read as many pairs a step as before.

    Args:
        before, now: the config of the checkpoint and of this run.
        ranks: how many saved the checkpoint, and how many go on.

    Raises:
        ValueError: naming every such setting with both values.
    """
    old, new = before.get("run", {}), now.get("run", {})
    names = ("accum_grad_iters", "seed", "amp", "amp_dtype")
    pairs = [(f"run.{name}", old.get(name), new.get(name)) for name in names]
    grit = [name for name in new.get("grit", {}) if name not in ("save_order", "first_order")]
    pairs += [
        (f"run.grit.{name}", old.get("grit", {}).get(name), new["grit"][name]) for name in grit
    ]
    pairs.append(("model.arch", before["model"].get("arch"), now["model"].get("arch")))
    changed = [f"{name}: {was} before, {now_} now" for name, was, now_ in pairs if was != now_]
    changed += _other_batch(int(old["batch_size_train"]), int(new["batch_size_train"]), *ranks)
    if changed:
        raise ValueError(
            f"{origin} cannot go on with other settings:\n  "
            + "\n  ".join(changed)
            + "\nPut them back, or begin a new run from its weights by model.pretrained."
        )


def _other_batch(before: int, now: int, ranks: int, ranks_now: int) -> list[str]:
    if before * ranks == now * ranks_now:
        return []
    told = f"run.batch_size_train: {before} before, {now} now"
    if ranks == ranks_now:
        return [told]
    together, rest = divmod(before * ranks, ranks_now)
    cure = f"take {together}" if not rest else f"{before * ranks} pairs do not spread over them"
    return [f"{told}, on {ranks} rank(s) before, {ranks_now} now: {cure}"]


def restore(runner: Any, content: dict[str, Any], origin: str) -> None:
    """Put a runner where `content_of` found it, perhaps on another number of ranks.

    Then the mini-batches of all ranks together stay what they were; what each rank had collected,
    counted and computed for itself is shared out anew, and new ranks draw anew.

    Raises:
        ValueError: if the content does not fit this run.
    """
    if "run" not in content:
        raise ValueError(not_resumable_message(origin))
    state = content["run"]
    if state["format"] > FORMAT:
        raise ValueError(
            f"{origin} is of format {state['format']}, this version of lavis_mafa knows formats up "
            f"to {FORMAT}: go on with the version that saved it, or a newer one"
        )
    ranks = state["ranks"]
    check_same_settings(
        content["config"], runner.config.to_dict(), origin, (len(ranks), runner.world_size)
    )
    model = runner.unwrap_dist_model(runner.model)
    load_trained_state(model, content["model"], origin)
    # The config decides on these, not what the optimizer had when it was saved.
    asked = [
        {key: group[key] for key in ("weight_decay", "betas")}
        for group in runner.optimizer.param_groups
    ]
    runner.optimizer.load_state_dict(content["optimizer"])
    for group, settings in zip(runner.optimizer.param_groups, asked, strict=True):
        group.update(settings)
    if runner.scaler and content["scaler"]:
        runner.scaler.load_state_dict(content["scaler"])
    runner.start_epoch, runner.start_step = state["epoch"], state["step"]
    runner.global_step, runner.best = state["global_step"], dict(state["best"])
    runner.finished_epochs = state.get("finished_epochs", runner.start_epoch)
    runner.numbers.skipped = state.get("skipped", 0)
    if len(ranks) != runner.world_size:
        ranks = redistribute(ranks, runner.world_size)
        seed_everything(_seed_of(runner))
    mine = ranks[runner.rank]
    schedule = {**ranks[0]["schedule"], "collector": mine["schedule"]["collector"]}
    runner.schedule.load_state_dict(schedule, runner.start_epoch, runner.device)
    runner.unreadable.load_state_dict(mine["unreadable"])
    runner.tally = Tally(mine["tally"])
    for name, value in model.named_parameters():
        if name in mine["gradients"]:
            value.grad = mine["gradients"][name].to(value.device)
    if mine["random"] is not None:
        set_random_states(mine["random"])


def redistribute(ranks: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """What some ranks had for themselves, for ``count`` ranks.

    Sums go to the first: with the others' they are what they were. Gradients become their
    mean on every rank, so that the mean over ranks is what it was.
    """
    first = ranks[0]
    collectors = share_out([rank["schedule"]["collector"] for rank in ranks], count)
    gradients = {
        name: torch.stack([rank["gradients"][name] for rank in ranks if name in rank["gradients"]])
        .sum(0)
        .div(len(ranks))
        for name in {name for rank in ranks for name in rank["gradients"]}
    }
    tally, bad = Tally(), {}
    for rank in ranks:
        tally.add(rank["tally"])
        bad.update(rank["unreadable"]["bad"])
    seen = sum(rank["unreadable"]["seen"] for rank in ranks)
    nothing, listed = {name: 0.0 for name in tally.sums}, list(bad.items())
    return [
        {
            "random": ranks[place]["random"] if place < len(ranks) else None,
            "schedule": {**first["schedule"], "collector": collectors[place]},
            # Evenly: each rank stops the run by its own share.
            "unreadable": {
                "seen": seen // count + (place < seen % count),
                "bad": dict(listed[place::count]),
            },
            "tally": nothing if place else tally.state_dict(),
            "gradients": gradients,
        }
        for place in range(count)
    ]


def _seed_of(runner: Any) -> int:
    """For ranks that no rank was saved for: another one at every step."""
    words = np.random.SeedSequence([int(runner.config.run_cfg.seed), runner.global_step])
    return int(words.generate_state(1)[0] >> 1)
