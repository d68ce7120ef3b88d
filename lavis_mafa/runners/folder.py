"""Where a run writes, and which checkpoint it goes on from."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lavis.common.dist_utils import is_main_process

from lavis_mafa.config import ConfigError
from lavis_mafa.io.checksums import is_intact
from lavis_mafa.io.files import write_json
from lavis_mafa.io.processes import any_rank, on_main_process
from lavis_mafa.runners.checkpoint import EVERY, LAST

LAUNCH = "launch.json"  # which launch began or resumed the run in a folder
OF_A_PROCESS = ("rank", "world_size", "gpu", "distributed", "resume_ckpt_path")


def choose_folder(cfg: Any) -> str:
    """The job id, and into the config the checkpoint to go on from; from rank 0 for all.

    A run that goes on stays in its folder; a new one gets a folder of its own, named by the time as
    LAVIS has it (with seconds: two runs may begin at once). A run that the launcher or the cluster
    has started again goes on from its newest checkpoint, whatever its command says.

    Raises:
        ConfigError: if a named folder holds another run's checkpoint.
        ValueError: if all checkpoints to go on from are damaged.
    """
    run_cfg = cfg.run_cfg
    root = Path.cwd() / str(run_cfg.output_dir)
    asked = run_cfg.get("job_id"), run_cfg.get("resume_ckpt_path")
    again = _started_again(torch.device(run_cfg.device))
    chosen: list[Any] = list(on_main_process(lambda: _chosen(cfg, root, again, *asked)) or asked)
    if dist.is_initialized():
        dist.broadcast_object_list(chosen, src=0, device=torch.device(run_cfg.device))
    job_id, run_cfg.resume_ckpt_path = chosen
    if not (run_cfg.resume_ckpt_path or run_cfg.evaluate) and (root / job_id / LAST).exists():
        raise ConfigError(
            str(cfg.args.cfg_path),
            [
                f"run.job_id: {root / job_id} holds another run's checkpoint; go on with it by "
                "run.resume_ckpt_path=auto, name another, or remove it"
            ],
        )
    return job_id


def _chosen(
    cfg: Any, root: Path, again: bool, job_id: str | None, resume: str | None
) -> tuple[str, str | None]:
    own = _begun_before(cfg, root) if again and not cfg.run_cfg.evaluate else None
    if own is not None:
        newest = newest_checkpoint(own, below=False)
        logging.info("started again by the launcher: going on in %s", own)
        # Without one it goes on from where its command says, or begins anew.
        begun_from = None if resume == "auto" else resume
        return ("" if own == root else own.name), str(newest) if newest else begun_from
    if resume == "auto":
        folder = root if job_id is None else root / job_id
        newest = newest_checkpoint(folder, below=not job_id)
        resume = None if newest is None else str(newest)
        if newest is None:
            logging.info("nothing to resume below %s: starting anew", folder)
        elif job_id is None:
            job_id = "" if newest.parent == root else newest.parent.name
    if job_id is None:
        stamp = datetime.datetime.now().strftime("%Y%m%d%H%M%S")
        names = [stamp, *(f"{stamp}-{k}" for k in range(2, 1000))]
        job_id = next(name for name in names if not (root / name).exists())
    return str(job_id), resume


def newest_checkpoint(folder: Path, below: bool = True) -> Path | None:
    """The newest checkpoint in a folder, or in the job folders ``below`` it, that is whole.

    ``checkpoint_last.pth``, or where a disk has spoilt it the newest other one beside it.

    Raises:
        ValueError: if there are checkpoints, but all of them are damaged.
    """
    jobs = folder.glob(f"*/{LAST}") if below else ()
    found = [path for path in (folder / LAST, *jobs) if path.is_file()]
    if not found:
        return None
    last = max(found, key=_age)
    others = [path for path in last.parent.glob(EVERY) if path != last]
    for path in (last, *sorted(others, key=_age, reverse=True)):
        if is_intact(path):
            return path
        logging.error("%s is damaged: looking for the one before it", path)
    raise ValueError(
        f"{last} is damaged, and so is every other checkpoint beside it: bring back a copy, or "
        f"remove {last.parent} to begin anew"
    )


def _age(path: Path) -> float:
    return path.stat().st_mtime


def launch_identity(cfg: Any) -> dict[str, str] | None:
    """What stays the same when a cluster requeues a job, or a launcher restarts its processes.

    None for a process that nothing would start again.
    """
    if "SLURM_JOB_ID" in os.environ:
        launch = f"Slurm job {os.environ['SLURM_JOB_ID']}"
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        run = os.environ["TORCHELASTIC_RUN_ID"]
        # "none" is every launcher's that was given no id.
        launcher = f"launcher {os.getppid()} of {socket.gethostname()}"
        launch = launcher if run == "none" else f"run {run}"
    else:
        return None
    config = cfg.to_dict()
    config["run"] = {k: v for k, v in config["run"].items() if k not in OF_A_PROCESS}
    written = json.dumps(config, sort_keys=True, default=str)
    return {"launch": launch, "config": hashlib.sha256(written.encode()).hexdigest()}


def record_launch(launch: dict[str, str] | None, folder: Path) -> None:
    """Remember in a run's folder what `launch_identity` told, for when it is started again."""
    if launch is not None and is_main_process():
        write_json(folder / LAUNCH, launch)


def _started_again(device: torch.device) -> bool:
    """Whether any rank is told that it is a restart; all ranks must call it.

    Every node's launcher counts for itself, and one whose own ranks had not failed does not count.
    """
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(any_rank([any(int(os.environ.get(name) or 0) for name in names)], device))


def _begun_before(cfg: Any, root: Path) -> Path | None:
    """The folder of this run if an earlier start of the same launch began it."""
    wanted = launch_identity(cfg)
    if wanted is None:
        return None
    found = [path for path in (root / LAUNCH, *root.glob(f"*/{LAUNCH}")) if path.is_file()]
    ours = [path for path in found if json.loads(path.read_text(encoding="utf-8")) == wanted]
    return max(ours, key=_age).parent if ours else None
