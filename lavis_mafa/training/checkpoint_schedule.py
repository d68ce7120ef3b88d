"""Save a run's state, cope with a failure to save it, and resume from it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from lavis.common.dist_utils import is_main_process

from lavis_mafa.checkpoints.checkpoints import read_checkpoint
from lavis_mafa.io.files import remove_partial_files
from lavis_mafa.io.processes import any_rank, barrier, from_main_process
from lavis_mafa.training import checkpoint as ckpt
from lavis_mafa.training.state import BestFigure, RunState

_LAST_TRIES = 5  # of a checkpoint that no later one follows
_RETRY_SECONDS = 1.0
_DISCARDED = "discarded_best.pth"  # in a run's folder


class NotSavedError(RuntimeError):
    """A checkpoint cannot be written."""


class CheckpointSchedule:
    """Saves and resumes the checkpoints of a run.

    Args:
        state: of the run.
        folder: of the run, where checkpoints are.
        allowed: failures in a row to save a checkpoint before the run stops
            (``run.max_failed_saves``).

    Attributes:
        failed: number of failures since a checkpoint was last saved.
        unsaved: epoch and step of the last failure, None if the last checkpoint was saved.
    """

    def __init__(self, state: RunState, folder: Path, allowed: int) -> None:
        self.state, self.folder, self.allowed = state, folder, allowed
        self.failed = 0
        self.unsaved: tuple[int, int] | None = None

    def save(self, epoch: int, step: int, *names: str, last: bool = False) -> bool:
        """Save the whole state under each name; a run that resumes starts at ``step`` of ``epoch``.

        All ranks must call it. If it fails, the files of earlier checkpoints stay as they are.

        Args:
            names: `LAST` by default.
            last: whether no later checkpoint follows that could make up for a failure.

        Returns:
            Whether it was saved.

        Raises:
            NotSavedError: if not, and either this was the last, and trying again has failed too, or
                more than ``allowed`` in a row have failed.
        """
        for left in range(_LAST_TRIES - 1, -1, -1):
            problem = self._write(epoch, step, names or (ckpt.LAST,))
            # Only rank 0 writes, but all ranks go on or stop together.
            if not any(any_rank([problem is not None], self.state.device)):
                self.failed, self.unsaved = 0, None
                return True
            self.failed, self.unsaved = self.failed + 1, (epoch, step)
            message = (
                f"no checkpoint of epoch {epoch}, step {step} in {self.folder}: "
                f"{problem or 'see rank 0'}. Earlier checkpoints are unchanged"
            )
            if self.failed > self.allowed or (last and not left):
                limit = f"Stopped, as run.max_failed_saves = {self.allowed}"
                raise NotSavedError(
                    f"{message}. {'It was the last' if last else limit}: free disk space, then "
                    "resume with run.resume_ckpt_path=auto"
                )
            logging.error(
                "%s; %s, %d more failures in a row allowed",
                message,
                "trying again" if last else "training continues",
                self.allowed - self.failed,
            )
            if not last:
                break
            time.sleep(_RETRY_SECONDS)
        return False

    def _write(self, epoch: int, step: int, names: Sequence[str]) -> str | None:
        """Write the files of a checkpoint on rank 0; return why it failed, None if it did not."""
        try:
            content = self.state.to_plain(epoch, step)
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        if content is None:
            return None
        try:
            for name in names:
                ckpt.save_atomically(content, self.folder / name)
                self.state.log.write("checkpoint", file=name, epoch=epoch, step=step)
        # PyTorch's zip writer raises RuntimeError where a file would raise OSError.
        except (OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def retry_unsaved(self) -> None:
        """Save again what could not be saved; call it before other weights are loaded.

        Raises:
            NotSavedError: if it fails again.
        """
        if self.unsaved is not None:
            self.save(*self.unsaved, last=True)

    def begin(self, resume_from: str | None) -> None:
        """Resume from a checkpoint or start a new run; all ranks must call it.

        Raises:
            FileNotFoundError, ValueError: if the checkpoint does not fit this run.
        """
        log, progress = self.state.log, self.state.progress
        if is_main_process():
            remove_partial_files(self.folder, ckpt.EVERY)  # of a run killed while it was saving
        if resume_from:
            self._resume(resume_from)
        else:
            log.rewind({})  # logs of a run in this folder that ended before its first checkpoint
        self._settle_best()
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

    def _resume(self, path: str) -> None:
        """Load a checkpoint; in its own folder, also cut the logs back to its step.

        Raises:
            FileNotFoundError, ValueError: if it does not fit this run.
        """
        state, progress = self.state, self.state.progress
        content = read_checkpoint(path)
        state.from_plain(content, path)
        logs = [rank["logs"] for rank in content["run"]["ranks"]]
        if from_main_process(lambda: Path(path).parent.resolve() != self.folder.resolve()):
            state.log.rewind({})
        else:
            sizes = {name: size for own in logs for name, size in own.items()}
            state.log.rewind(sizes, progress.global_step)
        logging.info("resumed %s at epoch %d, step %d", path, progress.epoch, progress.step)

    def _settle_best(self) -> None:
        """Keep `BEST` in the run's folder if it holds the weights of the best figure so far.

        Otherwise it is of epochs that are discarded by starting anew or resuming an earlier
        checkpoint, and is renamed; and the best figure, whose weights are elsewhere, is forgotten.
        """
        progress, own = self.state.progress, self.folder / ckpt.BEST
        if from_main_process(lambda: own.exists() and _best_in(own) == progress.best):
            return
        if is_main_process() and own.exists():
            own.replace(self.folder / _DISCARDED)
            logging.warning("%s is of discarded epochs: renamed to %s", own, _DISCARDED)
        if progress.best.value is not None:
            logging.warning(
                "the best weights so far (epoch %s, agg_metrics %s) are not in %s: the best figure "
                "is forgotten, validation chooses among later epochs",
                progress.best.epoch,
                progress.best.value,
                self.folder,
            )
        progress.best = BestFigure()


def _best_in(path: Path) -> BestFigure | None:
    """Return the best figure whose weights a checkpoint holds; None if it holds none."""
    try:
        run = read_checkpoint(str(path), mapped=True)["run"]
        best = BestFigure(**run["best"])
        holds = best.epoch is not None and (run["epoch"], run["step"]) == (best.epoch + 1, 0)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logging.error("%s cannot be used as best checkpoint: %s", path, error)
        return None
    return best if holds else None
