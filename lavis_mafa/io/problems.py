"""The protocol by which classes report problems of a config.

A builder, task, model or runner class may have a classmethod::

    @classmethod
    def problems_of(cls, cfg: ConfigView) -> Iterable[Problem]: ...

It is called with the whole config after every single key has been checked. All problems are
reported together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """A problem of a config.

    Attributes:
        key: dotted path of the key.
        message: what was given, what is expected, how to fix it.
        is_missing: whether a required key is missing; skipped if the key has another problem.
    """

    key: str
    message: str
    is_missing: bool = False


class Registered(Collection[str]):
    """Names in a table of LAVIS's registry, read when they are needed.

    Args:
        table: ``model``, ``task``, ``runner``, ``processor`` or ``lr_scheduler``.
        others: further names, such as a registry of this package.
    """

    def __init__(self, table: str, others: Collection[str] = ()) -> None:
        self.table, self.others = table, others

    def _names(self) -> set[str]:
        from lavis.common.registry import registry

        return {*registry.mapping[f"{self.table}_name_mapping"], *self.others}

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names()))

    def __len__(self) -> int:
        return len(self._names())


class ConfigView:
    """A checked config, read by dotted path.

    Args:
        config: with all defaults.
        wrong: keys with a problem; they read as None.
        section: where the config names the class: ``run``, ``model`` or ``datasets.NAME``.
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
        """Return whether the run trains."""
        return self["run.evaluate"] is False


class ConfigError(ValueError):
    """A config that cannot work.

    Attributes:
        problems: one line each, ``key: what is wrong and how to fix it``.
        exit_status: of a command with such a config.
    """

    exit_status = 2

    def __init__(self, cfg_path: str, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{count} in the configuration {cfg_path}:", *self.problems]))
