"""Statements about two scenes of the toy world, true or false, in the manner of NLVR2.

| kind | statement | true if |
|---|---|---|
| `both` | both show a red circle; both are on black | both pictures do |
| `one` | only one shows a red circle | exactly one does |
| `none` | neither is on black | neither is |
| `side` | the left shows a big cross | the left one does |
| `more` | the right has more circles | it has more than the left |
| `same` | both have the same background | they have |

Sentences are short because the tiny models spell words that captions do not have.

The content is drawn first, then the label, then two pictures for both, so that a text does not
reveal its label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

from lavis_mafa.toyworld.world import BACKGROUNDS, COLOURS, PLURALS, SHAPES, SIZES, Structured

STATEMENT_TYPES = ("both", "one", "none", "side", "more", "same")

_VALUES = {"size": SIZES, "colour": COLOURS, "shape": SHAPES}  # in word order
_TRIES = 200

Numbers = npt.NDArray[np.int64]
# A property of each picture, (N,); whether a statement is true of its values left and right;
# and the statement's words.
Claim = tuple[Numbers, Callable[[int, int], bool], str]


@dataclass(frozen=True)
class Statement:
    """A text about the scenes with indices ``left`` and ``right``, and whether it is true."""

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
    """Make ``number`` statements about pairs of different scenes.

    Kinds are equally frequent, and so are true and false ones of each kind (up to one), in random
    order. Among the pairs that make a statement true or false, the ways to do so (only the left has
    it, only the right, neither) are equally likely. The same seed gives the same statements.

    Raises:
        ValueError: if the scenes are too few, or too similar, for a kind.
    """
    world = _World(scenes)
    plan = [(kind, label) for kind in kinds for label in (True, False)]
    start = int(rng.integers(len(plan)))  # so that the remainder goes to any kind
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
            continue  # a text that is always or never true would reveal its label
        a, b = ways[label][int(rng.integers(len(ways[label])))]
        left = int(rng.choice(pools[a]))
        right = int(rng.choice(pools[b][pools[b] != left]))
        return Statement(left, right, text, label, kind)
    raise ValueError(
        f"{len(world.scenes)} pictures are too few, or too similar, for statements of kind "
        f"{kind!r} that are true of some pairs and false of others; use more pictures"
    )


class _World:
    """Finds the scenes that fit a description."""

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
        """Draw a property; return which scenes have it, (N,), and its words for one and for two."""
        if rng.random() < 0.3:
            ground = int(self.scenes["background"][int(rng.integers(len(self.scenes)))])
            found = (self.scenes["background"] == ground).astype(np.int64)
            words = f"on {BACKGROUNDS[ground - 1]}"
            return found, f"is {words}", f"are {words}"
        cell = self._cell(rng)
        chances = {"size": 0.3, "colour": 0.7, "shape": 1.0}
        said = {name: cell[name] if rng.random() < p else 0 for name, p in chances.items()}
        words = " ".join(_VALUES[name][k - 1] for name, k in said.items() if k)
        present = self.fitting(said["shape"], said["colour"], said["size"]) > 0
        return present.astype(np.int64), f"shows a {words}", f"show a {words}"

    def _cell(self, rng: np.random.Generator) -> dict[str, int]:
        """Draw an object of a random scene."""
        scene = self.scenes[int(rng.choice(self.objects))]
        cell = int(rng.choice(np.flatnonzero(scene["shape"])))
        return {name: int(scene[name][cell]) for name in _VALUES}

    def _fitting(self, shape: int, colour: int, size: int) -> Numbers:
        """Count the objects of each scene that fit, (N,); an attribute of 0 is not described."""
        fits = self.scenes["shape"] > 0
        for name, value in (("shape", shape), ("colour", colour), ("size", size)):
            if value:
                fits = fits & (self.scenes[name] == value)
        return np.asarray(fits.sum(axis=1), np.int64)
