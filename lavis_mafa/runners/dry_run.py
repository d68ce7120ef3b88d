"""Report what a config would train, without training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lavis_mafa.algorithm.tokens import CUT, UNKNOWN
from lavis_mafa.models.con_d.frozen import models_beside
from lavis_mafa.runners.forecast import forecast
from lavis_mafa.runners.training_step import loss_terms

if TYPE_CHECKING:
    from lavis_mafa.runners.runner_mafa import RunnerMafa

_MIB = 2**20


def dry_run(runner: RunnerMafa) -> list[str]:
    """Run one mini-batch through the model and describe what training would do.

    Returns:
        The lines to print: data, order, steps, settings that do not fit the data, Con-D's
        self-check, parameters, the loss of the mini-batch, and an estimate of the memory per rank:
        weights, gradients, AdamW's two moments, and the activations that the forward pass saves for
        the backward pass.

    Raises:
        PoorDiscriminatorError: as training would, if Con-D fails its self-check.
    """
    lines = [f"device {runner.device}, {runner.world_size} rank(s)"]
    if runner.train_set is None:
        splits = {name: len(data) for name, data in runner.eval_sets.items()}
        return [*lines, f"evaluation only; samples per split: {splits}"]
    runner.prepare()
    found = runner.check_con_d()
    plan = runner.schedule.begin(0)
    run, grit = runner.run_cfg, runner.run_cfg.grit
    window = runner.accum_grad_iters
    images = len(np.unique(runner.train_set.image_ids))
    lines += [
        f"training data: {len(runner.train_set):,} pairs of {images:,} images",
        *_groups_line(runner),
        f"mini-batches: {run.batch_size_train} x {runner.world_size} rank(s) x {window} "
        f"accumulated; {plan.steps:,} steps an epoch, {runner.max_epoch} epochs, "
        f"{len(plan.leftover)} samples left over for the next epoch",
        f"GRIT: L = {grit.queue_size:,}, M = {grit.search_space:,}, "
        f"{'sub-queues of similar pairs, ' * grit.regions}"
        f"{runner.schedule.describe_hardness(runner.max_epoch)}, "
        f"grouped from epoch {grit.start_epoch} on"
        + (f", learning rate x {grit.lr_factor:g}" if grit.lr_factor != 1 else "")
        if grit.enabled
        else "GRIT: off, random mini-batches",
    ]
    warnings, notes = forecast(runner)
    lines += [*notes, *(f"WARNING: {warning}" for warning in warnings)]
    lines += [found.line, *([found.warning] if found.warning else [])] if found else []
    batch = next(iter(runner.loaders.train(plan, 0, 0)))
    samples = runner.loaders.to_device(batch)
    lines += _captions_line(samples, runner._model)
    samples.update(epoch=0, num_iters_per_epoch=plan.steps, iters=0, grouped=plan.grouped)
    # Not `runner.model`, which would compile, and wait for other ranks.
    runner._model.to(runner.device).train()
    saved: dict[int, int] = {}  # bytes by address: tensors may share their storage

    def note_size(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note_size, lambda tensor: tensor)
    with hooks, runner.autocast():
        output = runner._model(samples)
    trained = [p for p in runner._model.parameters() if p.requires_grad]
    frozen = [p for p in runner._model.parameters() if not p.requires_grad]
    sizes = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for parameter in [*trained, *frozen]
    }
    weights, of_training = sum(sizes.values()), _bytes(trained)
    # An image encoder that a frozen model shares with the model is counted with the model.
    beside = {
        one.title: [
            parameter
            for parameter in one.model.parameters()
            if parameter.untyped_storage().data_ptr() not in sizes
        ]
        for one in models_beside(runner._model)
    }
    of_frozen = sum(map(_bytes, beside.values()))
    # The forward pass saves parameters as well, which are no activations.
    activations = sum(size for pointer, size in saved.items() if pointer not in sizes)
    # A gradient and both of AdamW's moments are as large as the weights they belong to.
    total = weights + 3 * of_training + of_frozen + activations
    losses = {name: round(value.item(), 4) for name, value in loss_terms(output).items()}
    return [
        *lines,
        f"model: {_millions(trained)} trainable and {_millions(frozen)} frozen parameters"
        + "".join(f"; {title}: {_millions(own)} of its own" for title, own in beside.items()),
        f"one mini-batch: {losses}",
        f"memory per rank, estimated: {total / _MIB:.0f} MiB (weights {weights / _MIB:.0f}, "
        f"gradients {of_training / _MIB:.0f}, AdamW {2 * of_training / _MIB:.0f}, frozen models "
        f"{of_frozen / _MIB:.0f}, activations {activations / _MIB:.0f})",
    ]


def _captions_line(samples: Mapping[str, Any], model: Any) -> list[str]:
    """Return a warning if many captions of a mini-batch are cut, or have no known word."""
    size = len(samples["text_input"])
    counts = {"are cut": samples.get(CUT, 0), "have no word that it knows": samples.get(UNKNOWN, 0)}
    told = [f"{count / size:.0%} {what}" for what, count in counts.items() if count > size / 10]
    if not told:
        return []
    return [
        f"WARNING: of {size} captions, {' and '.join(told)}: the model reads {model.max_txt_len} "
        "tokens of its vocabulary. Raise model.max_txt_len (and text_processor.train.max_words), "
        "or make a vocabulary of your captions: lavis-mafa check-data FILES --vocab vocab.txt"
    ]


def _groups_line(runner: RunnerMafa) -> list[str]:
    """Return a line about the groups of the training data; [] if there are none."""
    groups = runner.train_set.group_ids if runner.train_set is not None else None
    if groups is None:
        return []
    # Not by bincount: a data set of a user's own may have any numbers.
    sizes = np.unique(groups[groups >= 0], return_counts=True)[1]
    return [
        f"groups: {len(sizes):,} of {sizes.sum():,} pairs "
        f"({sizes.sum() / len(groups):.0%}), the largest of {sizes.max():,}; "
        + (
            f"model.mafa.same_group: {runner.same_group}"
            if runner.same_group
            else f"{type(runner._model).__name__} makes no use of them"
        )
    ]


def _bytes(parameters: list[Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _millions(parameters: list[Tensor]) -> str:
    return f"{sum(parameter.numel() for parameter in parameters) / 1e6:.2f} M"
