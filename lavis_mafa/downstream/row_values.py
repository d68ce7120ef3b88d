"""Read ids, answers and captions as annotation files of downstream tasks have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lavis_mafa.data.annotation_rows import Problem, Refusals, short
from lavis_mafa.io.files import is_number

Id = int | str


def text_of(value: Any) -> str:
    """Return a text; a number is its digits.

    Raises:
        ValueError: if it is blank, holds half of a surrogate pair, or is anything else.
    """
    if isinstance(value, str) and value.strip():
        if not value.isascii():
            value.encode("utf-8")  # raises a ValueError for half of a surrogate pair
        return value
    if is_number(value):
        return str(int(value) if value == int(value) else value)
    raise ValueError(f"expected a text, got {short(value)}")


def answers_of(value: Any) -> list[str]:
    """Return the answers of all annotators, or a single one: texts, or mappings with ``answer``.

    One of several annotators may have left his answer blank. Empty if all are blank or null.

    Raises:
        ValueError: if one of them is not a text.
    """
    given = [one.get("answer") if isinstance(one, Mapping) else one for one in _listed(value)]
    found = [one if _is_blank(one) else text_of(one) for one in given if one is not None]
    return [] if all(map(_is_blank, found)) else found


def read_rows(what: str, rows: Iterable[Any], read: Callable[[Any], Any]) -> list[Any]:
    """Return what ``read`` finds in every row.

    Args:
        what: the rows, for the message.

    Raises:
        ValueError: listing rows that cannot be read.
    """
    refused, found = Refusals(), []
    for number, row in enumerate(rows):
        try:
            found.append(read(row))
        except KeyError as error:
            refused.add("", Problem(f"row {number}", f"lacks {error}", short(row)))
        except (AttributeError, TypeError, ValueError) as error:
            refused.add("", Problem(f"row {number}", str(error), short(row)))
    refused.end(what)
    return found


def references_of(value: Any) -> list[str]:
    """Return the captions of an image that are neither null nor blank; may be empty.

    Raises:
        ValueError: if one of them is not a text.
    """
    given = [one for one in _listed(value) if one is not None and one == one]  # not NaN
    return [text_of(one) for one in given if not _is_blank(one)]


def id_of(value: Any) -> Id:
    """Return an id as it is.

    Raises:
        ValueError: if it is neither a whole number nor a text.
    """
    if is_number(value) and value == int(value):
        return int(value)
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError(f"expected a whole number or a text, got {short(value)}")


def as_id(value: Any) -> Id:
    """Return an id as in COCO's files: an int if it is a number, ignoring leading zeros."""
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
    return int(text) if text.isascii() and text.isdigit() else text


class Ids:
    """Ids as `as_id` reads them; finds different ids that are read as one."""

    def __init__(self) -> None:
        self._given: dict[Id, tuple[str, Any]] = {}

    def add(self, value: Any, owner: Any = None) -> str | None:
        """Add an id; return what is wrong with it, None if nothing is.

        Args:
            owner: what has the id; one owner may have it several times.
        """
        first, first_owner = self._given.setdefault(as_id(value), (str(value), owner))
        if first != str(value):
            why = f"{value!r} and {first!r}, which occurs before, are the same number"
            return f"{why}; give them ids that differ"
        if first_owner != owner:
            return (
                f"{value!r} is the id of {short(first_owner)} as well; give each an id of its own"
            )
        return None


def by_id(items: Iterable[tuple[Any, Any]]) -> dict[Id, Any]:
    """Return what belongs to every id, by `as_id`.

    Raises:
        ValueError: if different ids are the same number.
    """
    ids, found = Ids(), {}
    for one, value in items:
        if wrong := ids.add(one):
            raise ValueError(f"id {wrong}")
        found[as_id(one)] = value
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()
