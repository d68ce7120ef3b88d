"""Check a config against its keys, fill in the defaults, and collect every problem."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from lavis_mafa.io.problems import Problem, Registered
from lavis_mafa.settings.key import UNSET, Key, known_keys

Keys = Mapping[str, Key]
# What is missing, of kinds of paths whose name does not say it.
_MISSING = {
    "path or name": "path",
    "checkpoint": "file, folder or URL",
    "checkpoint or timm name": "file, folder, URL or timm/NAME",
}
_OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


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
        self.bad.add(path)

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
        cure = f"did you mean {near}?" if near else "remove it (docs/config.md lists all keys)"
        self.add(path, f"unknown key; {cure}")

    def _nearest(self, path: str) -> str:
        """Return the known key that ``path`` may be a misspelling of; "" if there is none.

        That is a similar name of the same section, or the same name, or another common name of the
        setting, elsewhere.
        """
        above, _, leaf = path.rpartition(".")
        known = dict(known_keys(self.keys))
        called = [
            one
            for one, key in known.items()
            if one.rpartition(".")[2] == leaf or leaf in key.option.also
        ]
        siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == above}
        swapped = [one for one in siblings if sorted(one) == sorted(leaf)]
        near = [siblings[one] for one in swapped or get_close_matches(leaf, siblings, n=1)]
        below = [one for one in called if one.startswith(f"{above}.")]
        of_part = [one for one in called if one.split(".")[0] == path.split(".")[0]]
        # A data set's `build_info` has keys of its own, which others have by chance.
        elsewhere = [] if "build_info" in path else of_part + near + called
        return next(iter(below + elsewhere + near), "")

    def checked(self, path: str, key: Key, value: Any) -> Any:
        """Return a value, with numeric strings read as numbers; report it if it is wrong."""
        try:
            return key.adapter.validate_python(value, context=self)
        except ValidationError as error:
            for one in error.errors(include_url=False):
                where = one["loc"] if key.kind in ("list", "mapping") else ()
                place, found = path, value
                for name in where:
                    if not isinstance(found, list | dict):
                        break
                    place += f"[{name}]" if isinstance(name, int) else f".{name}"
                    found = value_at(found, [name])
                self.add(place, _message(one["type"], found, key, bool(where)))
                if key.kind == "strs":  # one error for each type of the union
                    break
        return value


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


def key_at(keys: Keys, where: Sequence[str]) -> Key | None:
    """Return the key at a path; None if it is unknown, or inside a value."""
    found = None
    for name in where:
        found = keys.get(name)
        keys = (found.keys if found else None) or {}
    return found


def value_at(config: Any, where: Sequence[Any]) -> Any:
    """Return a value of a config; `UNSET` if there is none."""
    for name in where:
        try:
            config = config[name]
        except (LookupError, TypeError):
            return UNSET
    return config


def listed(value: Any) -> list[Any]:
    """Return ``value`` as a list; None gives an empty list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _message(error: str, value: Any, key: Key, item: bool) -> str:
    """Return what was given and what is expected, for pydantic's type of an error."""
    expected, option = key.describe(item), key.option
    if value is None or (isinstance(value, str) and not value.strip()):
        return f"is empty; expected {expected}"
    if value == "???":
        return f"is marked as missing (???); expected {expected}"
    if error in _OUT_OF_RANGE:
        return f"{value!r} is out of range; expected {expected}"
    if error == "path":
        return f"no such {_MISSING.get(option.path, option.path)}: {value!r}"
    if error == "npy":
        return f"{value!r} is not an index file; expected a path that ends in .npy"
    if error == "choice" and isinstance(option.choices, Registered):
        kind = option.choices.table.replace("_", " ")
        return f"no {kind} {value!r} is registered; {suggest(value, option.choices)}"
    if error == "choice":
        return f"{value!r} is not {expected}; {suggest(value, option.choices)}"
    hints = {"list": f", such as [{value}]", "bool": ", written without quotes"}
    hint = hints.get(key.kind, "") if isinstance(value, str) and not item else ""
    return f"{value!r} is not {expected}{hint}"
