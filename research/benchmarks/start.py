"""Compare the start of this package's program with LAVIS's import.

Both sides are new processes, and seconds are those that they had a core: other programs on the
machine, and files that the first of them reads from the disk, would count otherwise.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from research.benchmarks.harness import Row, Sizes, Timed, in_turn

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "albef_toy"
FIRST_STEP = "the first training step begins"
# The reference: LAVIS as it is, but for names that newer versions of transformers lack.
LAVIS = """
from lavis_mafa import registration
from lavis_mafa.compat.names import lent_names
registration._finder.remove()
with lent_names():
    import lavis.models
"""
# Without the end of the process, which clears all modules in a second or two.
END = "\nimport os\nos._exit(0)"
# A plugin, since those are imported when all else of the command has been.
STOP_AT_FIRST_STEP = f"""
import os
from lavis_mafa.runners.runner_mafa import RunnerMafa

def stop(*_):
    print({FIRST_STEP!r}, flush=True)
    os._exit(0)

RunnerMafa._train_step = stop
"""


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure the start of a training, and the help of a command."""
    with tempfile.TemporaryDirectory() as folder:
        sides = actions(Path(folder))
        times = in_turn(sides, sizes.repeats, 0 if sizes.quick else 1, timer=child_seconds)
    lavis = times["import of LAVIS"]
    name = "start to the first training step"
    note = f"{CONFIG}; CPU seconds of a new process until the step; LAVIS: import lavis.models"
    yield Timed.of(times[name], lavis).row(f"{name} / import of LAVIS", "<= 1.3", note)
    note = "CPU seconds of a new process; what LAVIS's models cannot do without"
    yield Timed.of(times["import of torch and transformers"], lavis).row(
        "import of torch and transformers.modeling_utils / import of LAVIS", note=note
    )
    note = "lavis-mafa train --help; CPU seconds of a new process"
    yield Timed.of(times["help"], lavis).row("--help / import of LAVIS", note=note)


def actions(folder: Path) -> dict[str, Callable[[], None]]:
    """Return what to time, by name; ``folder`` is for the files of the training."""
    plugin = folder / "stop_at_first_step.py"
    plugin.write_text(STOP_AT_FIRST_STEP, encoding="utf-8")
    program, config = ("-m", "lavis_mafa"), ("--cfg-path", CONFIG)
    options = ("--plugin", str(plugin), "--options", f"run.output_dir={folder / 'run'}")
    return {
        "import of LAVIS": lambda: python("-c", LAVIS + END),
        "start to the first training step": lambda: python(
            *program, "train", *config, *options, expected=FIRST_STEP
        ),
        "import of torch and transformers": lambda: python(
            "-c", "import torch, transformers.modeling_utils" + END
        ),
        "help": lambda: python(*program, "train", "--help", expected="--dry-run"),
    }


def python(*arguments: str, expected: str = "") -> None:
    """Run Python in a new process.

    Raises:
        RuntimeError: if it fails, or does not print what is expected.
    """
    process = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    if process.returncode or expected not in process.stdout:
        raise RuntimeError(f"{' '.join(arguments[:3])} failed: {process.stderr[-1000:]}")


def child_seconds() -> float:
    """Return the seconds, user and system, that ended child processes have had a core."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
