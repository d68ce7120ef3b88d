"""Keys of a config, read from settings classes, and the check of a config against them.

A settings class is a dataclass whose fields are made by `lavis_mafa.algorithm.options.option`: the
field has the type, default, range and text of a key. The check fills in the defaults and collects
every problem.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Union, get_args, get_origin, get_type_hints

from lavis.common.utils import is_url

from lavis_mafa.algorithm.options import METADATA, Option, suggest
from lavis_mafa.checkpoints.downloads import is_timm_name
from lavis_mafa.io.problems import Problem, Registered
from lavis_mafa.io.project_files import find_config

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "number": "a number",  # int or float, left as written
    "bool": "True or False",
    "str": "a string",
    "strs": "a string or a list of strings",
    "list": "a list",
    "mapping": "a mapping of keys",
    "any": "anything",
}


UNSET: Any = object()  # default of a key that stays absent


@dataclass(frozen=True, eq=False)
class Key:
    """One key of a config.

    Attributes:
        annotation: type of its values; of a section ``dict``, or ``dict | None``.
        option: text, source, range and choices.
        default: `UNSET` if the key stays absent.
        keys: keys of a section; None: the key takes a value.
        is_open: the section takes any further keys.
    """

    annotation: Any
    option: Option
    default: Any = UNSET
    keys: Mapping[str, Key] | None = None
    is_open: bool = False

    @property
    def nullable(self) -> bool:
        """Return whether null is permitted."""
        return self.annotation is Any or type(None) in get_args(self.annotation)

    @property
    def kind(self) -> str:
        """Return the name of what the key takes, see `_KINDS`."""
        members = _members_of(self.annotation)
        if len(members) == 2:
            return "strs" if str in members else "number"
        origin = get_origin(members[0]) or members[0]
        if origin in (list, tuple):
            return "list"
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return "mapping"
        return origin.__name__ if origin in (bool, int, float, str) else "any"

    def having(self, keys: Mapping[str, Key], **about: Any) -> Key:
        """Return a section with further keys, or with others in the place of its own."""
        return dataclasses.replace(self, keys={**(self.keys or {}), **keys}, **about)

    def about(self, **about: Any) -> Key:
        """Return a key with other attributes of its `Option`."""
        return dataclasses.replace(self, option=dataclasses.replace(self.option, **about))

    @property
    def _items(self) -> Key:
        """Return the key of the items of a list, or of the values of a mapping."""
        of_list = [one for one in _members_of(self.annotation) if one is not str]
        arguments = get_args(of_list[0]) or (Any,)
        item = arguments[-1] if arguments[-1] is not ... else arguments[0]
        return dataclasses.replace(self, annotation=item)

    def describe(self) -> str:
        """Return the permitted values in words: ``a whole number >= 1 or null``."""
        kind, option = self.kind, self.option
        is_list, text = kind in ("list", "mapping"), _KINDS[kind]
        if isinstance(option.choices, Registered):
            text = f"a registered {option.choices.table.replace('_', ' ')}"
        elif option.choices:
            names = ", ".join(option.choices)
            text = f"{text} out of {names}" if is_list else f"one of {names}"
        elif option.limits() and not is_list:
            text = f"{text} {option.limits()}"
        return text + (" or null" if self.nullable and kind != "any" else "")


def _members_of(annotation: Any) -> list[Any]:
    """Return the types of a union, without that of null."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return [annotation]
    return [one for one in get_args(annotation) if one is not type(None)]


def _key_of(annotation: Any, option: Option, default: Any = UNSET) -> Key:
    """Return the key of a setting; that of a settings class is a section."""
    members = _members_of(annotation)
    nested: Any = option.keys or (members[0] if dataclasses.is_dataclass(members[0]) else None)
    if nested is not None:
        keys = keys_of(nested)
        default = default if default is UNSET or default is None else {}
        return Key(dict | None if members != [annotation] else dict, option, default, keys)
    return Key(annotation, option, list(default) if isinstance(default, tuple) else default)


_hints = functools.cache(get_type_hints)  # of the few settings classes, read at every check


def keys_of(settings: type) -> dict[str, Key]:
    """Return the keys of a settings class by name; fields without `option` are left out."""
    keys = {}
    for one in dataclasses.fields(settings):
        if METADATA not in one.metadata:
            continue
        default = one.default
        if one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        default = UNSET if default is dataclasses.MISSING else default
        keys[one.name] = _key_of(_hints(settings)[one.name], one.metadata[METADATA], default)
    return keys


def section_of(
    keys: Mapping[str, Key], doc: str = "", source: str = "lavis_mafa", default: Any = UNSET
) -> Key:
    """Return a key that is a section of keys."""
    return Key(dict, Option(doc, source), default, keys)


def _known_keys(keys: Mapping[str, Key], path: str = "") -> Iterator[tuple[str, Key]]:
    """Yield every ``(path, key)``, such as ``("run.grit.enabled", ...)``."""
    for name, key in keys.items():
        yield f"{path}{name}", key
        yield from _known_keys(key.keys or {}, f"{path}{name}.")


Keys = Mapping[str, Key]
_LARGEST = {"int": 2**63 - 1, "float": 3e38, "number": 3e38}  # of int64 and float32 tensors
_TYPES: dict[str, type] = {"bool": bool, "list": list, "mapping": Mapping}


class Report:
    """Collect the problems found in a config.

    Args:
        keys: all keys of this config; suggestions for misspelt keys are taken from them.
        active: conditions under which keys are required, see `Option.needed`, and names of the
            run's task, most specific first, see `Option.by_task`.
        machine: also check files and devices of this machine.
        typed: texts of options by key: the values of keys that take a text.

    Attributes:
        problems: lines ``key: what is wrong and how to fix it``.
        bad: keys with a problem already reported, which later checks skip.
    """

    def __init__(
        self,
        keys: Keys,
        active: Collection[str] = ("always",),
        machine: bool = True,
        typed: Mapping[str, str] | None = None,
    ) -> None:
        self.keys, self.active, self.machine = keys, active, machine
        self.typed = typed or {}
        self.problems: list[str] = []
        self.bad: set[str] = set()
        self._suggested: set[str] = set()

    def _add(self, path: str, message: str) -> None:
        self.problems.append(f"{path}: {message}")
        self.bad |= {path, path.partition("[")[0]}

    def take(self, problems: Iterable[Sequence[Any]]) -> None:
        """Add the problems that a check of several keys yields, see `Problem`."""
        for one in problems:
            problem = Problem(*one)
            if not problem.is_missing:
                self._add(problem.key, problem.message)
            elif problem.key not in self.bad | self._suggested:  # not given and misspelt
                self._add(problem.key, f"missing; {problem.message}")

    def _unknown(self, path: str) -> None:
        """Report an unknown key, with the key it may be a misspelling of."""
        near = self._nearest(path)
        self._suggested.add(near)
        cure = f"did you mean {near}?" if near else "nothing reads it here: remove it"
        self._add(path, f"unknown key; {cure}")

    def _nearest(self, path: str) -> str:
        """Return the known key that ``path`` may be a misspelling of; "" if there is none.

        That is a similar name of the same section, or the same name, or another common name of the
        setting, elsewhere.
        """
        above, _, leaf = path.rpartition(".")
        parts = {one: (*one.rpartition("."), key) for one, key in _known_keys(self.keys)}
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

    def _checked(self, path: str, key: Key, value: Any) -> Any:
        """Return a value, with numeric strings read as numbers; report it if it is wrong."""
        if value is None and key.nullable:
            return None
        kind = key.kind
        if kind == "str" or (kind == "strs" and not isinstance(value, list)):
            value = self.typed.get(path, value)
        if kind in ("list", "strs") and isinstance(value, list):
            return [self._checked(f"{path}[{i}]", key._items, one) for i, one in enumerate(value)]
        if kind == "mapping" and isinstance(value, Mapping) and key.keys is None:
            return {
                name: self._checked(f"{path}.{name}", key._items, one)
                for name, one in value.items()
            }
        value = _number(kind, value)
        problem = _problem(key, value) or self._problem_of_path(key.option, value)
        if problem:
            self._add(path, problem)
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
            report._unknown(where)
        elif key is not None and key.keys is not None and isinstance(value, Mapping):
            found[name] = filled(value, key.keys, report, f"{where}.", below, key.is_open)
        elif key is None or (type(value) is type(below) and value == below):
            found[name] = copy.deepcopy(value)
        else:
            found[name] = report._checked(where, key, value)
    for name, key in keys.items():
        if name in given:
            continue
        option = key.option
        if set(report.active).intersection(option.needed):
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
