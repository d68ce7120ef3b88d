"""Settings classes: dataclasses whose fields carry documentation, range and source.

The default, range and text of a setting are defined only in its field. The config check, the page
of all config keys and the defaults of a run are derived from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from typing import Any

METADATA = "option"  # key of an `Option` in a field's metadata


@dataclass(frozen=True)
class Option:
    """Documentation and range of one setting; the field has its type and default.

    Attributes:
        doc: one line.
        source: section of a paper, or ``lavis_mafa``.
        low, high: range, both ends included.
        above: the lower end is excluded.
        choices: the permitted values, or items of a tuple; with a `Registry`, the names that it has
            when a value is checked.
        also: other common names of the setting, for suggestions in messages.
        path: what the value must name: ``file``, ``file or URL``, ``file, folder or URL``,
            ``file, folder, URL or timm/NAME``, ``.npy file``, ``path or name`` (on the hub),
            or ``library file``, which may also be below LAVIS or ``configs/models/``.
        words: special values of a path, such as ``auto``.
        needed: when the setting must be given: ``always``, for ``training``, or for the named tasks
            and runners.
        by_task: defaults that differ for some tasks.
        keys: settings class whose fields are the keys of a mapping.
    """

    doc: str
    source: str = "lavis_mafa"
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: Collection[str] = ()
    also: tuple[str, ...] = ()
    path: str = ""
    words: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    by_task: dict[str, Any] = dataclasses.field(default_factory=dict)
    keys: type | None = None

    def describe(self) -> str:
        """Return the permitted values in words: ``> 0 and <= 0.5``."""
        if self.choices:
            *first, last = self.choices
            return f"{', '.join(first)} or {last}" if first else last
        return self.limits()

    def limits(self) -> str:
        """Return the range in words, such as ``from 0 to 1``; "" if there is none."""
        if self.low is not None and self.high is not None and not self.above:
            return f"from {self.low:g} to {self.high:g}"
        limits = []
        if self.low is not None:
            limits.append(f"{'>' if self.above else '>='} {self.low:g}")
        if self.high is not None:
            limits.append(f"<= {self.high:g}")
        return " and ".join(limits)

    def allows(self, value: Any) -> bool:
        """Return whether a value, or every item of a tuple, is permitted; None is always
        permitted."""
        if isinstance(value, tuple | list):
            return all(self.allows(item) for item in value)
        if value is None:
            return True
        if self.choices:
            return value in self.choices
        if self.low is None and self.high is None:
            return True
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number:
            return False
        if self.low is not None and not (value > self.low if self.above else value >= self.low):
            return False
        return self.high is None or value <= self.high


def option(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    **about: Any,
) -> Any:
    """Return a dataclass field with an `Option` as its metadata.

    Args:
        default: default value; omit it for a required field.
        doc: one line.
        factory: function that makes the default, for mutable values and nested settings.
        about: the other attributes of `Option`.
    """
    metadata = {METADATA: Option(doc, **about)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _options_of(settings: type) -> dict[str, Option]:
    """Return the `Option` of every field of a settings class, by the field's name."""
    return {
        field.name: field.metadata.get(METADATA, Option(""))
        for field in dataclasses.fields(settings)
    }


def suggest(word: str, names: Collection[str]) -> str:
    """Suggest the name most similar to ``word``; list all names if none is similar enough."""
    if not names:
        return "none is known"
    near = get_close_matches(word.replace("-", "_"), sorted(names), n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(names))}"


class Checked:
    """Base of settings classes that check their values when they are constructed.

    Raises:
        ValueError: naming the first value out of its range or choices.
    """

    def __post_init__(self) -> None:
        for name, about in _options_of(type(self)).items():
            value = getattr(self, name)
            if not about.allows(value):
                raise ValueError(f"{name} must be {about.describe()}, got {value!r}")
