"""Judgements by people: whether an image and a caption of another image match.

A file of judgements is a JSON array, a JSON-lines, CSV or TSV file with one row for each judged
pair, or for each answer::

    {"image": "dog.jpg", "caption": "an animal runs", "ratings": [4, 3, 4]}
    {"image": "dog.jpg", "caption_of": "cat.jpg", "caption_index": 0, "yes": 1, "no": 2}

- ``image``: file of the image, as in the data or only the end of that path.
- ``caption``: wording of the caption; or ``caption_of`` and ``caption_index``: the image that it
  was written for, and its place among the captions of that image in the data, from 0.
- ``ratings``: grades, in CSV and TSV separated by spaces; or ``yes`` and ``no``: numbers of votes.

A JSON object ``{"judgements": [...], "rule": {...}}`` also sets the `JudgementRule`. The file of
Flickr8k (Hodosh, Young and Hockenmaier 2013) is read too: an object whose ``expert`` holds lists
``[image, caption_of, caption_index, rating, rating, rating]`` and ``crowd`` lists ``[image,
caption_of, caption_index, yes, no]``.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from lavis_mafa.algorithm.options import check_options, option
from lavis_mafa.datasets.annotation_files import (
    BYTE_ORDER_MARK,
    TEXT_SUFFIXES,
    raw_records,
    require_files,
)
from lavis_mafa.datasets.annotation_rows import Problem, Refusals, short
from lavis_mafa.io.files import is_number
from lavis_mafa.metrics.known_truth import INVALID, UNKNOWN, VALID

LISTS = ("expert", "crowd")  # of the file of Flickr8k
LABELS = "lavis_mafa labels"  # kind of the file that the labelling page saves


@dataclass(frozen=True)
class JudgementRule:
    """When a pair is valid or invalid; it is undecided in between.

    Ratings decide by their median, votes by the share of yes. All rows about a pair are pooled: a
    pair that is rated or voted on in several rows has the answers of all of them. A pair whose
    ratings and votes contradict each other is undecided; if only one of the two decides, it counts.
    """

    lowest: float = option(1.0, "lowest grade of the rating scale")
    highest: float = option(4.0, "highest grade of the rating scale")
    valid_from: float = option(3.0, "a pair whose median rating is at least this is valid")
    invalid_to: float = option(2.0, "a pair whose median rating is at most this is invalid")
    valid_share: float = option(
        2 / 3, "a pair with at least this share of yes is valid", low=0, high=1
    )
    invalid_share: float = option(
        1 / 3, "a pair with at most this share of yes is invalid", low=0, high=1
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not self.lowest <= self.invalid_to < self.valid_from <= self.highest:
            raise ValueError(
                f"need lowest <= invalid_to < valid_from <= highest, got {self.lowest:g}, "
                f"{self.invalid_to:g}, {self.valid_from:g}, {self.highest:g}"
            )
        if not self.invalid_share < self.valid_share:
            raise ValueError(
                f"need invalid_share < valid_share, got {self.invalid_share:g} and "
                f"{self.valid_share:g}"
            )

    def verdict(self, answers: Answers) -> int:
        """Return `VALID`, `INVALID`, or `UNKNOWN` for an undecided pair."""
        found = {self._by_ratings(answers.ratings), self._by_votes(answers.yes, answers.no)}
        found.discard(UNKNOWN)
        return found.pop() if len(found) == 1 else UNKNOWN

    def _by_ratings(self, ratings: Collection[float]) -> int:
        if not ratings:
            return UNKNOWN
        median = statistics.median(ratings)
        return _place(median, self.invalid_to, self.valid_from)

    def _by_votes(self, yes: int, no: int) -> int:
        if not yes + no:
            return UNKNOWN
        return _place(yes / (yes + no), self.invalid_share, self.valid_share)


def _place(value: float, invalid_to: float, valid_from: float) -> int:
    return VALID if value >= valid_from else INVALID if value <= invalid_to else UNKNOWN


class Answers(NamedTuple):
    """What people answered about a pair: grades, and numbers of votes."""

    ratings: tuple[float, ...] = ()
    yes: int = 0
    no: int = 0

    def pooled(self, other: Answers) -> Answers:
        """Return the answers of both."""
        return Answers(self.ratings + other.ratings, self.yes + other.yes, self.no + other.no)


class Judgement(NamedTuple):
    """One row: the pair, with either ``caption`` or ``caption_of`` and ``caption_index``."""

    where: str
    image: str
    caption: str | None
    caption_of: str | None
    caption_index: int | None
    answers: Answers


@dataclass(frozen=True)
class Judgements:
    """The rows of a file and the rule by which they decide."""

    path: str
    rows: list[Judgement]
    rule: JudgementRule = field(default_factory=JudgementRule)


def read_judgements(path: str | os.PathLike[str]) -> Judgements:
    """Read a file of judgements; for the formats see `lavis_mafa.datasets.judgements`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming the rows that cannot be used and why; or if there is no row.
    """
    file = require_files([path], suffixes=TEXT_SUFFIXES)[0]
    document = _object(file)
    if document is None:
        columns, rule = _Columns(), JudgementRule()
        records: Iterable[tuple[str, Any] | Problem] = raw_records(file, columns)
    else:
        records, rule = _records_of(document), _rule(document, file)
    rows: list[Judgement] = []
    refused = Refusals()
    for record in records:
        one = record if isinstance(record, Problem) else _judgement(record[0], record[1], rule)
        if isinstance(one, Problem):
            refused.add(f"{one.where}: {one.message}")
        else:
            rows.append(one)
    refused.end(f"{file}: {refused.count} of {len(rows) + refused.count} judgements")
    if not rows:
        raise ValueError(f"{file} has no judgements")
    return Judgements(str(file), rows, rule)


def has_judgements(path: str | os.PathLike[str]) -> bool:
    """Return whether a file has the form of judgements: not a JSON list of lists, as
    ``run.truth_file`` names."""
    file = Path(path)
    if file.suffix.lower() != ".json":
        return file.suffix.lower() in TEXT_SUFFIXES
    with open(file, "rb") as stream:
        start = stream.read(1024).removeprefix(BYTE_ORDER_MARK)
    return re.match(rb"\s*(\[\s*)?\{", start) is not None


def _object(path: Path) -> dict[str, Any] | None:
    """Return the content of a file that is one JSON object with a list of judgements."""
    if path.suffix.lower() != ".json":
        return None
    try:
        content = json.loads(path.read_bytes().removeprefix(BYTE_ORDER_MARK))
    except (ValueError, RecursionError):
        return None  # the reader of records says what is wrong
    if isinstance(content, dict) and content.get("kind") == LABELS:
        raise ValueError(
            f"{path} has the answers of a labelling page, which name samples by number; expected "
            "judgements, which name image files and captions: convert it with "
            "`lavis-mafa label judgements`"
        )
    lists = {"judgements", *LISTS}
    return content if isinstance(content, dict) and lists.intersection(content) else None


def _rule(document: Mapping[str, Any], path: Path) -> JudgementRule:
    given = document.get("rule", {})
    known = [one.name for one in fields(JudgementRule)]
    if not isinstance(given, dict) or not set(given) <= set(known):
        raise ValueError(
            f"{path}: rule: expected an object with some of {', '.join(known)}, got {short(given)}"
        )
    wrong = [name for name, value in given.items() if not is_number(value)]
    if wrong:
        raise ValueError(f"{path}: rule.{wrong[0]}: {short(given[wrong[0]])}, expected a number")
    try:
        return JudgementRule(**given)
    except ValueError as error:
        raise ValueError(f"{path}: rule: {error}") from error


def _records_of(document: Mapping[str, Any]) -> Iterator[tuple[str, Any] | Problem]:
    for name in ("judgements", *LISTS):
        rows = document.get(name, [])
        if not isinstance(rows, list):
            yield Problem(name, f"expected a list, got {short(rows)}")
            continue
        for number, row in enumerate(rows, 1):
            where = f"{name}, row {number}"
            yield (where, row) if name not in LISTS else _flickr8k(where, name, row)


def _flickr8k(where: str, name: str, row: Any) -> tuple[str, Any] | Problem:
    """Return a row of the file of Flickr8k as a record."""
    votes = name == "crowd"
    if not isinstance(row, list) or len(row) < 4 or (votes and len(row) != 5):
        answers = "yes votes, no votes" if votes else "ratings"
        return Problem(
            where, f"expected [image, caption_of, caption_index, {answers}], got {short(row)}"
        )
    record = dict(zip(("image", "caption_of", "caption_index"), row, strict=False))
    record |= {"yes": row[3], "no": row[4]} if votes else {"ratings": row[3:]}
    return where, record


class _Columns:
    """The header of a CSV or TSV file of judgements."""

    image_key: str | None = None  # only used for COCO's caption files, which have no judgements

    def choose(self, names: Collection[str]) -> str | None:
        """Return what is wrong with the header, None if nothing is."""
        pair = "image" in names and (
            "caption" in names or {"caption_of", "caption_index"} <= {*names}
        )
        if pair and ("ratings" in names or {"yes", "no"} <= {*names}):
            return None
        return (
            "expected the columns image, caption (or caption_of and caption_index) and ratings (or "
            f"yes and no), found {', '.join(map(short, list(names)[:10]))}"
        )


def _judgement(where: str, record: Any, rule: JudgementRule) -> Judgement | Problem:
    if not isinstance(record, dict):
        return Problem(
            where, f"expected an object with an image and a caption, got {short(record)}"
        )
    # An empty cell of CSV is an absent value.
    given = {key: value for key, value in record.items() if value not in (None, "")}
    try:
        image = _text(given, "image")
        caption = _text(given, "caption") if "caption" in given else None
        owner, index = None, None
        if caption is None:
            owner, index = _text(given, "caption_of"), _count(given, "caption_index")
        elif "caption_of" in given or "caption_index" in given:
            raise ValueError("give either caption, or caption_of and caption_index")
        return Judgement(where, image, caption, owner, index, _answers(given, rule))
    except KeyError as error:
        return Problem(
            where, f"no {error.args[0]!r}, found {', '.join(map(short, given)) or 'nothing'}"
        )
    except ValueError as error:
        return Problem(where, str(error))


def _answers(given: Mapping[str, Any], rule: JudgementRule) -> Answers:
    ratings = given.get("ratings", [])
    if isinstance(ratings, str):
        ratings = [_number(one) for one in ratings.split()]
    inside = isinstance(ratings, list) and all(
        is_number(one) and rule.lowest <= one <= rule.highest for one in ratings
    )
    if not inside:
        raise ValueError(
            f"'ratings': {short(given['ratings'])}, expected grades from {rule.lowest:g} to "
            f"{rule.highest:g}"
        )
    voted = "yes" in given or "no" in given
    yes, no = (_count(given, key) if voted else 0 for key in ("yes", "no"))
    if not len(ratings) + yes + no:
        raise ValueError("nobody answered: expected ratings, or yes and no votes")
    return Answers(tuple(map(float, ratings)), yes, no)


def _text(given: Mapping[str, Any], key: str) -> str:
    value = given[key]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key!r}: {short(value)}, expected text")
    return value


def _count(given: Mapping[str, Any], key: str) -> int:
    value = _number(given[key])
    if not is_number(value) or value < 0 or value != int(value):
        raise ValueError(f"{key!r}: {short(given[key])}, expected a whole number from 0")
    return int(value)


def _number(value: Any) -> Any:
    """Return a cell of CSV as a number, if it is one."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
