"""What a study consists of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lavis_mafa.runners.checkpoint import LAST

PLACEHOLDER = re.compile(r"(?<!\$)\{(\w+)\}")
ROW = "row"  # the figure's x where it is no key that varies


class StudyError(ValueError):
    """A study that cannot work.

    Attributes:
        problems: one line each: where, what is wrong and how to mend it.
    """

    def __init__(self, path: str | Path, problems: Sequence[str]) -> None:
        self.problems = list(dict.fromkeys(problems))
        n = len(self.problems)
        count = "1 problem" if n == 1 else f"{n} problems"
        super().__init__("\n".join([f"{count} in the study {path}:", *self.problems]))


@dataclass(frozen=True)
class Step:
    """What one process does, or a checkpoint that is given.

    Attributes:
        name: of the shared run or stage.
        script, config, options: of train.py or evaluate.py; options may hold placeholders.
        module, arguments: of ``python -m`` instead.
        writes: the checkpoint that it leaves in its folder; "": none.
        given: a checkpoint that is there already; nothing is run.
    """

    name: str
    script: str = "train.py"
    config: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    arguments: tuple[str, ...] = ()
    writes: str = LAST
    given: str = ""

    @property
    def names(self) -> set[str]:
        """The placeholders that it has."""
        return placeholders([*self.arguments, *self.options.values()])


def placeholders(values: Sequence[Any]) -> set[str]:
    """Names in braces in those of the values that are texts."""
    texts = [value for value in values if isinstance(value, str)]
    return {name for text in texts for name in PLACEHOLDER.findall(text)}


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: of its own in the table.
        cells: what stands before its figures, by the title of the column.
        base: its name without the values that vary.
        values: of the keys that vary.
        options: what it sets beyond the first stage's.
    """

    name: str
    cells: Mapping[str, str]
    base: str
    values: Mapping[str, Any]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A figure of a stage's log: the mean of ``keys`` in its last record of a kind and split."""

    name: str
    title: str
    keys: tuple[str, ...]
    stage: str
    kind: str = "eval"
    split: str = "test"
    scale: float = 1.0
    digits: int = 1


@dataclass(frozen=True)
class Paper:
    """A paper's numbers.

    Attributes:
        about: what they were measured on.
        columns: their titles.
        rows: for each row of the file a list as long as ``columns``; [] where there are none.
        cells: what stands before them, as `Row.cells`.
    """

    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    cells: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Study:
    """A study file with its base; see `lavis_mafa.studies` for the keys."""

    path: Path
    at: str
    title: str
    source: str
    about: str
    notes: Sequence[str]
    seeds: Sequence[int]
    at_once: int
    processes: int
    shared: Mapping[str, Step]
    stages: Mapping[str, Step]
    rows: Sequence[Row]
    titles: Mapping[str, str]
    columns: Sequence[Column]  # those shown
    catalogue: Mapping[str, Column]
    x: str
    y: Sequence[str]
    paper: Paper | None
