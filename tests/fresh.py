"""Python in a process of its own, without what the tests have imported."""

from __future__ import annotations

import os
import subprocess
import sys

from conftest import ROOT


def fresh_python(*arguments, folder=None):
    """Run Python with arguments, which must succeed; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
