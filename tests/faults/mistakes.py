"""Generate invalid configs, key by key, from the schema that checks valid ones."""

from __future__ import annotations

import copy
import functools
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from lavis.common.registry import registry
from omegaconf import OmegaConf
from shipped import required_options

from lavis_mafa.io.problems import Registered
from lavis_mafa.settings.check import Key
from lavis_mafa.settings.load import complete
from lavis_mafa.settings.registered import keys_for

# Values of a type that a key of this kind rejects.
OTHER_TYPES = {
    "bool": ["maybe", 3, [True], {"a": 1}],
    "int": [1.5, "many", [1], {"a": 1}, True],
    "float": ["much", [0.5], {"a": 1}, False],
    "number": ["much", [0.5], {"a": 1}, True],
    "str": [7, 0.5, ["a"], {"a": "b"}, True],
    "strs": [7, [7], {"a": "b"}, False],
    "list": ["x", 5, {"a": 1}, [{"a": 1}]],
    "mapping": [3, "x", [1]],
}
# not finite, or too large for a tensor
NO_NUMBERS = [math.nan, math.inf, -math.inf, "nan", 10**40, -(10**40)]
# Keys that determine which other keys exist: each is tested alone.
DECIDING = ("arch", "model_type", "type", "name", "task", "runner", "evaluate")
ABSENT = object()


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong with a config.

    Attributes:
        kind: what sort of mistake.
        path: dotted key that is right.
        name: what is written in the place of its last part.
        value: what is written there; `ABSENT`: what stood there before.
        meant: what the message must name besides the key, "" for nothing.
    """

    kind: str
    path: str
    name: str
    value: Any = ABSENT
    meant: str = ""

    @property
    def written(self) -> str:
        """The dotted key as written in the config."""
        return ".".join([*self.path.split(".")[:-1], self.name])

    def put(self, config: dict[str, Any]) -> None:
        """Make the mistake in ``config``, in place."""
        *parents, leaf = self.path.split(".")
        node = config
        for name in parents:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        before = node.pop(leaf, "x") if self.name != leaf else None
        node[self.name] = before if self.value is ABSENT else copy.deepcopy(self.value)

    def named_in(self, problems: list[str]) -> list[str]:
        """Return the messages that name the written key and the intended one."""
        # Without a processor's name it is unknown which other keys it has.
        keys = {self.written, self.path} if self.kind == "misspelt" else {self.written}
        prefixes = tuple(f"{key}{mark}" for key in keys for mark in ":[.")
        return [line for line in problems if line.startswith(prefixes) and self.meant in line]


@functools.cache
def valid_config(path: Any) -> dict[str, Any]:
    """Return a shipped config as plain data, without problems."""
    required = OmegaConf.from_dotlist(required_options(path))
    merged = OmegaConf.merge(OmegaConf.load(path), required)
    config: Any = OmegaConf.to_container(merged, resolve=True)
    assert complete(config, machine=False)[1] == []
    return config


def misspellings(name: str, others: Iterable[str]) -> list[str]:
    """Return ``name`` with a letter dropped, doubled, or swapped with the next.

    Those that are as similar to one of ``others`` are left out: nobody knows what they mean.
    """
    positions = list(range(len(name)))
    random.Random(name).shuffle(positions)
    dropped = [name[:i] + name[i + 1 :] for i in positions if len(name) > 2]
    doubled = [name[: i + 1] + name[i:] for i in positions]
    pairs = [i for i in positions if i + 1 < len(name) and name[i] != name[i + 1]]
    swapped = [name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in pairs]
    rest = [other for other in others if other != name]
    return [
        wrong
        for wrong in (*dropped[:1], *doubled[:1], *swapped[:1])
        if all(_similarity(other, wrong) < _similarity(name, wrong) for other in rest)
    ]


@functools.cache
def _similarity(name: str, wrong: str) -> float:
    same_letters = sorted(name) == sorted(wrong)  # as of `name` and `mean`
    return 1.0 if same_letters else SequenceMatcher(None, name, wrong).ratio()


def keys_of(config: dict[str, Any]) -> Iterator[tuple[str, Key, Any, tuple[str, ...]]]:
    """Yield the keys of a valid config: path, key, default YAML's value, names of siblings.

    Keys below a value that is null are left out.
    """
    _given, keys, shipped, _wrong = keys_for(config)
    complete_config, _ = complete(config, machine=False)

    def below(keys: Any, path: str, value: Any, default: Any) -> Iterator[Any]:
        for name, child in keys.items():
            inner = value.get(name) if isinstance(value, dict) else None
            known = default.get(name, ABSENT) if isinstance(default, dict) else ABSENT
            yield f"{path}{name}", child, known, tuple(keys)
            # Splits and processors of a data set are optional; a null value has no keys.
            if child.kind == "mapping" and isinstance(inner, dict):
                yield from below(child.keys or {}, f"{path}{name}.", inner, known)

    yield from below(
        keys, "", complete_config, {k: shipped[k] for k in ("model", "datasets") if k in shipped}
    )


def mistakes(config: dict[str, Any]) -> Iterator[Mistake]:
    """Yield all mistakes that can be made in the keys of a valid config, one at a time."""
    for path, key, default, siblings in keys_of(config):
        name = path.rsplit(".", 1)[-1]
        builder = path.count(".") == 1 and path.startswith("datasets.")
        for wrong in misspellings(name, siblings):
            if wrong not in siblings and not (builder and registry.get_builder_class(wrong)):
                yield Mistake("misspelt", path, wrong, meant=name if builder else path)
        if builder:
            continue
        kind, option = key.kind, key.option
        for value in OTHER_TYPES.get(kind, ()):
            yield Mistake("wrong type", path, name, value)
        if not key.nullable and kind != "any" and default is not None:
            yield Mistake("wrong type", path, name, None)
        if kind in ("int", "float", "number"):
            yield from (Mistake("out of range", path, name, value) for value in beyond(key))
        if kind in ("bool", "int", "float", "number", "list", "mapping"):
            yield Mistake("empty", path, name, "")
        elif kind in ("str", "strs") and "" not in option.words:
            yield from (Mistake("empty", path, name, blank) for blank in ("", "  "))
        yield from words(path, name, key)


def beyond(key: Key) -> Iterator[Any]:
    """Yield numbers that a key rejects."""
    option, step = key.option, 1 if key.kind == "int" else 1e-3
    yield from NO_NUMBERS
    if option.low is not None:
        yield option.low if option.above else option.low - step
        yield str(option.low - step)
        yield from [-1] if option.low >= 0 else []
    if option.high is not None:
        yield option.high + step
        yield 10 * option.high + 1


def words(path: str, name: str, key: Key) -> Iterator[Mistake]:
    """Yield unknown choices and names, and paths that do not exist."""
    option, is_list = key.option, key.kind == "list"
    registered = isinstance(option.choices, Registered)
    choices = [*option.choices][: 3 if registered else None]
    for choice in choices:
        for wrong in misspellings(choice, option.choices):
            if wrong not in option.choices and wrong != "oracle":
                kind = "unknown name" if registered else "unknown choice"
                yield Mistake(kind, path, name, [wrong] if is_list else wrong, meant=choice)
    if choices:
        value = "nothing like it"
        yield Mistake("unknown choice", path, name, [value] if is_list else value)
    if option.path:
        yield Mistake("no such file", path, name, "./no/such/file.json")


def batches(mistakes_: list[Mistake]) -> Iterator[list[Mistake]]:
    """Group mistakes that can be made in one config, because all are reported at once: one per
    key and none above another's key; mistakes in deciding keys are separate.
    """
    rest = []
    for mistake in mistakes_:
        deciding = mistake.path.rsplit(".", 1)[-1] in DECIDING
        if deciding or mistake.path.count(".") < 1:
            yield [mistake]
        else:
            rest.append(mistake)
    while rest:
        batch: list[Mistake] = []
        later: list[Mistake] = []
        taken: set[str] = set()
        for mistake in rest:
            parts = mistake.path.split(".")
            related = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
            independent = not (related & taken) and not any(
                other_path.startswith(f"{mistake.path}.") for other_path in taken
            )
            (batch if independent else later).append(mistake)
            taken |= {mistake.path} if independent else set()
        yield batch
        rest = later


def refused(config: dict[str, Any], together: list[Mistake], machine: bool) -> list[str]:
    """Return the messages about a config with these mistakes."""
    wrong = copy.deepcopy(config)
    for mistake in together:
        mistake.put(wrong)
    return complete(wrong, machine)[1]


def as_yaml(config: dict[str, Any]) -> str:
    """Return a config as the text of a file; JSON is YAML that keeps every type."""
    return json.dumps(config)
