"""The parts of a study, each checked by its class. The keys are described in `research.studies`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic import NonNegativeInt as WholeNumber
from pydantic import PositiveInt as Count

PLACEHOLDER = re.compile(r"(?<!\$)\{(\w+)\}")
ROW = "row"  # title of the column with the names of rows


class StudyError(ValueError):
    """A study that cannot run.

    Attributes:
        problems: one line each, with the place, the problem and how to fix it.
    """

    def __init__(self, path: str | Path, problems: Iterable[str]) -> None:
        self.problems = list(dict.fromkeys(problems))
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        super().__init__("\n".join([f"{count} in the study {path}:", *self.problems]))


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_empty_values(cls, given: Any) -> Any:
        if isinstance(given, dict):
            return {key: value for key, value in given.items() if value is not None}
        return given


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    nested = [key for key, value in options.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(f"{nested[0]} is a mapping; write {nested[0]}.name: ...")
    return options


Options = Annotated[dict[str, Any], AfterValidator(_flat)]


class Step(_Part):
    """The work of one process, or an existing checkpoint.

    Attributes:
        config, options: call of ``lavis-mafa train``; options may contain placeholders.
        module, arguments: call of ``python -m`` instead.
        writes: name of the checkpoint that it writes to its folder; "": none.
        checkpoint: an existing checkpoint; nothing is run.
    """

    config: str = ""
    options: Options = {}
    uses: list[str] = []
    module: str = ""
    arguments: list[str | int | float] = []
    writes: str = ""
    checkpoint: str = ""

    @model_validator(mode="after")
    def _one_kind(self) -> Step:
        if sum(map(bool, (self.config, self.module, self.checkpoint))) != 1:
            raise ValueError("expected one of config, module and checkpoint")
        return self

    @property
    def names(self) -> set[str]:
        """Return the placeholders in options and arguments."""
        return placeholders([*self.arguments, *self.options.values()])


class GivenRow(_Part):
    """A row of the file, before it is combined with the values that vary."""

    name: str
    marks: dict[str, Any] = {}
    uses: list[str] = []
    options: Options = {}
    run: str = ""
    source: str = ""


class Column(_Part):
    """A figure of a stage: the mean of ``key`` in its log's last record of a kind and split.

    With kind ``measured``, the record comes from the study's measuring function. ``range`` is
    chance and ceiling of the displayed figure.
    """

    name: str = ""
    title: str = ""
    key: str | list[str] = []
    stage: str = ""
    kind: str = "eval"
    split: str = "test"
    scale: float = 1.0
    digits: int = 1
    range: list[float] = []

    @property
    def keys(self) -> list[str]:
        keys = [self.key] if isinstance(self.key, str) else self.key
        return keys or [self.name]


class Claim(_Part):
    """A claim that one row is better than another with the same seed, in all figures of the
    claim."""

    claim: str
    source: str = ""
    row: str
    than: str
    column: str | list[str]
    better: Literal["higher", "lower"] = "higher"

    @property
    def columns(self) -> list[str]:
        return [self.column] if isinstance(self.column, str) else self.column


class Measure(_Part):
    """A measuring function, ``module:name``, and the shared runs by which it judges."""

    function: str
    judges: list[str] = []


class Paper(_Part):
    """A paper's table."""

    about: str = ""
    columns: list[str]
    rows: list[list[Any]]

    @model_validator(mode="after")
    def _rectangular(self) -> Paper:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{row}: expected {len(self.columns)} cells")
        return self


class StudyFile(_Part):
    """A study file merged with its bases."""

    title: str = ""
    source: str = ""
    about: str = ""
    notes: list[str] = []
    base: str = ""
    folders: str = "shared/seed_{seed}/{name}"
    gallery: str = ""
    headline: str = ""
    parameters: dict[str, Any] = {}
    options: Options = {}
    settings: dict[str, Options | None] = {}
    shared: dict[str, Step] = {}
    stages: dict[str, Step] = {}
    rows: Annotated[list[GivenRow], Field(min_length=1)]
    vary: dict[str, list[Any]] = {}
    titles: dict[str, str] = {}
    columns: dict[str, Column]
    shows: list[str] = []
    tables: dict[str, list[str]] = {}
    measure: Measure | None = None
    claims: list[Claim] = []
    paper: Paper | None = None
    seeds: list[WholeNumber] = [42]
    at_once: Count = 1
    processes: Count = 1


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: unique name in the table.
        cells: the cells before the figures, by the title of the column.
        options: options in addition to the first stage's; for a row with ``run``, options that not
            all rows have.
        run: the shared run that it shows, or whose options it overrides; "": the row has its own
            run for each stage.
        source: place of the system in a paper.
    """

    name: str
    cells: Mapping[str, str]
    options: Mapping[str, Any]
    run: str = ""
    source: str = ""


@dataclass(frozen=True)
class Study:
    """A checked study.

    Attributes:
        at: name of the base or section.
        file: texts and lists of the file.
        columns: the columns that are shown; ``catalogue`` has all columns by name.
    """

    path: Path
    at: str
    file: StudyFile
    shared: Mapping[str, Step]
    stages: Mapping[str, Step]
    rows: Sequence[Row]
    columns: Sequence[Column]
    catalogue: Mapping[str, Column]


def placeholders(values: Iterable[Any]) -> set[str]:
    """Return the names in braces in the texts among some values."""
    texts = [value for value in values if isinstance(value, str)]
    return {name for text in texts for name in PLACEHOLDER.findall(text)}
