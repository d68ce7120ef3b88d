"""Run codes, each in a fork of this process; imports nothing that a test may look for."""

from __future__ import annotations

import os
import sys
import traceback


def failures(codes, given=None):
    """Return those of the codes that raise; each begins with the names of ``given``."""
    return [code for code in codes if _fails(code, {"__name__": "__main__", **(given or {})})]


def _fails(code, names):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    try:
        exec(code, names)
    except BaseException:
        print("in a fork:", code, file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
