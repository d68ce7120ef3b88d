"""Save a run's state, cope with a failure to save it, and resume from it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from lavis.common.dist_utils import is_main_process

from lavis_mafa.io.checkpoints import local_file, read_checkpoint
from lavis_mafa.io.files import atomic_write, remove_partial_files
from lavis_mafa.io.processes import any_rank, barrier, from_main_process, on_main_process
from lavis_mafa.runners import checkpoint as ckpt
from lavis_mafa.runners.state import BestFigure, RunState


class NotSavedError(RuntimeError):
    """A checkpoint cannot be written."""


def check_resumption(cfg: Any) -> None:
    """Refuse a checkpoint of other settings before anything is built; all ranks must call it.

    Other settings of the learning rate cause a warning, since it may jump.

    Raises:
        ValueError: naming every setting that may not change, with both values.
    """
    run_cfg = cfg.run_cfg
    if run_cfg.evaluate or not run_cfg.get("resume_ckpt_path"):
        return
    path = local_file(run_cfg.resume_ckpt_path)

    def check() -> None:
        content, now = read_checkpoint(path, mapped=True), cfg.to_dict()
        before, run = content.get("config"), content.get("run")
        if not (isinstance(before, dict) and isinstance(run, dict) and "ranks" in run):
            return  # of another runner, which the runner reports
        ckpt.check_same_settings(before, now, path, (len(run["ranks"]), int(run_cfg.world_size)))
        changed = ckpt.changed_schedule(before, now)
        if changed:
            logging.warning(
                "%s was saved with other settings of the learning rate, which may jump: %s",
                *(path, changed),
            )

    on_main_process(check)


class CheckpointSchedule:
    """Saves and resumes the checkpoints of a run.

    Args:
        state: of the run.
        folder: of the run, where checkpoints are.
        allowed: failures in a row to save a checkpoint before the run stops
            (``run.max_failed_saves``).
        before_saving: called on all ranks before every checkpoint.

    Attributes:
        failed: number of failures since a checkpoint was last saved.
        unsaved: epoch and step of the last failure, None if the last checkpoint was saved.
    """

    def __init__(
        self,
        state: RunState,
        folder: Path,
        allowed: int,
        before_saving: Callable[[], None] = lambda: None,
    ) -> None:
        self.state, self.folder, self.allowed = state, folder, allowed
        self.failed = 0
        self.unsaved: tuple[int, int] | None = None
        self._before_saving = before_saving

    def save(self, epoch: int, step: int, *names: str, last: bool = False) -> bool:
        """Save the whole state under each name; a run that resumes starts at ``step`` of ``epoch``.

        All ranks must call it. If it fails, the files of earlier checkpoints stay as they are.

        Args:
            names: `LAST` by default.
            last: whether no later checkpoint follows that could make up for a failure.

        Returns:
            Whether it was saved.

        Raises:
            NotSavedError: if not, and either this was the last or more than ``allowed`` in a row
                have failed.
        """
        self._before_saving()
        content, problem = self.state.to_plain(epoch, step), None
        if content is not None:
            try:
                for name in names or (ckpt.LAST,):
                    ckpt.save_atomically(content, self.folder / name)
                    self.state.log.write("checkpoint", file=name, epoch=epoch, step=step)
            # PyTorch's zip writer raises RuntimeError where a file would raise OSError.
            except (OSError, RuntimeError) as error:
                problem = f"{type(error).__name__}: {error}"
        # Only rank 0 writes, but all ranks go on or stop together.
        if not any(any_rank([problem is not None], self.state.device)):
            self.failed, self.unsaved = 0, None
            return True
        self.failed, self.unsaved = self.failed + 1, (epoch, step)
        message = (
            f"no checkpoint of epoch {epoch}, step {step} in {self.folder}: "
            f"{problem or 'see rank 0'}. Earlier checkpoints are unchanged"
        )
        if last or self.failed > self.allowed:
            limit = f"Stopped, as run.max_failed_saves = {self.allowed}"
            raise NotSavedError(
                f"{message}. {'It was the last' if last else limit}: free disk space, then resume "
                "with run.resume_ckpt_path=auto"
            )
        left = self.allowed - self.failed
        logging.error("%s; training continues, %d more failures in a row allowed", message, left)
        return False

    def retry_unsaved(self) -> None:
        """Before the run ends, save again what could not be saved.

        Raises:
            NotSavedError: if it fails again.
        """
        if self.unsaved is not None:
            self.save(*self.unsaved, last=True)

    def write_optional(self, name: str, write: Callable[[BinaryIO], None]) -> None:
        """Write a file that no run needs to resume; a failure is only logged."""
        if not is_main_process():
            return
        path = self.folder / name
        try:
            with atomic_write(path) as file:
                write(file)
        except OSError as error:
            logging.error("%s cannot be written: %s", path, error)

    def begin(self, resume_from: str | None) -> None:
        """Resume from a checkpoint or start a new run; all ranks must call it.

        Raises:
            FileNotFoundError, ValueError: see `resume`.
        """
        log, progress = self.state.log, self.state.progress
        if is_main_process():
            remove_partial_files(self.folder, ckpt.EVERY)  # of a run killed while it was saving
        if resume_from:
            self.resume(resume_from)
        else:
            log.rewind({})  # logs of a run in this folder that ended before its first checkpoint
        # No rank may append to a log that rank 0 is still cutting.
        barrier()
        log.begin(self.state.config)
        if resume_from:
            file = os.path.abspath(resume_from)
            log.write("resume", file=file, epoch=progress.epoch, step=progress.step)
            last = self.folder / ckpt.LAST
            if from_main_process(lambda: Path(resume_from).resolve() != last.resolve()):
                # A restart of this run resumes from the folder's last checkpoint: without this
                # one it would resume from a later state that the user chose to go back from.
                self.save(progress.epoch, progress.step)

    def resume(self, path: str) -> None:
        """Load a checkpoint; in its own folder, also cut the logs back to its step.

        Raises:
            FileNotFoundError, ValueError: if it does not fit this run.
        """
        state, progress = self.state, self.state.progress
        content = read_checkpoint(path)
        state.from_plain(content, path)
        logs = [rank["logs"] for rank in content["run"]["ranks"]]
        if from_main_process(lambda: Path(path).parent.resolve() != self.folder.resolve()):
            self._copy_best_from(Path(path).parent)
            state.log.rewind({})
        else:
            sizes = {name: size for own in logs for name, size in own.items()}
            state.log.rewind(sizes, progress.global_step)
        logging.info("resumed %s at epoch %d, step %d", path, progress.epoch, progress.step)

    def _copy_best_from(self, folder: Path) -> None:
        """Copy the best checkpoint of the folder that the run resumes from."""
        progress, best = self.state.progress, folder / ckpt.BEST
        if progress.best.value is None:
            return
        if not from_main_process(best.is_file):
            logging.warning("%s does not exist: the best figure so far is forgotten", best)
            progress.best = BestFigure()
        elif is_main_process():
            with open(best, "rb") as source, atomic_write(self.folder / ckpt.BEST) as file:
                shutil.copyfileobj(source, file)
