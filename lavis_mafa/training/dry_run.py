"""Report what a config would train, without training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lavis_mafa.algorithm.tokens import CUT, UNKNOWN
from lavis_mafa.judges.frozen import models_beside
from lavis_mafa.training.con_d_check import check_con_d
from lavis_mafa.training.loaders import to_device
from lavis_mafa.training.training_step import loss_terms

if TYPE_CHECKING:
    from lavis_mafa.training.runner_mafa import RunnerMafa

_MIB = 2**20


def dry_run(runner: RunnerMafa) -> list[str]:
    """Run one mini-batch through the model and describe what training would do.

    Returns:
        The lines to print: data, order, steps, settings that do not fit the data, Con-D's
        self-check, parameters, the loss of the mini-batch, and an estimate of the memory per rank.

    Raises:
        PoorDiscriminatorError: as training would, if Con-D fails its self-check.
    """
    lines = [f"device {runner.device}, {runner.world_size} rank(s)"]
    if runner.train_set is None:
        splits = {name: len(data) for name, data in runner.eval_sets.items()}
        return [*lines, f"evaluation only; samples per split: {splits}"]
    runner.prepare()
    found = check_con_d(runner)
    plan = runner.schedule.begin(0)
    run = runner.run_cfg
    images = len(np.unique(runner.train_set.image_ids))
    lines += [f"training data: {len(runner.train_set):,} pairs of {images:,} images"]
    lines += [
        f"mini-batches: {run.batch_size_train} x {runner.world_size} rank(s) x "
        f"{runner.accum_grad_iters} accumulated; {plan.steps:,} steps an epoch, "
        f"{runner.max_epoch} epochs, {len(plan.leftover)} samples left over for the next epoch",
        _grit_line(runner),
    ]
    lines += [f"WARNING: {warning}" for warning in runner.warnings_of_size()]
    if found is not None:
        lines.append(found.line)
        if found.warning:
            lines.append(found.warning)
    samples = to_device(next(iter(runner.loaders.train(plan, 0, 0))), runner.device)
    lines += _captions_line(samples, runner._model)
    samples.update(epoch=0, num_iters_per_epoch=plan.steps, iters=0, grouped=plan.grouped)
    return lines + _measured_lines(runner, samples)


def _grit_line(runner: RunnerMafa) -> str:
    grit = runner.run_cfg.grit
    if not grit.enabled:
        return "GRIT: off, random mini-batches"
    regions = "sub-queues of similar pairs, " if grit.regions else ""
    rate = f", learning rate x {grit.lr_factor:g}" if grit.lr_factor != 1 else ""
    return (
        f"GRIT: L = {grit.queue_size:,}, M = {grit.search_space:,}, {regions}"
        f"{runner.schedule.describe_hardness(runner.max_epoch)}, "
        f"grouped from epoch {grit.start_epoch} on{rate}"
    )


def _measured_lines(runner: RunnerMafa, samples: dict[str, Any]) -> list[str]:
    """Pass a mini-batch forward; return lines on parameters, losses and memory.

    Memory is weights, gradients, AdamW's two moments, and what the forward pass saves for the
    backward pass.
    """
    # Not `runner.model`, which would compile, and wait for other ranks.
    model = runner._model.to(runner.device).train()
    saved: dict[int, int] = {}  # bytes by address: tensors may share their storage

    def note_size(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note_size, lambda tensor: tensor)
    with hooks, runner.autocast():
        output = model(samples)
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    sizes = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in trained + frozen}
    parameters = f"model: {_millions(trained)} trainable and {_millions(frozen)} frozen parameters"
    for one in models_beside(model):
        # By address: it may share its image encoder with the model.
        own = [p for p in one.model.parameters() if p.untyped_storage().data_ptr() not in sizes]
        sizes |= {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in own}
        parameters += f"; {one.title}: {_millions(own)} of its own"
    weights, of_training = sum(sizes.values()), sum(p.numel() * p.element_size() for p in trained)
    activations = sum(size for pointer, size in saved.items() if pointer not in sizes)
    total = weights + 3 * of_training + activations
    losses = {name: round(value.item(), 4) for name, value in loss_terms(output).items()}
    return [
        parameters,
        f"one mini-batch: {losses}",
        f"memory per rank, estimated: {total / _MIB:.0f} MiB (weights {weights / _MIB:.0f}, "
        f"gradients {of_training / _MIB:.0f}, AdamW {2 * of_training / _MIB:.0f}, "
        f"activations {activations / _MIB:.0f})",
    ]


def _captions_line(samples: Mapping[str, Any], model: Any) -> list[str]:
    """Return a warning if many captions of a mini-batch are cut, or have no known word."""
    size = len(samples["text_input"])
    counts = {"are cut": samples.get(CUT, 0), "have no word that it knows": samples.get(UNKNOWN, 0)}
    found = [f"{count / size:.0%} {what}" for what, count in counts.items() if count > size / 10]
    if not found:
        return []
    return [
        f"WARNING: of {size} captions, {' and '.join(found)}: the model reads {model.max_txt_len} "
        "tokens of its vocabulary. Raise model.max_txt_len (and text_processor.train.max_words), "
        "or make a vocabulary of your captions: lavis-mafa check-data FILES --vocab vocab.txt"
    ]


def _millions(parameters: list[Tensor]) -> str:
    return f"{sum(parameter.numel() for parameter in parameters) / 1e6:.2f} M"
