"""Keys of a config, read from settings classes.

A settings class is a dataclass whose fields are made by `lavis_mafa.algorithm.options.option`: the
field has the type, default, range and text of a key.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from lavis_mafa.algorithm.options import METADATA, Option
from lavis_mafa.io.problems import Registered

KINDS = {
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
        """Return the name of what the key takes, see `KINDS`."""
        return kind_of(self.annotation)

    def having(self, keys: Mapping[str, Key], **about: Any) -> Key:
        """Return a section with further keys, or with others in the place of its own."""
        return dataclasses.replace(self, keys={**(self.keys or {}), **keys}, **about)

    def about(self, **about: Any) -> Key:
        """Return a key with other attributes of its `Option`."""
        return dataclasses.replace(self, option=dataclasses.replace(self.option, **about))

    @property
    def items(self) -> Key:
        """Return the key of the items of a list, or of the values of a mapping."""
        of_list = [one for one in members_of(self.annotation) if one is not str]
        arguments = get_args(of_list[0]) or (Any,)
        item = arguments[-1] if arguments[-1] is not ... else arguments[0]
        return dataclasses.replace(self, annotation=item)

    def describe(self) -> str:
        """Return the permitted values in words: ``a whole number >= 1 or null``."""
        kind, option = self.kind, self.option
        is_list, text = kind in ("list", "mapping"), KINDS[kind]
        if option.choices and not isinstance(option.choices, Registered):
            names = ", ".join(option.choices)
            text = f"{text} out of {names}" if is_list else f"one of {names}"
        elif option.limits() and not is_list:
            text = f"{text} {option.limits()}"
        return text + (" or null" if self.nullable and kind != "any" else "")


def members_of(annotation: Any) -> list[Any]:
    """Return the types of a union, without that of null."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return [annotation]
    return [one for one in get_args(annotation) if one is not type(None)]


def kind_of(annotation: Any) -> str:
    """Return the name of what a type stands for, see `KINDS`."""
    members = members_of(annotation)
    if len(members) == 2:
        return "strs" if str in members else "number"
    origin = get_origin(members[0]) or members[0]
    if origin in (list, tuple):
        return "list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping"
    return origin.__name__ if origin in (bool, int, float, str) else "any"


def key_of(annotation: Any, option: Option, default: Any = UNSET) -> Key:
    """Return the key of a setting; that of a settings class is a section."""
    members = members_of(annotation)
    nested: Any = option.keys or (members[0] if dataclasses.is_dataclass(members[0]) else None)
    if nested is not None:
        keys = keys_of(nested, default if isinstance(default, nested) else None)
        default = default if default is UNSET or default is None else {}
        return Key(dict | None if members != [annotation] else dict, option, default, keys)
    return Key(annotation, option, list(default) if isinstance(default, tuple) else default)


@functools.cache  # of the few settings classes, which are read at every check
def _hints(settings: type) -> dict[str, Any]:
    return get_type_hints(settings)


def keys_of(settings: type, defaults: Any = None) -> dict[str, Key]:
    """Return the keys of a settings class by name; fields without `option` are left out.

    Args:
        defaults: instance whose values are the defaults; None: the defaults of the fields.
    """
    keys = {}
    for one in dataclasses.fields(settings):
        if METADATA not in one.metadata:
            continue
        default = one.default
        if defaults is not None:
            default = getattr(defaults, one.name)
        elif one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        default = UNSET if default is dataclasses.MISSING else default
        keys[one.name] = key_of(_hints(settings)[one.name], one.metadata[METADATA], default)
    return keys


def section_of(
    keys: Mapping[str, Key], doc: str = "", source: str = "lavis_mafa", default: Any = UNSET
) -> Key:
    """Return a key that is a section of keys."""
    return Key(dict, Option(doc, source), default, keys)


def known_keys(keys: Mapping[str, Key], path: str = "") -> Iterator[tuple[str, Key]]:
    """Yield every ``(path, key)``, such as ``("run.grit.enabled", ...)``."""
    for name, key in keys.items():
        yield f"{path}{name}", key
        yield from known_keys(key.keys or {}, f"{path}{name}.")
