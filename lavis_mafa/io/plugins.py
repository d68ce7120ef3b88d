"""Plugins: users' own code that registers pickers, losses, models, data sets and the like.

A plugin is a Python file, an importable module, or an installed package with an entry point in the
group ``lavis_mafa.plugins``. It is imported before a config is checked, so that its keys are known.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

GROUP = "lavis_mafa.plugins"
# Installed plugins that have been imported, or that failed with a warning.
_installed: set[EntryPoint] = set()


class PluginError(ValueError):
    """A plugin cannot be imported."""


def load_plugins(names: Iterable[str] = ()) -> None:
    """Import the installed plugins and those that are named, each once in a process.

    An installed plugin that fails is skipped with a warning, for its package may serve others.

    Args:
        names: Python files (``my_losses.py``) or modules (``my_package.losses``).

    Raises:
        PluginError: if a named plugin does not exist or raises on import.
    """
    for point in entry_points(group=GROUP):
        if point not in _installed:
            _installed.add(point)
            try:
                point.load()
            except Exception as error:
                logging.warning(
                    "the installed plugin %s (%s) cannot be imported and is skipped: %s",
                    point.name,
                    point.value,
                    _cause(error),
                )
    for name in names:
        _load_plugin(name)


def is_imported(name: str) -> bool:
    """Return whether a plugin has been imported in this process, by its name or path."""
    return (_module_of(Path(name).expanduser()) if _is_file(name) else name) in sys.modules


def _is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name or os.sep in name


def _module_of(path: Path) -> str:
    # The same name in every process that loads the file: what the module defines can be pickled.
    suffix = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    return f"lavis_mafa_plugin_{path.stem}_{suffix}"


def _load_plugin(name: str) -> ModuleType:
    """Import one plugin and return its module; see `load_plugins`."""
    is_file = _is_file(name)
    try:
        if is_file:
            return _import_file(Path(name).expanduser())
        return importlib.import_module(name)
    except PluginError:
        raise
    except ModuleNotFoundError as error:
        if is_file or not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise PluginError(f"importing {name} failed: {_cause(error)}") from error
        raise PluginError(
            f"no module named {name!r}; install its package, add its folder to PYTHONPATH, or give "
            "the path of a Python file"
        ) from error
    except Exception as error:
        raise PluginError(f"importing {name} failed: {_cause(error)}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PluginError(
            f"no such file: {str(path)!r} (relative paths start at {os.getcwd()}); give the path "
            "of a Python file, or the name of a module"
        )
    path = path.resolve()
    name = _module_of(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path} is no Python file; expected a name that ends in .py")
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
    return module


def _cause(error: BaseException) -> str:
    """Return an exception's type, message and line in the code that raised it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text  # names file and line itself
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if "importlib" not in one.filename and one.filename != __file__]
    return f"{text} ({own[-1].filename}, line {own[-1].lineno})" if own else text
