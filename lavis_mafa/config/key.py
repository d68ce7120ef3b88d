"""Keys of a config as fields of pydantic models.

A settings class is a dataclass whose fields are created by `lavis_mafa.algorithm.options.option`.
It holds default, range and text of every setting; `keys_of` makes pydantic fields of them, and
`section` a model of fields. A field carries its `Kind` among its metadata.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic import ValidationInfo as Info
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from lavis_mafa.algorithm.options import METADATA, Option
from lavis_mafa.io.checkpoints import find_config
from lavis_mafa.io.downloads import is_timm_name
from lavis_mafa.problems import Registered

Keys = Mapping[str, FieldInfo]
LARGEST_INT, LARGEST_FLOAT = 2**63 - 1, 3e38  # limits of int64 and float32 tensors
NUMBERS = {"int": "a whole number", "float": "a number", "number": "a number"}
KINDS = {
    **NUMBERS,  # ``number`` is int or float, left as written
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
_SIMPLE = {bool: "bool", int: "int", float: "float", str: "str"}


class _Unset:
    def __repr__(self) -> str:
        return "no default"

    def __deepcopy__(self, memo: Any) -> _Unset:
        return self


# By `_shape`: pydantic takes longer to build a model than to check a config by it.
_MODELS: dict[tuple[Any, ...], type[Section]] = {}
UNSET: Any = _Unset()  # default of a key that stays absent


@dataclass(frozen=True)
class Kind:
    """What a key takes.

    Attributes:
        name: see `KINDS`.
        option: text, source, range and choices.
        nullable: null is permitted.
        keys: keys of a mapping; None: of another kind, or a mapping without fixed keys.
        is_open: a mapping takes any further keys.
        items: items of a list, or values of a mapping without fixed keys.
    """

    name: str
    option: Option
    nullable: bool = False
    keys: Keys | None = None
    is_open: bool = False
    items: FieldInfo | None = None


class Section(BaseModel):
    """A mapping of keys. A key is the alias of a field, as it may be any string."""

    model_config = ConfigDict(extra="forbid", defer_build=True)
    keys: ClassVar[Keys] = {}


class OpenSection(Section):
    """A mapping that takes any further keys."""

    model_config = ConfigDict(extra="allow", defer_build=True)


def section(keys: Keys, is_open: bool = False) -> type[Section]:
    """Return the model of a mapping with these keys."""
    shape = _shape(keys, is_open)
    if shape not in _MODELS:
        fields: dict[str, Any] = {
            f"key_{name}": (
                _annotation(one),
                Field(one.default, alias=name, description=one.description),
            )
            for name, one in keys.items()
        }
        model = create_model("Keys", __base__=OpenSection if is_open else Section, **fields)
        model.keys = keys
        _MODELS[shape] = model
    return _MODELS[shape]


def _shape(keys: Keys, is_open: bool) -> tuple[Any, ...]:
    """Return what is equal for the same keys, and for mappings of the same ones."""
    return (is_open, *((name, _shape_of(one)) for name, one in keys.items()))


def _shape_of(field: FieldInfo) -> Any:
    kind = kind_of(field)
    if kind.keys is None:
        return field
    return repr((field.default, kind.nullable, kind.option)), _shape(kind.keys, kind.is_open)


def _annotation(field: FieldInfo) -> Any:
    kind = kind_of(field)
    made: Any = field.annotation
    if kind.keys is not None:
        made = section(kind.keys, kind.is_open)
        made = made | None if kind.nullable else made
    return Annotated[(made, *field.metadata)]  # type: ignore[valid-type]


def _field(made: Any, rules: list[Any], kind: Kind, default: Any) -> FieldInfo:
    field = Field(default, description=kind.option.doc)
    field.annotation = made
    field.metadata = [*(rule for one in rules for rule in getattr(one, "metadata", [one])), kind]
    return field


def make_key(annotation: Any, option: Option, default: Any = UNSET) -> FieldInfo:
    """Return the pydantic field of a setting; the annotation determines its kind."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    members = [one for one in get_args(annotation) if one is not type(None)]
    nullable = is_union and len(members) < len(get_args(annotation))
    members = members if is_union else [annotation]
    first, origin = members[0], get_origin(members[0]) or members[0]
    nested: Any = option.keys or (first if dataclasses.is_dataclass(first) else None)
    if nested is not None:
        keys = keys_of(nested, default if isinstance(default, nested) else None)
        default = default if default is UNSET or default is None else {}
        return _field(dict, [], Kind("mapping", option, nullable, keys), default)
    name, rules, items = "any", [], None
    made: Any = Any
    if len(members) == 2 and str in members:  # str | tuple[str, ...]
        name, rules = "strs", [AfterValidator(functools.partial(_texts, option, nullable))]
    elif origin in (list, tuple):
        items = make_key(get_args(first)[0] if get_args(first) else Any, option)
        name, rules = "list", [Field(strict=True)]
        made = list[_annotation(items)]  # type: ignore[misc]
        default = list(default) if isinstance(default, list | tuple) else default
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        items = make_key((get_args(first) or (str, Any))[1], option)
        name, made = "mapping", dict[str, _annotation(items)]  # type: ignore[misc]
    elif origin in _SIMPLE:
        name, made = _SIMPLE[origin], first
        rules = _rules(name, option)
    made = made | None if nullable and made is not Any else made
    return _field(made, rules, Kind(name, option, nullable, items=items), default)


def _rules(kind: str, option: Option) -> list[Any]:
    """Return what pydantic checks of a simple value."""
    if kind == "bool":
        return [Field(strict=True)]
    if kind == "str":
        return [Field(strict=True), AfterValidator(functools.partial(_text, option))]
    largest = LARGEST_INT if kind == "int" else LARGEST_FLOAT
    low = -largest if option.low is None else option.low
    limits: Any = {"gt" if option.above else "ge": low}
    limits["le"] = largest if option.high is None else option.high
    limits |= {} if kind == "int" else {"allow_inf_nan": False}
    read = functools.partial(_number, whole=kind == "int")
    return [Field(strict=True, **limits), BeforeValidator(read)]


def number_key(option: Option) -> FieldInfo:
    """Return a nullable key of a number of which it is unknown whether it must be whole."""
    kind = Kind("number", option, nullable=True)
    return _field(Any, [AfterValidator(_number_as_written)], kind, UNSET)


def keys_of(settings: type, defaults: Any = None) -> dict[str, FieldInfo]:
    """Return the keys of a settings class by name; fields without `option` are skipped.

    Args:
        defaults: instance whose values are the defaults; None: the defaults of the fields.
    """
    read = _keys_of if defaults is None else _keys_of.__wrapped__
    return dict(read(settings, defaults))


@functools.cache  # of the few settings classes, which are read at every check
def _keys_of(settings: type, defaults: Any) -> dict[str, FieldInfo]:
    hints, keys = get_type_hints(settings), {}
    for one in dataclasses.fields(settings):
        if METADATA in one.metadata:
            default = one.default
            if one.default_factory is not dataclasses.MISSING:
                default = one.default_factory()
            default = default if defaults is None else getattr(defaults, one.name)
            default = UNSET if default is dataclasses.MISSING else default
            keys[one.name] = make_key(hints[one.name], one.metadata[METADATA], default)
    return keys


def section_of(
    keys: Keys, doc: str = "", source: str = "lavis_mafa", default: Any = UNSET, **about: Any
) -> FieldInfo:
    """Return a key that is a mapping of keys.

    Args:
        about: other attributes of `Kind`.
    """
    return _field(dict, [], Kind("mapping", Option(doc, source), keys=keys, **about), default)


def with_keys(field: FieldInfo, keys: Keys, **about: Any) -> FieldInfo:
    """Return a mapping with further keys, or with others in the place of its own.

    Args:
        about: other attributes of `Kind`.
    """
    kind = dataclasses.replace(kind_of(field), keys={**keys_in(field), **keys}, **about)
    return _field(dict, [], kind, field.default)


@functools.cache
def changed(field: FieldInfo, **about: Any) -> FieldInfo:
    """Return a simple key with other attributes of its `Option`."""
    option = dataclasses.replace(option_of(field), **about)
    return make_key(field.annotation, option, field.default)


def kind_of(field: FieldInfo) -> Kind:
    """Return what a key takes."""
    return next(one for one in field.metadata if isinstance(one, Kind))


def option_of(field: FieldInfo) -> Option:
    """Return text, source, range and choices of a key."""
    return kind_of(field).option


def keys_in(field: FieldInfo) -> dict[str, FieldInfo]:
    """Return the keys of a mapping by name; {} of another key."""
    return dict(kind_of(field).keys or {})


def known_keys(keys: Keys, path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every ``(path, key)``, such as ``("run.grit.enabled", ...)``."""
    for name, field in keys.items():
        child_path = f"{path}.{name}" if path else name
        yield child_path, field
        yield from known_keys(keys_in(field), child_path)


def describe(field: FieldInfo) -> str:
    """Return the permitted values in words: ``a whole number >= 1 or null``."""
    kind, option = kind_of(field), option_of(field)
    text = KINDS[kind.name]
    if option.choices and not isinstance(option.choices, Registered):
        names = ", ".join(option.choices)
        text = f"{text} out of {names}" if kind.items else f"one of {names}"
    low, high = option.low, option.high
    if kind.items is not None:
        pass
    elif low is not None and high is not None and not option.above:
        text += f" from {low:g} to {high:g}"
    elif low is not None:
        text += f" {'>' if option.above else '>='} {low:g}"
        text += f" and <= {high:g}" if high is not None else ""
    return text + (" or null" if kind.nullable else "")


# Checks of single values


def _number(value: Any, whole: bool) -> Any:
    """Read numbers written as strings, such as 1e-4, and whole numbers written as 2e3."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    if whole and isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


def _number_as_written(value: Any) -> Any:
    number = _number(value, whole=False)
    fits = isinstance(number, int | float) and not isinstance(number, bool)
    if value is not None and not (fits and abs(number) <= LARGEST_FLOAT):
        raise PydanticCustomError("number", "not a number")
    return number


def _texts(option: Option, nullable: bool, value: Any, info: Info) -> Any:
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, str) and not (value is None and nullable):
            raise PydanticCustomError("strs", "neither a string nor a list of strings")
        _text(option, one, info)
    return value


def _text(option: Option, value: Any, info: Info) -> Any:
    if value is None or value in option.words:
        return value
    if value == "???" or not value.strip():
        raise PydanticCustomError("empty", "is empty")
    if option.choices and value not in option.choices:
        raise PydanticCustomError("choice", "is no choice")
    checks_files = info.context is not None and info.context.machine
    if checks_files and option.path and not _exists(value, option.path):
        raise PydanticCustomError("path", "does not exist")
    if option.path == ".npy file" and not value.endswith(".npy"):
        raise PydanticCustomError("npy", "is no .npy file")
    # Checkpoints record the path, and may be loaded from another folder.
    found = checks_files and option.path and os.path.exists(value)
    return os.path.abspath(value) if found else value


def _exists(value: str, kind: str) -> bool:
    if kind == "checkpoint or timm name":
        return is_timm_name(value) or _exists(value, "checkpoint")
    if kind in ("file or URL", "checkpoint") and is_url(value):
        return True
    if kind == "checkpoint":
        return os.path.exists(value)
    if kind == "path or name":
        # A name on the hub has at most one slash; .txt and .json are vocabulary files.
        by_hub = not value.startswith((".", "/", "~")) and value.count("/") < 2
        if os.path.exists(value) or (by_hub and not value.endswith((".txt", ".json"))):
            return True
    if kind not in ("library file", "path or name"):
        return os.path.isfile(value)
    try:
        return bool(find_config(value))
    except OSError:
        return False


def is_url(value: str) -> bool:
    return value.lower().startswith(("http://", "https://"))
