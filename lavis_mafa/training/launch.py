"""Start a process: join the process group, choose the device and dtype, seed generators."""

from __future__ import annotations

import datetime
import os
import random
import time
import uuid
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lavis.common.dist_utils import get_rank, setup_for_distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from lavis_mafa.judges.frozen import frozen_models


def init_distributed(run_cfg: Any) -> None:
    """Join the process group that the launcher describes in the environment, if any.

    Reads the variables of ``torch.distributed.run``, else those of a Slurm job of several tasks;
    with ``run_cfg.distributed: False`` neither. Uses NCCL on GPUs and gloo on CPUs. Sets
    ``distributed``, ``rank``, ``world_size`` and ``gpu`` of ``run_cfg``.
    """
    alone = run_cfg.get("distributed") is False
    if not alone and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", 0))
    elif not alone and int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in os.environ:
        rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        local = int(os.environ.get("SLURM_LOCALID", 0))
    else:
        run_cfg.update({"distributed": False, "rank": 0, "world_size": 1, "gpu": 0})
        return
    on_gpu = str(run_cfg.device).startswith("cuda")
    if on_gpu:
        local %= torch.cuda.device_count()  # Slurm may show each task only its own GPU, as number 0
        torch.cuda.set_device(local)
    run_cfg.update({"distributed": True, "rank": rank, "world_size": world, "gpu": local})
    timeout = datetime.timedelta(minutes=float(run_cfg.get("dist_timeout_minutes", 30)))
    url = run_cfg.get("dist_url", "env://")
    store, rank, world = next(rendezvous(url, rank, world, timeout=timeout))
    dist.init_process_group(
        backend="nccl" if on_gpu else "gloo",
        store=PrefixStore(_agree_on_start(store, rank, world, timeout), store),
        world_size=world,
        rank=rank,
        timeout=timeout,
    )
    dist.barrier()
    setup_for_distributed(rank == 0)


def _agree_on_start(store: Any, rank: int, world: int, timeout: datetime.timedelta) -> str:
    """Agree on a name for this start of a run, which no earlier start has used.

    The launcher keeps its store over restarts: under the same names, ranks would find the addresses
    of processes that have ended, and wait for them. The launcher's count of restarts cannot serve,
    since every node counts for itself, and a node without a failure restarts without counting.

    Every other rank writes its own id; rank 0 answers each id with the name; the rank confirms.
    """
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"here is {rank}", mine)
        name: str = store.get(f"welcome {mine}").decode()  # waits
        store.set(f"{name} {rank}", "")
        return name
    missing, until = set(range(1, world)), time.monotonic() + timeout.total_seconds()
    while missing:  # an id left by an earlier start is answered as well, but never confirmed
        for other in sorted(missing):
            if store.check([f"here is {other}"]):
                store.set(f"welcome {store.get(f'here is {other}').decode()}", mine)
        missing = {other for other in missing if not store.check([f"{mine} {other}"])}
        if missing and time.monotonic() > until:
            raise RuntimeError(f"timed out waiting for rank(s) {sorted(missing)} to start")
        time.sleep(0.01)
    return mine


def amp_dtype_of(run_cfg: Any) -> torch.dtype | None:
    """Return autocast's dtype by ``amp`` and ``amp_dtype``, None without mixed precision."""
    if not run_cfg.get("amp", False):
        return None
    return {"fp16": torch.float16, "bf16": torch.bfloat16}[run_cfg.get("amp_dtype", "fp16")]


def compile_image_encoders(model: Any) -> None:
    """Compile the blocks of the image encoders of a model and of its frozen models.

    Block by block: equal blocks share one compilation, and weights keep their names.

    Raises:
        ValueError: if no image encoder consists of blocks.
    """
    models = [model, *(one.model for one in frozen_models(model))]
    encoders = [getattr(one, "visual_encoder", None) for one in models]
    blocks = {id(block): block for encoder in encoders for block in _blocks(encoder)}
    if not blocks:
        raise ValueError(f"run.compile: {type(model).__name__} has no image encoder to compile")
    for block in blocks.values():
        block.compile()


def _blocks(encoder: Any) -> Any:
    """Return the blocks of a ViT of ALBEF, BLIP or EVA (``blocks``) or of CLIP (``resblocks``)."""
    clip = getattr(encoder, "transformer", None)
    return getattr(encoder, "blocks", None) or getattr(clip, "resblocks", ())


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch with seed + rank, as LAVIS does, and select deterministic
    kernels."""
    seed = seed + get_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    # The fastest kernel of a benchmark may be another one in the next run.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    # cuDNN's attention builds a plan for every shape, and shapes change at every step.
    torch.backends.cuda.enable_cudnn_sdp(False)
