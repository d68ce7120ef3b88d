"""The parts of a study."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lavis_mafa.runners.checkpoint import LAST

PLACEHOLDER = re.compile(r"(?<!\$)\{(\w+)\}")
ROW = "row"  # the figure's x unless it is a key that varies
MEASURED = "measured"  # kind of a column whose figure the study's measuring function returns


class StudyError(ValueError):
    """A study that cannot run.

    Attributes:
        problems: one line each: where, what is wrong and how to fix it.
    """

    def __init__(self, path: str | Path, problems: Sequence[str]) -> None:
        self.problems = list(dict.fromkeys(problems))
        n = len(self.problems)
        count = "1 problem" if n == 1 else f"{n} problems"
        super().__init__("\n".join([f"{count} in the study {path}:", *self.problems]))


@dataclass(frozen=True)
class Step:
    """The work of one process, or a given checkpoint.

    Attributes:
        name: of the shared run or stage.
        script, config, options: of train.py or evaluate.py; options may hold placeholders.
        module, arguments: of ``python -m`` instead.
        writes: the checkpoint that it writes to its folder; "": none.
        given: an existing checkpoint; nothing is run.
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
        """The placeholders in its options and arguments."""
        return placeholders([*self.arguments, *self.options.values()])


def placeholders(values: Sequence[Any]) -> set[str]:
    """Return the names in braces in those of the values that are texts."""
    texts = [value for value in values if isinstance(value, str)]
    return {name for text in texts for name in PLACEHOLDER.findall(text)}


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: unique in the table.
        cells: the cells before its figures, by the title of the column.
        base: its name without the values that vary.
        values: of the keys that vary.
        options: what it sets beyond the first stage's options; of a row with ``run``, what it sets
            beyond what all rows have.
        run: the shared run that it shows, or whose options its own override; "": it has runs of its
            own, one for each stage.
        stages: by name, what it sets beyond the options of this stage.
        source: where a paper has the system.
    """

    name: str
    cells: Mapping[str, str]
    base: str
    values: Mapping[str, Any]
    options: Mapping[str, Any]
    run: str = ""
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Column:
    """A figure of a stage: the mean of ``keys`` in its log's last record of a kind and split.

    With kind ``measured`` the record is what the study's measuring function returned. ``best``,
    "max" or "min", marks the best value where there is one seed.
    """

    name: str
    title: str
    keys: tuple[str, ...]
    stage: str
    kind: str = "eval"
    split: str = "test"
    scale: float = 1.0
    digits: int = 1
    best: str = ""


@dataclass(frozen=True)
class Claim:
    """A statement that one row is better than another in a figure, with the same seed.

    Attributes:
        claim, source: what is stated, and where.
        row, than: names of rows.
        column: of the figure.
        better: "higher" or "lower".
    """

    claim: str
    source: str
    row: str
    than: str
    column: Column
    better: str = "higher"


@dataclass(frozen=True)
class Reference:
    """A row to which a table shows the differences of the others, with the same seed.

    Attributes:
        row: its name.
        columns: names of the columns whose differences are shown.
        after: title of the table that the differences follow; "": they follow all tables.
    """

    row: str
    columns: Sequence[str]
    after: str = ""


@dataclass(frozen=True)
class LogCurve:
    """The mean of logged figures over ``step`` or ``epoch``, a line for each row of ``lines``."""

    title: str
    keys: tuple[str, ...]
    kind: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Paper:
    """A paper's numbers.

    Attributes:
        about: what they were measured on.
        columns: their titles.
        rows: for each row of the file a list as long as ``columns``; [] if the paper has none.
        cells: the cells before them, as `Row.cells`.
    """

    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    cells: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Study:
    """A study file merged with its bases; see `lavis_mafa.studies` for the keys."""

    path: Path
    at: str
    title: str
    source: str
    about: str
    notes: Sequence[str]
    seeds: Sequence[int]
    at_once: int
    processes: int
    parameters: Mapping[str, Any]
    folders: str
    shared: Mapping[str, Step]
    stages: Mapping[str, Step]
    rows: Sequence[Row]
    titles: Mapping[str, str]
    columns: Sequence[Column]  # those shown
    catalogue: Mapping[str, Column]
    tables: Mapping[str, Sequence[str]]  # names of columns, by the title of their table
    reference: Reference | None
    claims: Sequence[Claim]
    measure: tuple[str, Sequence[str]] | None  # a function, and the shared runs that it judges by
    curves: Sequence[LogCurve]
    gallery: str  # the shared run whose mined connections are shown
    headline: str  # a function that words the result
    x: str
    y: Sequence[str]
    paper: Paper | None
