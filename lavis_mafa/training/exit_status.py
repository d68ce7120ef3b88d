"""The exit status of a command, and what it logs of the errors that a user can cause."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError

import torch.distributed as dist

from lavis_mafa.io.launcher import rank_in_environment, report_to_launcher
from lavis_mafa.io.processes import MainProcessError, explain_lost_rank, explain_lost_worker
from lavis_mafa.training.termination import REQUEUE, Terminated, ignore_signals

INTERRUPTED = 128 + signal.SIGINT  # the exit status that a shell reports after Ctrl-C
_FIRST_RANK_SECONDS = 20.0


def exit_status(action: Callable[[], int | None]) -> int:
    """Run an action and return the exit status of the process, logging a user's errors.

    The status is the action's (None: 0), 2 for a wrong config, 1 for other errors a user can cause,
    `REQUEUE` (75) after a termination signal, and 130 after Ctrl-C where nothing could be saved.
    One of several ranks does not return: its process exits here.
    """
    try:
        with explain_lost_rank(), explain_lost_worker():
            status = action() or 0
    except Terminated as termination:
        ignore_signals()
        logging.warning("%s", termination)
        report_to_launcher(str(termination))
        status = REQUEUE
    except KeyboardInterrupt:
        ignore_signals()
        logging.warning("interrupted; nothing more is saved")
        status = INTERRUPTED
    except MainProcessError as error:
        status = error.exit_status
        _wait_for_first_rank()
    except UnpicklingError as error:  # of LAVIS's own loading
        # Without torch's advice to switch off `weights_only`, which would run the file's code.
        code = re.search(r"GLOBAL (\S+)", str(error))
        logging.error(
            "a checkpoint holds %s: only tensors and plain values are loaded. If you trust its "
            "origin, load it elsewhere and save only its state dict, as {'model': state_dict}",
            f"{code[1]}, which is code" if code else "objects that cannot be loaded safely",
        )
        status = 1
    except Exception as error:
        if not (_is_ours(error) or isinstance(error, FileNotFoundError | ValueError)):
            raise
        clear, status = _is_clear(error), getattr(error, "exit_status", 1)
        if hasattr(error, "exit_status"):  # every rank has it: it is about the config
            _wait_for_first_rank()
        if clear:
            report_to_launcher(str(error))
        logging.error("%s", error, exc_info=not clear)
    if not dist.is_initialized():
        return status
    several = dist.get_world_size() > 1
    if not (several and status):
        # After an error, other ranks may wait in a collective that this rank will never join.
        # Destroying the group would wait for them; exiting lets the launcher stop them.
        dist.destroy_process_group()
    if several:
        # Skip the interpreter's shutdown: a leftover thread of the process group sometimes aborts
        # it, and the launcher would then report a finished run as failed.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _wait_for_first_rank() -> None:
    """Give rank 0 the time to report an error that all ranks have.

    The launcher ends all ranks as soon as one has ended. A rank that is still alive afterwards has
    an error of its own.
    """
    if rank_in_environment():
        time.sleep(_FIRST_RANK_SECONDS)


def _is_ours(error: Exception) -> bool:
    return type(error).__module__.startswith("lavis_mafa.")


def _is_clear(error: Exception) -> bool:
    """Return whether an error needs no traceback: its message is ours, or it was raised here."""
    if _is_ours(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])
