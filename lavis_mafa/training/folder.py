"""Choose the folder of a run, and the checkpoint that it resumes from."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lavis_mafa.checkpoints.checkpoints import is_intact
from lavis_mafa.io.files import atomic_write
from lavis_mafa.io.folder_lock import FolderInUseError, lock_folder, release_folders
from lavis_mafa.io.processes import any_rank, from_main_process
from lavis_mafa.settings import ConfigError
from lavis_mafa.training.checkpoint import EVERY, LAST

_LAUNCH = "launch.txt"  # which launch started or resumed the run in a folder
# Keys of `run` that differ between the processes, or the starts, of one launch.
_PER_PROCESS_KEYS = ("rank", "world_size", "gpu", "distributed", "resume_ckpt_path")


def choose_folder(cfg: Any) -> str:
    """Choose a run's job id, and set ``run.resume_ckpt_path``; the same on all ranks.

    A run that resumes keeps its folder. A new run gets a folder named by the time, as in LAVIS,
    with seconds. A run restarted by the launcher or the cluster resumes from its newest checkpoint,
    whatever its command says. Rank 0 makes the folder and locks it; see `release_folders`.

    Raises:
        ConfigError: if ``run.job_id`` names a folder with another run's checkpoint, or another run
            is writing into the folder.
        ValueError: if all checkpoints to resume from are damaged.
    """
    run_cfg = cfg.run_cfg
    root = Path.cwd() / str(run_cfg.output_dir)
    given = run_cfg.get("job_id"), run_cfg.get("resume_ckpt_path")
    launch = None if run_cfg.evaluate else _launch_of(cfg)
    restarted = _is_restart(torch.device(run_cfg.device)) and launch is not None
    # Rank 0 chooses for all: ranks may see a shared disk, and the clock, differently.
    job_id, run_cfg.resume_ckpt_path = from_main_process(
        lambda: _choose_and_lock(cfg, root, launch, restarted, *given)
    )
    return job_id


def _choose_and_lock(
    cfg: Any, root: Path, launch: str | None, restarted: bool, *given: str | None
) -> tuple[str, str | None]:
    while True:
        own = _folder_of_launch(launch, root) if restarted else None
        job_id, resume = _choose(root, own, *given)
        try:
            if not lock_folder(root / job_id):
                break
        except FolderInUseError as error:
            raise ConfigError(str(cfg.args.cfg_path), [f"run.job_id: {error}"]) from None
        # Choose again: the process that left the folder may have saved a newer checkpoint.
    if not (resume or cfg.run_cfg.evaluate) and (root / job_id / LAST).exists():
        release_folders()
        problem = (
            f"run.job_id: {root / job_id} holds another run's checkpoint; resume it with "
            "run.resume_ckpt_path=auto, choose another job_id, or remove the folder"
        )
        raise ConfigError(str(cfg.args.cfg_path), [problem])
    if launch is not None:
        with atomic_write(root / job_id / _LAUNCH) as file:
            file.write(launch.encode())
    return job_id, resume


def _choose(
    root: Path, own: Path | None, job_id: str | None, resume: str | None
) -> tuple[str, str | None]:
    """Return job id and checkpoint; ``own`` is the folder of this launch if it is restarted."""
    if own is not None:
        newest = _newest_checkpoint(own, below=False)
        logging.info("restarted by the launcher: resuming in %s", own)
        # Without a checkpoint it starts again from where its command says.
        start = None if resume == "auto" else resume
        # The job id '' stands for output_dir itself.
        return ("" if own == root else own.name), str(newest) if newest else start
    if resume == "auto":
        folder = root if job_id is None else root / job_id
        newest = _newest_checkpoint(folder, below=not job_id)
        resume = None if newest is None else str(newest)
        if newest is None:
            logging.info("no checkpoint to resume from in %s: starting a new run", folder)
        elif job_id is None:
            job_id = "" if newest.parent == root else newest.parent.name
    if job_id is None:
        job_id = _make_folder(root)
    return str(job_id), resume


def _make_folder(root: Path) -> str:
    """Make a folder named by the time, which no other run can get; return its name."""
    root.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now().strftime("%Y%m%d%H%M%S")
    for name in itertools.chain([stamp], (f"{stamp}-{k}" for k in itertools.count(2))):
        # Made at once rather than tested: another run may start in the same second.
        with suppress(FileExistsError):
            (root / name).mkdir()
            return name
    raise AssertionError("unreachable")


def _newest_checkpoint(folder: Path, below: bool = True) -> Path | None:
    """Return the newest intact checkpoint in a folder, or in the job folders ``below`` it.

    That is the newest ``checkpoint_last.pth``; where it is damaged, the newest other checkpoint in
    its folder.

    Raises:
        ValueError: if there are checkpoints, but all of them are damaged.
    """
    jobs = folder.glob(f"*/{LAST}") if below else ()
    found: list[Path] = [path for path in (folder / LAST, *jobs) if path.is_file()]
    if not found:
        return None
    last = max(found, key=_age)
    others = [path for path in last.parent.glob(EVERY) if path != last]
    for path in (last, *sorted(others, key=_age, reverse=True)):
        if is_intact(path):
            return path
        logging.error("%s is damaged: trying the checkpoint before it", path)
    raise ValueError(
        f"{last} is damaged, and so is every other checkpoint in its folder: restore a copy, or "
        f"remove {last.parent} to start a new run"
    )


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _is_restart(device: torch.device) -> bool:
    """Return whether the environment of any rank says that this is a restart; all must call it.

    Every node's launcher counts its own restarts, and not those that another node's failure caused.
    """
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(any_rank([any(int(os.environ.get(name) or 0) for name in names)], device))


def _launch_of(cfg: Any) -> str | None:
    """Return an identity of a config and of the Slurm job or launcher that started this process,
    which a restart keeps; None for a process that neither has started."""
    if "SLURM_JOB_ID" in os.environ:
        launch = f"Slurm job {os.environ['SLURM_JOB_ID']}"
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        launch = os.environ["TORCHELASTIC_RUN_ID"]
        if launch == "none":  # no --rdzv-id: its process tells one launcher from another
            launch = f"launcher {os.getppid()} of {socket.gethostname()}"
    else:
        return None
    config = cfg.unresolved()
    config["run"] = {k: v for k, v in config["run"].items() if k not in _PER_PROCESS_KEYS}
    content = json.dumps([launch, config], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _folder_of_launch(launch: str | None, root: Path) -> Path | None:
    """Return the folder in which an earlier start of the same launch ran, if any."""
    files = (root / _LAUNCH, *root.glob(f"*/{_LAUNCH}"))
    ours = [path for path in files if path.is_file() and path.read_bytes() == str(launch).encode()]
    return max(ours, key=_age).parent if ours else None
