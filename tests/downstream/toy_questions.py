"""Questions about scenes of the toy world, with exact answers.

Six kinds, in plain words (no synonyms), with one-word answers:

| question_type | question | answers | answer_type |
|---|---|---|---|
| `exists` | is there a big red circle? | yes, no (equally often) | yes/no |
| `colour`, `shape`, `size` | what colour is the big circle? | the attribute | other |
| `count` | how many circles are there? | 0 to 3 | number |
| `background` | what colour is the background? | its colour | other |

`answer_type` has the names of VQA v2. Counts are digits, because VQA v2's scoring converts number
words to digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lavis_mafa.toyworld.world import (
    BACKGROUNDS,
    COLOURS,
    MAX_OBJECTS,
    PLURALS,
    SHAPES,
    SIZES,
    Structured,
)

QUESTION_TYPES = ("exists", "colour", "shape", "size", "count", "background")

ATTRIBUTES = ("size", "colour", "shape")  # in word order
_VALUES = {"size": SIZES, "colour": COLOURS, "shape": SHAPES}
_TRIES = 20

Thing = dict[str, str]  # attribute -> value, of an object or a description
T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """A question about one scene, with its only correct answer."""

    text: str
    answer: str
    question_type: str

    @property
    def answer_type(self) -> str:
        """`yes/no`, `number` or `other`, as in VQA v2."""
        return {"exists": "yes/no", "count": "number"}.get(self.question_type, "other")


def possible_answers() -> list[str]:
    """Return every possible answer, sorted."""
    counts = [str(number) for number in range(MAX_OBJECTS + 1)]
    return sorted(["yes", "no", *counts, *SHAPES, *COLOURS, *SIZES, *BACKGROUNDS])


def make_questions(
    scenes: Structured, per_scene: int, rng: np.random.Generator
) -> list[list[Question]]:
    """Make questions about each of n scenes, different within a scene: n lists of `per_scene`.

    The kinds take turns in random order. A kind that is ambiguous for a scene (which colour, of two
    circles?) is skipped. The same seed gives the same questions.

    Args:
        per_scene: at most 12; more could not always be different.
    """
    things = [_things(scene) for scene in scenes]
    grounds = [BACKGROUNDS[scene["background"] - 1] for scene in scenes]
    questions = []
    for here, ground in zip(things, grounds, strict=True):
        found: dict[str, Question] = {}
        turns: list[str] = []
        while len(found) < per_scene:
            if not turns:
                turns = [QUESTION_TYPES[i] for i in rng.permutation(len(QUESTION_TYPES))]
            kind = turns.pop()
            question = _ask(kind, here, ground, _pick(things, rng), rng)
            if question is not None:
                found.setdefault(question.text, question)
        questions.append(list(found.values()))
    return questions


def _ask(
    kind: str, here: list[Thing], ground: str, elsewhere: list[Thing], rng: np.random.Generator
) -> Question | None:
    if kind == "background":
        return Question("what colour is the background?", ground, kind)
    if kind == "count":
        return _count(here, elsewhere, rng)
    if kind == "exists":
        return _exists(here, elsewhere, rng)
    return _attribute(kind, here, rng)


def _exists(here: list[Thing], elsewhere: list[Thing], rng: np.random.Generator) -> Question:
    """Ask for an object; yes and no are equally likely.

    An absent object mixes the attributes of an object of this scene and one of another, so that
    objects are asked for about equally often with both answers, and no question reveals its answer.
    """
    named = [a for a in ATTRIBUTES if a == "shape" or rng.random() < 0.6]
    answer, said = "yes", _said(_pick(here, rng), named)
    if rng.random() < 0.5:
        answer = "no"
        for _ in range(_TRIES):
            one, other = _pick(here, rng), _pick(elsewhere, rng)
            said = {a: (one if rng.random() < 0.5 else other)[a] for a in named}
            if not _fitting(said, here):
                break
        while _fitting(said, here):  # in worlds where nearly all objects are alike
            said = {a: _pick(_VALUES[a], rng) for a in named}
    return Question(f"is there a {_spoken(said)}?", answer, "exists")


def _attribute(attribute: str, here: list[Thing], rng: np.random.Generator) -> Question | None:
    """Ask for an attribute of an object that other attributes identify; None if there is none."""
    first, second = (a for a in ATTRIBUTES if a != attribute)
    unique = []
    for thing in here:
        for named in ([first], [second], [first, second]):
            said = _said(thing, named)
            if len(_fitting(said, here)) == 1:
                unique.append((said, thing[attribute]))
    if not unique:
        return None
    said, answer = _pick(unique, rng)
    return Question(f"what {attribute} is the {_spoken(said)}?", answer, attribute)


def _count(here: list[Thing], elsewhere: list[Thing], rng: np.random.Generator) -> Question:
    """Count all objects, or those of a shape, which may be absent."""
    draw = rng.random()
    if draw < 0.3:
        return Question("how many objects are there?", str(len(here)), "count")
    shape = _pick(here if draw < 0.75 else elsewhere, rng)["shape"]
    number = len(_fitting({"shape": shape}, here))
    return Question(f"how many {PLURALS[shape]} are there?", str(number), "count")


def _said(thing: Thing, named: Sequence[str]) -> Thing:
    return {a: thing[a] for a in named}


def _fitting(said: Thing, things: list[Thing]) -> list[Thing]:
    return [t for t in things if all(t[a] == value for a, value in said.items())]


def _spoken(said: Thing) -> str:
    return " ".join(said[a] for a in ATTRIBUTES if a in said) + (
        "" if "shape" in said else " object"
    )


def _things(scene: np.void) -> list[Thing]:
    """Return the objects of a scene in words."""
    return [
        {a: _VALUES[a][scene[a][cell] - 1] for a in ATTRIBUTES}
        for cell in np.flatnonzero(scene["shape"])
    ]


def _pick(values: Sequence[T], rng: np.random.Generator) -> T:
    return values[int(rng.random() * len(values))]
