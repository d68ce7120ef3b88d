"""Frozen weights divided over the ranks, by PyTorch's FSDP2; the others stay under DDP.

A rank holds its share of every frozen block, and the whole block only while it computes. Frozen
weights have neither gradients nor optimizer state and are in no checkpoint, so that training,
checkpoints and resumption do not know of it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lavis_mafa.training.checkpoint import trained_state


def _fully_shard() -> Any:
    """Return torch's `fully_shard`.

    Raises:
        ValueError: if the installed torch is too old.
    """
    # Imported here, since only runs with run.fsdp need it.
    import torch.distributed.fsdp as fsdp

    fully_shard = getattr(fsdp, "fully_shard", None)
    # `ignored_params` is the newest of what is used.
    if fully_shard and "ignored_params" in inspect.signature(fully_shard).parameters:
        return fully_shard
    raise ValueError(
        f"run.fsdp: needs torch 2.8 or newer, found {torch.__version__}; update torch or remove "
        "run.fsdp"
    )


def _frozen_blocks(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Return the frozen blocks of a model's parts by the module that computes one after the other.

    Blocks are the items of a list of layers of one class, such as those of a ViT or of a language
    model; the outermost list counts. A block is frozen if no weight of it is in a checkpoint of the
    run: neither trained nor of a momentum encoder.
    """
    names = trained_state(model).keys()
    saved = {id(w) for n, w in model.named_parameters(remove_duplicate=False) if n in names}
    found: dict[nn.Module, list[nn.Module]] = {}

    def search(owner: nn.Module) -> None:
        for child in owner.children():
            blocks = list(child.children())
            if not _equal_layers(child, blocks):
                search(child)
            elif owner is not model and not any(id(w) in saved for w in child.parameters()):
                found.setdefault(owner, []).extend(blocks)

    search(model)
    return found


def _equal_layers(listing: nn.Module, layers: list[nn.Module]) -> bool:
    """Return whether a module is a list of at least two layers of one class, which have parts."""
    return (
        isinstance(listing, nn.ModuleList | nn.Sequential)
        and len(layers) > 1
        and len({type(layer) for layer in layers}) == 1
        and any(layers[0].children())
    )


def shard_frozen(model: nn.Module, device: torch.device) -> None:
    """Divide the frozen blocks of a model over all ranks; call it before DDP wraps the model.

    Blocks move to the device one by one, so that it never holds all of them. All ranks must call
    it, and afterwards compute the same blocks in the same order; where they cannot, see
    `whole_weights`. Embeddings, heads and norms outside blocks stay whole on every rank.

    Raises:
        ValueError: if the model has no frozen blocks, or torch is too old.
    """
    from torch.distributed.device_mesh import init_device_mesh

    fully_shard = _fully_shard()
    by_owner = _frozen_blocks(model)
    if not by_owner:
        raise ValueError(
            f"run.fsdp: {type(model).__name__} has no frozen blocks to shard; freeze a part of it "
            "(BLIP-2: model.freeze_vit: True) or remove run.fsdp"
        )
    weights = [w for blocks in by_owner.values() for b in blocks for w in b.parameters()]
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    sharded = set(map(id, weights))
    ignored = [n for n, w in model.named_parameters(remove_duplicate=False) if id(w) in sharded]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for owner, blocks in by_owner.items():
        for block in blocks:
            block.to(device)
            for value in block.state_dict().values():  # as DDP begins with the weights of rank 0
                dist.broadcast(value, 0)
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        # Without weights of its own: it lets a block be gathered while the one before it computes.
        fully_shard(owner, mesh=mesh, ignored_params=set(owner.parameters()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    logging.info(
        "run.fsdp: %d frozen blocks, %.2f GiB, divided over %d ranks",
        sum(map(len, by_owner.values())),
        size / 2**30,
        mesh.size(),
    )


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Hold all weights whole on every rank inside; all ranks must enter and leave together.

    For evaluation, where ranks have other numbers of mini-batches and generate other numbers of
    tokens, but a shared block can only be gathered by all ranks at the same place.
    """
    from torch.distributed.fsdp import FSDPModule

    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()
