"""Start of a process: ranks, devices and seeds."""

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


def init_distributed(run_cfg: Any) -> None:
    """Join the process group that the launcher describes, if there is one.

    ``run_cfg.distributed: False`` stays alone whatever the environment says. Otherwise reads
    ``torch.distributed.run``'s variables, else Slurm's for a job of several tasks. Uses NCCL on
    GPUs and gloo on CPUs. Sets ``distributed``, ``rank``, ``world_size`` and ``gpu`` of
    ``run_cfg``.
    """
    if run_cfg.get("distributed") is False:
        run_cfg.update({"rank": 0, "world_size": 1, "gpu": 0})
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", 0))
    elif int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in os.environ:
        rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        local = int(os.environ.get("SLURM_LOCALID", 0))
    else:
        run_cfg.update({"distributed": False, "rank": 0, "world_size": 1, "gpu": 0})
        return
    run_cfg.update({"distributed": True, "rank": rank, "world_size": world, "gpu": local})
    on_gpu = str(run_cfg.device).startswith("cuda")
    if on_gpu:
        local %= torch.cuda.device_count()  # a task may see one GPU alone
        run_cfg.update({"gpu": local})
        torch.cuda.set_device(local)
    timeout = datetime.timedelta(minutes=float(run_cfg.get("dist_timeout_minutes", 30)))
    url = run_cfg.get("dist_url", "env://")
    store, rank, world = next(dist.rendezvous(url, rank, world, timeout=timeout))
    dist.init_process_group(
        backend="nccl" if on_gpu else "gloo",
        store=dist.PrefixStore(_agree_on_start(store, rank, world, timeout), store),
        world_size=world,
        rank=rank,
        timeout=timeout,
    )
    dist.barrier()
    setup_for_distributed(rank == 0)


def _agree_on_start(store: Any, rank: int, world: int, timeout: datetime.timedelta) -> str:
    """A name that all ranks of this start of a run have in common, and no earlier start had.

    The launcher keeps its store over restarts: ranks would find the addresses of those that have
    ended, and wait for them. Its count of restarts is no such name: every node has a count of its
    own, and one on which nothing failed restarts without counting.
    """
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"here is {rank}", mine)
        name = store.get(f"welcome {mine}").decode()  # waits
        store.set(f"{name} {rank}", "")
        return name
    missing, until = set(range(1, world)), time.monotonic() + timeout.total_seconds()
    while missing:  # whom an earlier start has left in the store never answers
        for other in sorted(missing):
            if store.check([f"here is {other}"]):
                store.set(f"welcome {store.get(f'here is {other}').decode()}", mine)
        missing = {other for other in missing if not store.check([f"{mine} {other}"])}
        if missing and time.monotonic() > until:
            raise RuntimeError(f"timed out waiting for rank(s) {sorted(missing)} to start")
        time.sleep(0.01)
    return mine


def amp_dtype_of(run_cfg: Any) -> torch.dtype | None:
    """Autocast's type by ``amp`` and ``amp_dtype``, None without mixed precision."""
    if not run_cfg.get("amp", False):
        return None
    return {"fp16": torch.float16, "bf16": torch.bfloat16}[run_cfg.get("amp_dtype", "fp16")]


def compile_image_encoders(model: Any) -> None:
    """Compile the blocks of a model's image encoder, and of its Con-D's, by ``torch.compile``.

    Block by block: all are compiled as one, and weights keep their names.

    Raises:
        ValueError: if a model has no image encoder made of blocks.
    """
    judge = getattr(getattr(model, "con_d", None), "model", None)
    encoders = [getattr(one, "visual_encoder", None) for one in (model, judge)]
    blocks = {id(block): block for encoder in encoders for block in _blocks(encoder)}
    if not blocks:
        raise ValueError(f"run.compile: {type(model).__name__} has no image encoder to compile")
    for block in blocks.values():
        block.compile()


def _blocks(encoder: Any) -> Any:
    """Of a ViT as ALBEF, BLIP and EVA have it, or of CLIP's."""
    clip = getattr(encoder, "transformer", None)
    return getattr(encoder, "blocks", None) or getattr(clip, "resblocks", ())


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch, different on every rank, as LAVIS does, and choose kernels
    that repeat themselves."""
    seed = seed + get_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    # It would build a plan for every number of pairs and tokens, and these change at every step.
    torch.backends.cuda.enable_cudnn_sdp(False)


def random_states() -> dict[str, Any]:
    """State of every generator of this process, as plain values and tensors."""
    python = random.getstate()
    numpy: Any = np.random.get_state()
    return {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [numpy[0], torch.from_numpy(numpy[1].astype(np.int64)), *numpy[2:]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Take up what `random_states` gave."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())
