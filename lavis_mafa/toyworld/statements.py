"""Statements about two scenes of the toy world, true or false, in the manner of NLVR2.

| kind | statement | true if |
|---|---|---|
| `both` | both show a red circle; both are on black | left and right picture do |
| `one` | only one shows a red circle | one of them does, the other not |
| `none` | neither is on black | no one does |
| `side` | the left shows a big cross | that one does |
| `more` | the right has more circles | it has more than the other |
| `same` | both have the same background | so it is |

Sentences are short because the tiny models spell words that captions do not have.

What is said is drawn first, then whether it is to be true, then two pictures for that: a text alone
says nothing of its truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

from lavis_mafa.toyworld.world import (
    BACKGROUNDS,
    COLOURS,
    PLURALS,
    SHAPES,
    SIZES,
    Structured,
)

STATEMENT_TYPES = ("both", "one", "none", "side", "more", "same")

_VALUES = {"size": SIZES, "colour": COLOURS, "shape": SHAPES}  # in the order of speaking
_TRIES = 200

Numbers = npt.NDArray[np.int64]
# What a statement looks at in each picture, (N,); when it is true of two of these; and its words.
Claim = tuple[Numbers, Callable[[int, int], bool], str]


@dataclass(frozen=True)
class Statement:
    """A text about the scenes ``left`` and ``right`` (their numbers), and whether it is true."""

    left: int
    right: int
    text: str
    label: bool
    statement_type: str


def make_statements(
    scenes: Structured,
    number: int,
    rng: np.random.Generator,
    kinds: Sequence[str] = STATEMENT_TYPES,
) -> list[Statement]:
    """``number`` statements about pairs out of the n scenes, the two always different ones.

    Kinds come equally often, and within each kind true and false ones, all up to one; in random
    order. Of the pairs that give a statement its truth, those that do it in different ways (only
    the left has it, only the right, neither) are equally likely. The same seed gives the same
    statements.

    Raises ValueError for an unknown kind, or if the scenes are too few, or too much alike, for one.
    """
    if not kinds or not set(kinds) <= set(STATEMENT_TYPES):
        raise ValueError(f"kinds of statements: {kinds}, expected some of {STATEMENT_TYPES}")
    world = _World(scenes)
    plan = [(kind, label) for kind in kinds for label in (True, False)]
    start = int(rng.integers(len(plan)))  # so that no kind always gets what is left over
    turns = [plan[(start + i) % len(plan)] for i in rng.permutation(number)]
    return [_state(world, kind, label, rng) for kind, label in turns]


def _state(world: _World, kind: str, label: bool, rng: np.random.Generator) -> Statement:
    for _ in range(_TRIES):
        values, relation, text = world.claim(kind, rng)
        pools = {int(v): np.flatnonzero(values == v) for v in np.unique(values)}
        ways: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for a, b in product(pools, pools):
            if a != b or len(pools[a]) > 1:
                ways[relation(a, b)].append((a, b))
        if not ways[True] or not ways[False]:
            continue  # a text that is always true, or never, would give itself away
        a, b = ways[label][int(rng.integers(len(ways[label])))]
        left = int(rng.choice(pools[a]))
        right = int(rng.choice(pools[b][pools[b] != left]))
        return Statement(left, right, text, label, kind)
    raise ValueError(
        f"{len(world.scenes)} pictures are too few, or too much alike, for statements of kind "
        f"{kind!r} that some pairs make true and others false; make more pictures"
    )


class _World:
    """Looks scenes up by what is said of them."""

    def __init__(self, scenes: Structured) -> None:
        self.scenes = scenes
        self.objects = np.flatnonzero((scenes["shape"] > 0).any(axis=1))
        self.fitting = lru_cache(maxsize=None)(self._fitting)

    def claim(self, kind: str, rng: np.random.Generator) -> Claim:
        if kind == "same":
            text = "both have the same background"
            return self.scenes["background"].astype(np.int64), lambda a, b: a == b, text
        if kind == "more":
            return self._more(rng)
        found, one, several = self._seen(rng)
        if kind == "both":
            return found, lambda a, b: bool(a and b), f"both {several}"
        if kind == "one":
            return found, lambda a, b: a != b, f"only one {one}"
        if kind == "none":
            return found, lambda a, b: not (a or b), f"neither {one}"
        if rng.random() < 0.5:
            return found, lambda a, b: bool(a), f"the left {one}"
        return found, lambda a, b: bool(b), f"the right {one}"

    def _more(self, rng: np.random.Generator) -> Claim:
        cell = self._cell(rng)
        shape = int(cell["shape"]) if rng.random() < 0.7 else 0
        counts = self.fitting(shape, 0, 0)
        what = PLURALS[SHAPES[shape - 1]] if shape else "objects"
        if rng.random() < 0.5:
            return counts, lambda a, b: a > b, f"the left has more {what}"
        return counts, lambda a, b: b > a, f"the right has more {what}"

    def _seen(self, rng: np.random.Generator) -> tuple[Numbers, str, str]:
        """Whether each scene has something (N,), and how one picture and several are said to."""
        if rng.random() < 0.3:
            ground = int(self.scenes["background"][int(rng.integers(len(self.scenes)))])
            found = (self.scenes["background"] == ground).astype(np.int64)
            words = f"on {BACKGROUNDS[ground - 1]}"
            return found, f"is {words}", f"are {words}"
        cell = self._cell(rng)
        chances = {"size": 0.3, "colour": 0.7, "shape": 1.0}
        said = {name: cell[name] if rng.random() < p else 0 for name, p in chances.items()}
        words = " ".join(_VALUES[name][k - 1] for name, k in said.items() if k)
        there = self.fitting(said["shape"], said["colour"], said["size"]) > 0
        return there.astype(np.int64), f"shows a {words}", f"show a {words}"

    def _cell(self, rng: np.random.Generator) -> dict[str, int]:
        """An object of a random scene."""
        scene = self.scenes[int(rng.choice(self.objects))]
        cell = int(rng.choice(np.flatnonzero(scene["shape"])))
        return {name: int(scene[name][cell]) for name in _VALUES}

    def _fitting(self, shape: int, colour: int, size: int) -> Numbers:
        """How many objects of each scene fit, (N,); 0 means that nothing is said."""
        fits = self.scenes["shape"] > 0
        for name, value in (("shape", shape), ("colour", colour), ("size", size)):
            if value:
                fits = fits & (self.scenes[name] == value)
        return fits.sum(axis=1)
