"""Config keys derived from a settings class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lavis_mafa.algorithm.options import option
from lavis_mafa.algorithm.registry import Registry
from lavis_mafa.settings.check import Report, filled
from lavis_mafa.settings.key import UNSET, keys_of

NAMES: Registry[object] = Registry("name")


@dataclass(frozen=True)
class Inner:
    low: float = option(0.1, "lower end", low=0, high=1, above=True)


@dataclass
class Outer:
    must: str = option(doc="no default", needed=True)
    on: bool = option(True, "a switch", source="Paper 1")
    count: int | None = option(None, "a count", low=1, also=("number",))
    name: str = option("a", "one of what is registered", choices=NAMES)
    some: tuple[str, ...] = option(("x",), "several", choices=("x", "y"))
    numbers: list[float] = option(factory=list, doc="numbers", low=0)
    files: str | tuple[str, ...] | None = option(None, "files")
    inner: Inner = option(factory=lambda: Inner(low=0.5), doc="nested")
    weights: Mapping[str, float] = option(factory=dict, doc="any weights")
    anything: Any = option(None, "anything")
    private: int = field(default=3)


def test_kind_range_and_default_follow_from_the_field():
    keys = keys_of(Outer)
    kinds = {name: key.kind for name, key in keys.items()}
    assert kinds == {
        **{"must": "str", "on": "bool", "count": "int", "name": "str", "some": "list"},
        **{"numbers": "list", "files": "strs", "inner": "mapping", "weights": "mapping"},
        "anything": "any",
    }
    assert keys["must"].default is UNSET and keys["must"].option.needed
    assert (keys["on"].default, keys["on"].option.source) == (True, "Paper 1")
    assert keys["count"].nullable and keys["count"].option.also == ("number",)
    assert keys["count"].describe() == "a whole number >= 1 or null"
    assert keys["some"].default == ["x"] and keys["some"].items.describe() == "one of x, y"
    assert keys["numbers"].items.describe() == "a number >= 0"
    assert keys["files"].nullable and keys["weights"].items.describe() == "a number"


def test_nested_settings_keep_the_defaults_of_the_outer_class():
    inner = keys_of(Outer)["inner"]
    assert inner.default == {} and inner.keys["low"].default == 0.5
    assert inner.keys["low"].describe() == "a number > 0 and <= 1"
    assert keys_of(Inner)["low"].default == 0.1


def test_all_errors_are_found_at_once_with_their_paths():
    wrong = {"count": 0, "some": ["x", "z"], "inner": {"low": 2, "hihg": 1}, "weights": {"a": "b"}}
    report = Report(keys_of(Outer))
    filled(wrong, report.keys, report)
    assert report.problems == [
        "count: 0 is out of range; expected a whole number >= 1 or null",
        "some[1]: 'z' is not one of x, y; known: x, y",
        "inner.low: 2 is out of range; expected a number > 0 and <= 1",
        "inner.hihg: unknown key; nothing reads it here: remove it",
        "weights.a: 'b' is not a number",
        "must: missing; expected a string (no default)",
    ]
