"""Parse a command of a page or a notebook by its own parser, whatever files there are here."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
from pathlib import Path

import pytest

from lavis_mafa.commands import arguments


def refusal(commands, name, words):
    """Return why the parser of a command refuses words; "" if it accepts them."""
    parser = argparse.ArgumentParser(prog=name)
    importlib.import_module(commands[name][0]).add_arguments(parser)
    parser.add_argument("--plugin", action="append")
    error, exists = io.StringIO(), Path.exists
    with contextlib.redirect_stderr(error), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: not path.is_absolute() or exists(path))
        for check in ("is_run", "config_named"):
            patch.setattr(arguments, check, lambda name: name)
        try:
            parser.parse_args(words)
        except SystemExit as stop:
            return error.getvalue() if stop.code else ""
    return ""
