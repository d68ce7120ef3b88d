"""Plugins: users' own code that registers pickers, losses, models, data sets and the like.

A plugin is a Python file or an importable module. It is imported before a config is checked, so
that its keys are known.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path


class PluginError(ValueError):
    """There is no such plugin."""


def load_plugins(names: Iterable[str]) -> None:
    """Import plugins, each once in a process.

    An error inside a plugin is not caught: its traceback names the line.

    Args:
        names: Python files (``my_losses.py``) or modules (``my_package.losses``).

    Raises:
        PluginError: if there is no such file or module.
    """
    for name in names:
        if _is_file(name):
            _import_file(Path(name).expanduser())
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not error.name or not f"{name}.".startswith(f"{error.name}."):
                raise  # a module that the plugin imports
            raise PluginError(
                f"no module named {name!r}; install its package, add its folder to PYTHONPATH, or "
                "give the path of a Python file"
            ) from error


def is_imported(name: str) -> bool:
    """Return whether a plugin has been imported in this process, by its name or path."""
    return (_module_of(Path(name).expanduser()) if _is_file(name) else name) in sys.modules


def _is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name or os.sep in name


def _module_of(path: Path) -> str:
    # The same name in every process that loads the file: what the module defines can be pickled.
    suffix = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    return f"lavis_mafa_plugin_{path.stem}_{suffix}"


def _import_file(path: Path) -> None:
    if not path.is_file() or path.suffix != ".py":
        raise PluginError(
            f"no such Python file: {str(path)!r} (relative paths start at {os.getcwd()}); give the "
            "path of a file that ends in .py, or the name of a module"
        )
    path = path.resolve()
    name = _module_of(path)
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up
    folder = str(path.parent)
    sys.path.insert(0, folder)  # its neighbours can be imported, as from a script
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
