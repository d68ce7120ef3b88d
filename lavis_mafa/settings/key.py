"""Keys of a config, read from settings classes, and the check of a single value.

A settings class is a dataclass whose fields are made by `lavis_mafa.algorithm.options.option`: the
field has the type, default, range and text of a key. Pydantic checks a value by the type.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationInfo
from pydantic_core import PydanticCustomError

from lavis_mafa.algorithm.options import METADATA, Option
from lavis_mafa.checkpoints.downloads import is_timm_name
from lavis_mafa.io.problems import Registered
from lavis_mafa.io.project_files import find_config

LARGEST = {int: 2**63 - 1, float: 3e38}  # limits of int64 and float32 tensors
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
# What must exist, by `Option.path`.
PATHS = {
    "file": "file",
    "file or URL": "file or URL",
    "checkpoint": "file, URL, or folder of transformers",
    "checkpoint or timm name": "file, URL, folder of transformers, or `timm/NAME`",
    ".npy file": ".npy file",
    "library file": "file, also below LAVIS or `configs/models/`",
    "path or name": "path or name on the hub",
}


class _Unset:
    def __repr__(self) -> str:
        return "no default"


UNSET: Any = _Unset()  # default of a key that stays absent


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

    @functools.cached_property
    def kind(self) -> str:
        """Return the name of what the key takes, see `KINDS`."""
        return "mapping" if self.keys is not None else _kind(self.annotation)

    @functools.cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """Return what checks a value; its context is a `Report`."""
        made: Any = self.annotation
        if self.keys is None:
            made = _checked(self.annotation, self.option)
        return TypeAdapter(made, config=ConfigDict(strict=True))

    def having(self, keys: Mapping[str, Key], **about: Any) -> Key:
        """Return a section with further keys, or with others in the place of its own."""
        return dataclasses.replace(self, keys={**(self.keys or {}), **keys}, **about)

    def about(self, **about: Any) -> Key:
        """Return a key with other attributes of its `Option`."""
        return dataclasses.replace(self, option=dataclasses.replace(self.option, **about))

    def describe(self, item: bool = False) -> str:
        """Return the permitted values in words: ``a whole number >= 1 or null``.

        Args:
            item: describe the items of a list, or the values of a mapping, instead.
        """
        kind, option = self.kind, self.option
        if item:
            kind = _kind(get_args(_members(self.annotation)[0])[-1])
        is_list = kind in ("list", "mapping")
        text = KINDS[kind]
        if option.choices and not isinstance(option.choices, Registered):
            names = ", ".join(option.choices)
            text = f"{text} out of {names}" if is_list else f"one of {names}"
        low, high = option.low, option.high
        if is_list:
            pass
        elif low is not None and high is not None and not option.above:
            text += f" from {low:g} to {high:g}"
        elif low is not None:
            text += f" {'>' if option.above else '>='} {low:g}"
            text += f" and <= {high:g}" if high is not None else ""
        return text + (" or null" if self.nullable and kind != "any" and not item else "")


def _members(annotation: Any) -> list[Any]:
    """Return the types of a union, without that of null."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return [annotation]
    return [one for one in get_args(annotation) if one is not type(None)]


def _kind(annotation: Any) -> str:
    members = _members(annotation)
    origin = get_origin(members[0]) or members[0]
    if len(members) == 2:
        return "strs" if str in members else "number"
    if origin in (list, tuple):
        return "list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping"
    return origin.__name__ if origin in (bool, int, float, str) else "any"


def key_of(annotation: Any, option: Option, default: Any = UNSET) -> Key:
    """Return the key of a setting; that of a settings class is a section."""
    members = _members(annotation)
    nested: Any = option.keys or (members[0] if dataclasses.is_dataclass(members[0]) else None)
    if nested is not None:
        keys = keys_of(nested, default if isinstance(default, nested) else None)
        default = default if default is UNSET or default is None else {}
        return Key(dict | None if members != [annotation] else dict, option, default, keys)
    return Key(annotation, option, list(default) if isinstance(default, tuple) else default)


@functools.cache  # of the few settings classes, which are read at every check
def _hints(settings: type) -> dict[str, Any]:
    return get_type_hints(settings)


_KEYS: dict[type, dict[str, Key]] = {}  # with the defaults of the fields


def keys_of(settings: type, defaults: Any = None) -> dict[str, Key]:
    """Return the keys of a settings class by name; fields without `option` are left out.

    Args:
        defaults: instance whose values are the defaults; None: the defaults of the fields.
    """
    if defaults is None and settings in _KEYS:
        return dict(_KEYS[settings])
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
    if defaults is None:
        _KEYS[settings] = keys
    return dict(keys)


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


# The type that pydantic checks a value by


def _checked(annotation: Any, option: Option) -> Any:
    """Return a type with the range, choices and paths of an option."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in (int, float):
        largest = LARGEST[annotation]
        low = -largest if option.low is None else option.low
        limits: Any = {"gt" if option.above else "ge": low}
        limits["le"] = largest if option.high is None else option.high
        limits |= {} if annotation is int else {"allow_inf_nan": False}
        return Annotated[annotation, Field(**limits), BeforeValidator(_NUMBERS[annotation])]
    if annotation is str:
        return Annotated[str, AfterValidator(functools.partial(_text, option))]
    if set(arguments) >= {int, float}:  # a number, left as written
        return Annotated[Any, AfterValidator(_number_as_written)]
    if origin in (Union, types.UnionType):
        return Union[tuple(_checked(one, option) for one in arguments)]  # noqa: UP007
    if origin in (list, tuple):
        return list[_checked(arguments[0], option)]  # type: ignore[misc]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return dict[str, _checked(arguments[1], option)]  # type: ignore[misc]
    return annotation if annotation in (bool, list, dict, type(None)) else Any


def _float(value: Any) -> Any:
    """Read numbers written as strings, such as 1e-4."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _int(value: Any) -> Any:
    """Read whole numbers written as strings or floats, such as 2e3."""
    value = _float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


_NUMBERS = {int: _int, float: _float}


def _number_as_written(value: Any) -> Any:
    number = _float(value)
    fits = isinstance(number, int | float) and not isinstance(number, bool)
    if value is not None and not (fits and abs(number) <= LARGEST[float]):
        raise PydanticCustomError("number", "not a number")
    return number


def _text(option: Option, value: str, info: ValidationInfo) -> str:
    if value in option.words:
        return value
    if value == "???" or not value.strip():
        raise PydanticCustomError("empty", "is empty")
    if option.choices and value not in option.choices:
        raise PydanticCustomError("choice", "is no choice")
    checks_files = option.path and info.context is not None and info.context.machine
    if checks_files and not _exists(value, option.path):
        raise PydanticCustomError("path", "does not exist")
    if option.path == ".npy file" and not value.endswith(".npy"):
        raise PydanticCustomError("npy", "is no .npy file")
    if not checks_files:
        return value
    # Checkpoints record the path, and may be loaded from another folder.
    return os.path.abspath(value) if os.path.exists(value) else value


def _exists(value: str, kind: str) -> bool:
    if os.path.exists(value) and kind in ("path or name", "checkpoint", "checkpoint or timm name"):
        return True
    if kind in ("file or URL", "checkpoint", "checkpoint or timm name") and is_url(value):
        return True
    if kind == "checkpoint or timm name":
        return is_timm_name(value)
    if kind == "path or name" and not value.startswith((".", "/", "~")):
        # A name on the hub has at most one slash; .txt and .json are vocabulary files.
        if value.count("/") < 2 and not value.endswith((".txt", ".json")):
            return True
    if kind not in ("library file", "path or name"):
        return os.path.isfile(value)
    try:
        return bool(find_config(value))
    except OSError:
        return False


def is_url(value: str) -> bool:
    """Return whether a text is a URL that can be downloaded."""
    return value.lower().startswith(("http://", "https://"))
