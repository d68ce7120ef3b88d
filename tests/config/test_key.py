"""Config keys derived from a settings class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError

from lavis_mafa.algorithm.grit.grit_settings import GritSettings
from lavis_mafa.algorithm.options import option
from lavis_mafa.algorithm.registry import Registry
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.config.key import (
    UNSET,
    describe,
    keys_in,
    keys_of,
    kind_of,
    option_of,
    section,
)

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
    kinds = {name: kind_of(key).name for name, key in keys.items()}
    assert kinds == {
        **{"must": "str", "on": "bool", "count": "int", "name": "str", "some": "list"},
        **{"numbers": "list", "files": "strs", "inner": "mapping", "weights": "mapping"},
        "anything": "any",
    }
    assert keys["must"].default is UNSET and option_of(keys["must"]).needed
    assert (keys["on"].default, option_of(keys["on"]).source) == (True, "Paper 1")
    assert kind_of(keys["count"]).nullable and option_of(keys["count"]).also == ("number",)
    assert describe(keys["count"]) == "a whole number >= 1 or null"
    assert keys["some"].default == ["x"] and describe(kind_of(keys["some"]).items) == "one of x, y"
    assert describe(kind_of(keys["numbers"]).items) == "a number >= 0"
    assert kind_of(keys["files"]).nullable and kind_of(keys["weights"]).items.annotation is float


def test_nested_settings_keep_the_defaults_of_the_outer_class():
    inner = keys_of(Outer)["inner"]
    assert inner.default == {} and keys_in(inner)["low"].default == 0.5
    assert describe(keys_in(inner)["low"]) == "a number > 0 and <= 1"
    assert keys_of(Inner)["low"].default == 0.1


def test_choices_are_read_from_the_registry_when_needed():
    key = keys_of(Outer)["name"]
    NAMES.register("late")(object())
    assert describe(key) == "one of late"
    assert section({"name": key}).model_validate({"name": "late"})


def test_all_errors_are_found_at_once_with_their_paths():
    wrong = {"count": 0, "some": ["x", "z"], "inner": {"low": 2, "hihg": 1}, "weights": {"a": "b"}}
    with pytest.raises(ValidationError) as caught:
        section(keys_of(Outer)).model_validate(wrong)
    paths = {one["loc"] for one in caught.value.errors()}
    assert paths == {("count",), ("some", 1), ("inner", "low"), ("inner", "hihg"), ("weights", "a")}


def test_defaults_of_keys_build_the_default_settings():
    for settings in (GritSettings, StepSettings):
        for name, key in keys_of(settings).items():
            value = getattr(settings(), name)
            if kind_of(key).name != "mapping":
                assert key.default == value or key.default == list(value), name
