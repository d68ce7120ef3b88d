"""The protocol between the config check and the classes that it asks.

A builder, task, model or runner class may have a classmethod::

    @classmethod
    def problems_of(cls, cfg: ConfigView) -> Iterable[Problem]: ...

It is called with the whole config once every key has been checked by itself. All problems are then
reported together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """What is wrong with a config.

    Attributes:
        key: dotted path of the key.
        message: what was given, what is expected, how to fix it.
        is_note: a warning: the config works nevertheless.
        is_missing: the key must be given and is not; reported unless the key itself is reported.
    """

    key: str
    message: str
    is_note: bool = False
    is_missing: bool = False


class ConfigView:
    """A checked config, read by dotted path.

    Args:
        config: with all defaults.
        wrong: keys with a problem of their own; they read as None.
        section: where the class that is asked is named: ``run``, ``model`` or ``datasets.NAME``.
        machine: whether files and devices of this machine are checked.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        wrong: Collection[str] = (),
        section: str = "",
        machine: bool = True,
    ) -> None:
        self.config = config
        self.wrong = wrong
        self.section = section
        self.machine = machine

    def __getitem__(self, path: str) -> Any:
        """Return the value of a key; None if it is absent or wrong."""
        value: Any = self.config
        seen: list[str] = []
        for name in path.split("."):
            seen.append(name)
            if not isinstance(value, Mapping) or ".".join(seen) in self.wrong:
                return None
            value = value.get(name)
        return value

    @property
    def training(self) -> bool:
        """Whether the run trains."""
        return self["run.evaluate"] is False
