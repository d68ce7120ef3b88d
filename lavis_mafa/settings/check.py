"""Check a config against its keys, fill in the defaults, and collect every problem."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from lavis.common.utils import is_url

from lavis_mafa.algorithm.options import Option
from lavis_mafa.checkpoints.downloads import is_timm_name
from lavis_mafa.io.problems import Problem, Registered
from lavis_mafa.io.project_files import find_config
from lavis_mafa.settings.key import UNSET, Key, known_keys

Keys = Mapping[str, Key]
_LARGEST = {"int": 2**63 - 1, "float": 3e38, "number": 3e38}  # of int64 and float32 tensors
_TYPES: dict[str, type] = {"bool": bool, "list": list, "mapping": Mapping}


def suggest(word: str, names: Collection[str]) -> str:
    """Suggest the name most similar to ``word``; list all names if none is similar enough."""
    if not names:
        return "none is known"
    near = get_close_matches(word.replace("-", "_"), sorted(names), n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(names))}"


class Report:
    """Collect the problems and notes found in a config.

    Args:
        keys: all keys of this config; suggestions for misspelt keys are taken from them.
        active: conditions under which keys are required, see `Option.needed`, and names of the
            run's task, most specific first, see `Option.by_task`.
        machine: also check files and devices of this machine.

    Attributes:
        problems: lines ``key: what is wrong and how to fix it``.
        notes: warnings about a config that works nevertheless.
        bad: keys with a problem already reported, which later checks skip.
    """

    def __init__(
        self, keys: Keys, active: Collection[str] = ("always",), machine: bool = True
    ) -> None:
        self.keys, self.active, self.machine = keys, active, machine
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.bad: set[str] = set()
        self._suggested: set[str] = set()

    def add(self, path: str, message: str) -> None:
        self.problems.append(f"{path}: {message}")
        self.bad |= {path, path.partition("[")[0]}

    def take(self, problems: Iterable[Sequence[Any]]) -> None:
        """Add the problems that a check of several keys yields, see `Problem`."""
        for one in problems:
            problem = Problem(*one)
            if problem.is_note:
                self.notes.append(f"{problem.key}: {problem.message}")
            elif not problem.is_missing:
                self.add(problem.key, problem.message)
            elif problem.key not in self.bad | self._suggested:  # not given and misspelt
                self.add(problem.key, f"missing; {problem.message}")

    def unknown(self, path: str) -> None:
        """Report an unknown key, with the key it may be a misspelling of."""
        near = self._nearest(path)
        self._suggested.add(near)
        cure = f"did you mean {near}?" if near else "nothing reads it here: remove it"
        self.add(path, f"unknown key; {cure}")

    def _nearest(self, path: str) -> str:
        """Return the known key that ``path`` may be a misspelling of; "" if there is none.

        That is a similar name of the same section, or the same name, or another common name of the
        setting, elsewhere.
        """
        above, _, leaf = path.rpartition(".")
        parts = {one: (*one.rpartition("."), key) for one, key in known_keys(self.keys)}
        siblings = {name: one for one, (section, _, name, _) in parts.items() if section == above}
        swapped = [one for one in siblings if sorted(one) == sorted(leaf)]
        near = [siblings[one] for one in swapped or get_close_matches(leaf, siblings, n=1)]
        called = [
            one for one, (*_, name, key) in parts.items() if name == leaf or leaf in key.option.also
        ]
        below = [one for one in called if one.startswith(f"{above}.")]
        if "build_info" in path:  # a data set has keys of its own, which others have by chance
            return next(iter(below + near), "")
        of_part = [one for one in called if one.split(".")[0] == path.split(".")[0]]
        return next(iter(below + of_part + near + called), "")

    def checked(self, path: str, key: Key, value: Any) -> Any:
        """Return a value, with numeric strings read as numbers; report it if it is wrong."""
        if value is None and key.nullable:
            return None
        kind = key.kind
        if kind in ("list", "strs") and isinstance(value, list):
            return [self.checked(f"{path}[{i}]", key.items, one) for i, one in enumerate(value)]
        if kind == "mapping" and isinstance(value, Mapping) and key.keys is None:
            return {
                name: self.checked(f"{path}.{name}", key.items, one) for name, one in value.items()
            }
        value = _number(kind, value)
        problem = _problem(key, value) or self._problem_of_path(key.option, value)
        if problem:
            self.add(path, problem)
        elif kind == "float":
            return float(value)
        elif key.option.path and self.machine and os.path.exists(value):
            return os.path.abspath(value)  # checkpoints record it, and may be loaded elsewhere
        return value

    def _problem_of_path(self, option: Option, value: Any) -> str:
        if not option.path or value in option.words:
            return ""
        if self.machine and not _exists(value, option.path):
            return f"no such {option.path}: {value!r}"
        if option.path == ".npy file" and not value.endswith(".npy"):
            return f"{value!r} is not an index file; expected a path that ends in .npy"
        return ""


def _number(kind: str, value: Any) -> Any:
    """Return the number that a text such as 1e-4 means, and the whole number that 2e3 is."""
    if kind not in _LARGEST:
        return value
    try:
        value = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    is_whole = kind == "int" and isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else value


def _problem(key: Key, value: Any) -> str:
    """Return what was given and what is expected, if a value is not permitted."""
    kind, option, expected = key.kind, key.option, key.describe()
    if kind == "any" or (kind in ("str", "strs") and value in option.words):
        return ""
    if value is None or (isinstance(value, str) and not value.strip()):
        return f"is empty; expected {expected}"
    if value == "???":
        return f"is marked as missing (???); expected {expected}"
    if kind in _LARGEST:
        wanted: Any = int if kind == "int" else (int, float)
        is_number = isinstance(value, wanted) and not isinstance(value, bool)
        if not is_number or (isinstance(value, float) and not math.isfinite(value)):
            return f"{value!r} is not {expected}"
        if abs(value) > _LARGEST[kind] or not option.allows(value):
            return f"{value!r} is out of range; expected {expected}"
    elif not isinstance(value, _TYPES.get(kind, str)):
        hints = {"list": f", such as [{value}]", "bool": ", written without quotes"}
        return f"{value!r} is not {expected}{hints.get(kind, '') if isinstance(value, str) else ''}"
    elif isinstance(option.choices, Registered) and value not in option.choices:
        table = option.choices.table.replace("_", " ")
        return f"no {table} {value!r} is registered; {suggest(str(value), option.choices)}"
    elif option.choices and value not in option.choices:
        return f"{value!r} is not {expected}; {suggest(str(value), option.choices)}"
    return ""


def _exists(value: str, path: str) -> bool:
    """Return whether there is what a path names; see `Option.path`."""
    if path in ("library file", "path or name"):
        try:
            return bool(find_config(value))
        except OSError:
            pass
    found = os.path.exists if "folder" in path or path == "path or name" else os.path.isfile
    if found(value) or ("URL" in path and is_url(value)):
        return True
    if "timm" in path:
        return is_timm_name(value)
    # A name on the hub has at most one slash; .txt and .json are vocabulary files.
    is_name = value.count("/") < 2 and not value.startswith((".", "/", "~"))
    return path == "path or name" and is_name and not value.endswith((".txt", ".json"))


def filled(
    given: Mapping[str, Any],
    keys: Keys,
    report: Report,
    path: str = "",
    shipped: Any = None,
    is_open: bool = False,
) -> dict[str, Any]:
    """Return a section with all defaults: the given keys in their order, then the others.

    Every problem goes into the report. A wrong value is returned as given, an unknown key is left
    out.

    Args:
        path: of the section, with a dot at its end.
        shipped: values of default YAMLs, which are not checked.
        is_open: any further keys are taken.
    """
    found: dict[str, Any] = {}
    shipped = shipped if isinstance(shipped, Mapping) else {}
    for name, value in given.items():
        key, where, below = keys.get(name), f"{path}{name}", shipped.get(name, UNSET)
        if key is None and not is_open:
            report.unknown(where)
        elif key is not None and key.keys is not None and isinstance(value, Mapping):
            found[name] = filled(value, key.keys, report, f"{where}.", below, key.is_open)
        elif key is None or (type(value) is type(below) and value == below):
            found[name] = copy.deepcopy(value)
        else:
            found[name] = report.checked(where, key, value)
    for name, key in keys.items():
        if name in given:
            continue
        option = key.option
        needed = ("always",) if option.needed is True else option.needed or ()
        if set(report.active).intersection(needed):
            text = f"expected {key.describe()} ({option.doc})"
            report.take([Problem(f"{path}{name}", text, is_missing=True)])
        by_task = [option.by_task[one] for one in report.active if one in option.by_task]
        default = by_task[0] if by_task else key.default
        if key.keys is not None and isinstance(default, dict):
            found[name] = filled({}, key.keys, report, f"{path}{name}.")
        elif default is not UNSET:
            found[name] = copy.deepcopy(default)
    return found


def listed(value: Any) -> list[Any]:
    """Return ``value`` as a list; None gives an empty list."""
    return value if isinstance(value, list) else [] if value is None else [value]
