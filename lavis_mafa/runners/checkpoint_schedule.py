"""When a run's state is saved, what happens if it cannot be, and how a run goes on from it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from lavis.common.dist_utils import is_main_process

from lavis_mafa.io.checkpoints import read_checkpoint
from lavis_mafa.io.files import atomic_write, remove_partial_files
from lavis_mafa.io.processes import any_rank, barrier
from lavis_mafa.runners import checkpoint as ckpt


class NotSavedError(RuntimeError):
    """A checkpoint cannot be written."""


class CheckpointSchedule:
    """Checkpoints of a runner.

    Attributes:
        failed: how many could not be written, one after the other.
        unsaved: epoch and step of the last of these, None if there is none.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.failed = 0
        self.unsaved: tuple[int, int] | None = None

    def save(self, epoch: int, step: int, *names: str, last: bool = False) -> bool:
        """Save the whole state under each name; training goes on at ``step`` of ``epoch``.

        All ranks must call it. What was saved before stays if this fails.

        Args:
            last: there will be no later one that could make up for it.

        Returns:
            Whether it was saved.

        Raises:
            NotSavedError: if not, and ``run.max_failed_saves`` of them in a row are used up.
        """
        runner = self.runner
        if runner.kept is not None:
            runner.kept.flush()
        content, problem = ckpt.content_of(runner, epoch, step), None
        if content is not None:
            try:
                for name in names or (ckpt.LAST,):
                    ckpt.save_atomically(content, runner.output_dir / name)
                    runner.log.write("checkpoint", file=name, epoch=epoch, step=step)
            # PyTorch's writer makes a RuntimeError of what the disk says.
            except (OSError, RuntimeError) as error:
                problem = f"{type(error).__name__}: {error}"
        if not any(any_rank([problem is not None], runner.device)):
            self.failed, self.unsaved = 0, None
            return True
        self.failed, self.unsaved = self.failed + 1, (epoch, step)
        allowed = int(runner.run_cfg.max_failed_saves)
        told = (
            f"no checkpoint of epoch {epoch}, step {step} in {runner.output_dir}: "
            f"{problem or 'see rank 0'}. What was saved before is as it was"
        )
        if last or self.failed > allowed:
            why = "It was the last" if last else f"Stopped, as run.max_failed_saves = {allowed}"
            raise NotSavedError(
                f"{told}. {why}: make room, then go on with run.resume_ckpt_path=auto"
            )
        left = allowed - self.failed
        logging.error("%s; training goes on, %d more such failures in a row may be", told, left)
        return False

    def save_what_failed(self) -> None:
        """Before the end, try once more what could not be saved.

        Raises:
            NotSavedError: if it fails again.
        """
        if self.unsaved is not None:
            self.save(*self.unsaved, last=True)

    def write(self, name: str, write: Callable[[BinaryIO], None]) -> None:
        """Write a file of the run that no one needs to go on; an error in the log if it fails."""
        if not is_main_process():
            return
        path = self.runner.output_dir / name
        try:
            with atomic_write(path) as file:
                write(file)
        except OSError as error:
            logging.error("%s cannot be written: %s", path, error)

    def begin(self) -> None:
        """Go on from the checkpoint that the config names, or begin anew; all ranks must call it.

        Raises:
            FileNotFoundError, ValueError: see `resume`.
        """
        runner = self.runner
        if is_main_process():
            remove_partial_files(runner.output_dir, ckpt.EVERY)
        path = runner.resume_ckpt_path
        if path:
            self.resume(str(path))
        else:
            runner.log.rewind({})  # of a run that did not come as far as a checkpoint
        barrier()
        runner.log.write("config", config=runner.config.to_dict())
        if path:
            told = os.path.abspath(str(path))
            runner.log.write("resume", file=told, epoch=runner.start_epoch, step=runner.start_step)
            if Path(path).resolve() != (runner.output_dir / ckpt.LAST).resolve():
                # Whoever starts this run again takes the folder's last checkpoint.
                self.save(runner.start_epoch, runner.start_step)

    def resume(self, path: str) -> None:
        """Go on from a checkpoint; in its own folder, the logs go on from there as well.

        Raises:
            FileNotFoundError, ValueError: if it does not fit this run.
        """
        runner = self.runner
        content = read_checkpoint(path)
        ckpt.restore(runner, content, path)
        logs = [rank.get("logs") for rank in content["run"]["ranks"]]
        if Path(path).parent.resolve() != runner.output_dir.resolve():
            self._take_best_from(Path(path).parent)
            runner.log.rewind({})
        elif None not in logs:  # format 1 does not tell
            sizes = {name: size for own in logs for name, size in own.items()}
            runner.log.rewind(sizes, runner.global_step)
        logging.info("resumed %s at epoch %d, step %d", path, runner.start_epoch, runner.start_step)

    def _take_best_from(self, folder: Path) -> None:
        """Take the best weights along if the run goes on in another folder."""
        runner, best = self.runner, folder / ckpt.BEST
        if runner.best["value"] is None:
            return
        if not best.is_file():
            logging.warning("%s is not there: the best figure begins anew", best)
            runner.best = {"value": None, "epoch": None, "split": None}
        elif is_main_process():
            with open(best, "rb") as source, atomic_write(runner.output_dir / ckpt.BEST) as file:
                shutil.copyfileobj(source, file)
