"""A small world of coloured shapes, with captions and the exact truth of every pair.

A scene is a grid of cells, one to three of them holding an object, on a coloured background. Its
objects are independent, or given by one of several topics, as pictures on the web come in clusters
(`WorldConfig.topics`). A caption mentions all or some of the objects. It is *valid* for a scene if
the objects it mentions can be assigned to distinct objects of the scene (for an exact count: if
exactly that many objects fit) and the background, where mentioned, agrees.

Scenes and captions are NumPy structured arrays, one record each, so that they can be indexed,
repeated and saved like any array. Attributes are small integers: k means the k-th of `SHAPES`,
`COLOURS`, `SIZES` or `BACKGROUNDS`, counted from 1; 0 means "no object" in a scene and "not
mentioned" in a caption.

Scene fields: `background` (), and `shape`, `colour`, `size` of shape (cells,), row by row.
Caption fields: `background` (), `count` () (0: no count), and `shape`, `colour`, `size` of shape
(mentions,). A mentioned object always has a shape; a count refers only to mention 0.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

Structured = npt.NDArray[np.void]

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = ("red", "green", "blue", "yellow", "purple", "cyan")
SIZES = ("small", "big")
BACKGROUNDS = ("black", "white", "grey", "brown")
MAX_OBJECTS = 3
_MAX_IMAGE_SIZE = 64
_MAX_TOPICS = 100_000
_TOPIC_SEED = 7  # of the topics, which are the same in all splits and for all seeds of the data

# Every word of a caption has synonyms, and no word has two meanings.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "circle": ("disc", "dot"),
    "square": ("box", "block"),
    "triangle": ("wedge", "pyramid"),
    "cross": ("plus",),
    "circles": ("discs", "dots"),
    "squares": ("boxes", "blocks"),
    "triangles": ("wedges", "pyramids"),
    "crosses": ("pluses",),
    "red": ("crimson", "scarlet"),
    "green": ("emerald", "verdant"),
    "blue": ("azure", "cobalt"),
    "yellow": ("golden", "lemon"),
    "purple": ("violet", "magenta"),
    "cyan": ("turquoise", "aqua"),
    "small": ("tiny", "little"),
    "big": ("large", "huge"),
    "black": ("ebony", "jet"),
    "white": ("ivory", "chalk"),
    "grey": ("gray", "ashen"),
    "brown": ("umber", "chestnut"),
    "one": ("single",),
    "two": ("twin",),
    "three": ("triple",),
    "and": ("with",),
    "on": ("over",),
}
_NUMBERS = ("one", "two", "three")
PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}


@dataclass(frozen=True)
class WorldConfig:
    """The appearance of the world, and how captions describe it.

    The defaults are the preset `dense`. With `topics` every scene has `max_objects` objects and
    belongs to a topic, which fixes the background, the colour of every object and the shape of all
    but the last; that shape, all sizes and the cells are free. `p_*` are probabilities in [0, 1];
    an attribute's value has probability proportional to rank ** -zipf (0: uniform) for shape,
    colour and background, and sizes are uniform. Raises ValueError, naming every field that is out
    of range.
    """

    cell_size: int = 16  # pixels
    grid: int = 2  # cells per side
    max_objects: int = 2
    p_one_object: float = 0.2  # 2 to max_objects share the remaining probability equally
    p_size: float = 0.5  # an object's size is mentioned
    p_colour: float = 0.95  # an object's colour is mentioned; see make_captions for single objects
    p_background: float = 0.4  # the background is mentioned
    p_all_objects: float = 0.85  # all objects are mentioned, otherwise a random part of them
    p_count: float = 0.02  # the caption is an exact count
    zipf: float = 0.5
    synonym_rate: float = 0.3  # share of the words replaced by a synonym
    position_jitter: float = 0.06  # uniform, +- this part of a cell
    colour_jitter: float = 16.0  # uniform, +- this much of 255 per channel
    noise_sd: float = 5.0  # pixel noise, standard deviation of 255
    topics: int = 0  # kinds of scenes, equally frequent; 0: none, objects are independent
    p_brief: float = 0.0  # the caption mentions no size

    def __post_init__(self) -> None:
        problems = []

        def require(name: str, low: float, high: float, whole: bool = False) -> None:
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if (
                not is_number
                or (whole and not float(value).is_integer())
                or not low <= value <= high
            ):
                kind = "a whole number" if whole else "a number"
                problems.append(f"{name} is {value!r}, expected {kind} from {low} to {high}")

        require("cell_size", 8, _MAX_IMAGE_SIZE, whole=True)
        require("grid", 1, _MAX_IMAGE_SIZE // 8, whole=True)
        if not problems and self.cell_size * self.grid > _MAX_IMAGE_SIZE:
            problems.append(
                f"cell_size * grid is {self.cell_size * self.grid} px, expected at most "
                f"{_MAX_IMAGE_SIZE}; make cell_size or grid smaller"
            )
        cells = 1 if problems else self.grid**2
        require("max_objects", 1, min(MAX_OBJECTS, cells) if not problems else MAX_OBJECTS, True)
        for field in dataclasses.fields(self):
            if field.name.startswith("p_") or field.name == "synonym_rate":
                require(field.name, 0, 1)
        require("topics", 0, _MAX_TOPICS, whole=True)
        require("zipf", 0, 10)
        require("position_jitter", 0, 0.1)  # above it a big shape would leave its cell
        require("colour_jitter", 0, 20)  # above it colours become too similar
        require("noise_sd", 0, 255)
        if problems:
            raise ValueError("toy world: " + "; ".join(problems))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> WorldConfig:
        """The preset `dense`, `sparse` or `clustered`, with some fields changed.

        Raises ValueError for an unknown preset, TypeError for an unknown field.
        """
        if name not in PRESETS:
            raise ValueError(f"toy world: preset is {name!r}, expected one of {sorted(PRESETS)}")
        return dataclasses.replace(PRESETS[name], **changes)

    @property
    def cells(self) -> int:
        return self.grid**2

    @property
    def image_size(self) -> int:
        """Side of an image in pixels."""
        return self.cell_size * self.grid

    def detailed(self) -> WorldConfig:
        """This world with captions that mention everything in a scene."""
        everything: dict[str, Any] = dict.fromkeys(
            ("p_size", "p_colour", "p_background", "p_all_objects"), 1.0
        )
        return dataclasses.replace(self, **everything, p_count=0.0, p_brief=0.0)


PRESETS = {
    "dense": WorldConfig(),
    "sparse": WorldConfig(
        p_size=0.9, p_colour=1.0, p_background=0.8, p_all_objects=0.95, p_count=0.01, zipf=0.0
    ),
    "clustered": WorldConfig(
        topics=512,
        max_objects=3,
        p_brief=0.2,
        p_size=0.8,
        p_colour=1.0,
        p_background=0.5,
        p_all_objects=1.0,
        p_count=0.0,
        zipf=0.0,
    ),
}


def _scene_dtype(cells: int) -> np.dtype[np.void]:
    """Return the record type of a scene with that many cells."""
    per_cell = [(name, "i1", (cells,)) for name in ("shape", "colour", "size")]
    return np.dtype([("background", "i1"), *per_cell])


def _caption_dtype(mentions: int) -> np.dtype[np.void]:
    """Return the record type of a caption that can mention that many objects."""
    per_mention = [(name, "i1", (mentions,)) for name in ("shape", "colour", "size")]
    return np.dtype([("background", "i1"), ("count", "i1"), *per_mention])


def make_scenes(
    config: WorldConfig, n: int, rng: np.random.Generator, topics: range | None = None
) -> Structured:
    """Draw n scenes, (n,), fields as in `_scene_dtype`.

    Args:
        topics: the topics that scenes are drawn from; None: all of the config.
    """
    slots = config.max_objects
    more = 1 + (rng.random(n) * max(slots - 1, 1)).astype(np.int64)  # 1 .. slots - 1 further ones
    objects = np.where((rng.random(n) < config.p_one_object) | (slots == 1), 1, 1 + more)
    where = np.argsort(rng.random((n, config.cells)), axis=1, kind="stable")[:, :slots]
    drawn = _draw_objects(config, (n, slots), rng)
    background = _draw_attribute(len(BACKGROUNDS), config.zipf, (n,), rng)
    if config.topics:
        chosen = rng.choice(np.arange(config.topics) if topics is None else topics, n)
        fixed, background = _topics(config)
        background = background[chosen]
        drawn["colour"] = fixed["colour"][chosen]
        drawn["shape"][:, :-1] = fixed["shape"][chosen, :-1]
        objects[:] = slots
    present = np.arange(slots) < objects[:, None]

    scenes = np.zeros(n, dtype=_scene_dtype(config.cells))
    for name, values in drawn.items():
        np.put_along_axis(scenes[name], where, np.where(present, values, 0).astype("i1"), axis=1)
    scenes["background"] = background
    return scenes


def _topics(config: WorldConfig) -> tuple[dict[str, npt.NDArray[np.int64]], npt.NDArray[np.int64]]:
    """Return the objects, each (topics, max_objects), and backgrounds, (topics,), of all topics."""
    rng = np.random.default_rng(_TOPIC_SEED)
    objects = _draw_objects(config, (config.topics, config.max_objects), rng)
    return objects, _draw_attribute(len(BACKGROUNDS), config.zipf, (config.topics,), rng)


def _draw_objects(
    config: WorldConfig, shape: tuple[int, int], rng: np.random.Generator
) -> dict[str, npt.NDArray[np.int64]]:
    """Draw shape, colour and size of objects, independently."""
    return {
        "shape": _draw_attribute(len(SHAPES), config.zipf, shape, rng),
        "colour": _draw_attribute(len(COLOURS), config.zipf, shape, rng),
        "size": _draw_attribute(len(SIZES), 0.0, shape, rng),
    }


def _draw_attribute(
    values: int, zipf: float, shape: tuple[int, ...], rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw from 1 .. values, with probability proportional to value ** -zipf."""
    edges = np.cumsum(np.arange(1, values + 1, dtype=np.float64) ** -zipf)
    drawn = np.searchsorted(edges[:-1], rng.random(shape) * edges[-1], side="right")
    return np.asarray(1 + drawn, dtype=np.int64)


def make_captions(
    config: WorldConfig, scenes: Structured, rng: np.random.Generator
) -> tuple[Structured, list[str]]:
    """Make one caption per scene: records (n,), fields as in `_caption_dtype`, and texts.

    For several captions per scene pass `np.repeat(scenes, k)`. Mentions are in random order. A
    count refers to all objects that share a random object's shape, and names only attributes that
    these have in common, as in "two circles". The only object of a caption gets a second draw for
    its colour, because a caption of just "circle" is true of half the world, and a few of these
    would make up a large part of all true pairs. Scenes must be of the same config.
    """
    n, slots = len(scenes), config.max_objects
    occupied = scenes["shape"] > 0
    objects = occupied.sum(axis=1)
    order = np.argsort(rng.random(occupied.shape) + ~occupied, axis=1, kind="stable")[:, :slots]
    part = 1 + (rng.random(n) * np.maximum(objects - 1, 1)).astype(np.int64)  # 1 .. objects - 1
    tells_all = (rng.random(n) < config.p_all_objects) | (objects == 1)
    mentioned = np.arange(slots) < np.where(tells_all, objects, part)[:, None]

    counts = rng.random(n) < config.p_count
    first = {
        k: np.take_along_axis(scenes[k], order[:, :1], axis=1) for k in ("shape", "colour", "size")
    }
    group = occupied & (scenes["shape"] == first["shape"])
    mentioned &= ~counts[:, None] | (np.arange(slots) == 0)

    captions = np.zeros(n, dtype=_caption_dtype(slots))
    captions["count"] = np.where(counts, group.sum(axis=1), 0)
    captions["shape"] = np.where(mentioned, np.take_along_axis(scenes["shape"], order, axis=1), 0)
    alone = (mentioned.sum(axis=1) == 1) & (captions["count"] <= 1)
    p_colour = np.where(alone, 1 - (1 - config.p_colour) ** 2, config.p_colour)
    # Nothing is drawn where no caption is brief: the data of those worlds stay what they were.
    brief = rng.random(n) < config.p_brief if config.p_brief else np.zeros(n, np.bool_)
    p_size = np.where(brief, 0.0, config.p_size)
    for name, p in (("size", p_size), ("colour", p_colour)):
        shared = np.all(~group | (scenes[name] == first[name]), axis=1)
        named = mentioned & (rng.random((n, slots)) < p[:, None]) & (~counts | shared)[:, None]
        captions[name] = np.where(named, np.take_along_axis(scenes[name], order, axis=1), 0)
    named = rng.random(n) < config.p_background
    captions["background"] = np.where(named, scenes["background"], 0)
    return captions, _write_captions(captions, config.synonym_rate, rng)


def _write_captions(
    captions: Structured, synonym_rate: float, rng: np.random.Generator
) -> list[str]:
    """Write captions as text; each word is replaced by a synonym with the given probability."""
    n, slots = captions["shape"].shape
    draws = rng.random((n, 4 * slots + 2)).tolist()  # a mention is at most "and small red circle"
    texts = []
    for caption, row in zip(captions.tolist(), draws, strict=True):
        words = [
            _reword(word, u, synonym_rate)
            for word, u in zip(_plain_words(caption), row, strict=False)
        ]
        texts.append(" ".join(words))
    return texts


def _plain_words(caption: tuple[Any, ...]) -> list[str]:
    """Return the words of one caption record (as a tuple), before synonyms."""
    background, count, shapes, colours, sizes = caption
    words = [_NUMBERS[count - 1]] if count else []
    for i, (shape, colour, size) in enumerate(zip(shapes, colours, sizes, strict=True)):
        if not shape:
            continue
        name = SHAPES[shape - 1]
        words += ["and"] if i else []
        words += [SIZES[size - 1]] if size else []
        words += [COLOURS[colour - 1]] if colour else []
        words.append(PLURALS[name] if count > 1 else name)
    return words + (["on", BACKGROUNDS[background - 1]] if background else [])


def _reword(word: str, u: float, rate: float) -> str:
    """Return the word, or with probability `rate` a synonym; u is uniform in [0, 1)."""
    if u >= rate:
        return word
    return SYNONYMS[word][int(u / rate * len(SYNONYMS[word]))]


def vocabulary() -> list[str]:
    """Return every word that a caption can contain, sorted."""
    return sorted(set(SYNONYMS) | {word for words in SYNONYMS.values() for word in words})


def _code(records: Structured) -> npt.NDArray[np.int64]:
    """Encode objects as numbers: (shape, colour, size) in mixed radix; 0: none or not mentioned."""
    code = records["shape"].astype(np.int64) * (len(COLOURS) + 1) + records["colour"]
    return np.asarray(code * (len(SIZES) + 1) + records["size"], dtype=np.int64)


_CODES = (len(SHAPES) + 1) * (len(COLOURS) + 1) * (len(SIZES) + 1)


def _description_table() -> npt.NDArray[np.bool_]:
    """Return whether mention m fits object o, at m * _CODES + o; code 0 fits anything."""
    radix = (len(SHAPES) + 1, len(COLOURS) + 1, len(SIZES) + 1)
    parts = np.stack(np.unravel_index(np.arange(_CODES), radix), axis=-1)
    fits = (parts[:, None] == 0) | (parts[:, None] == parts[None])
    return np.asarray(fits.all(axis=-1).ravel(), dtype=np.bool_)


_DESCRIBES = _description_table()


def valid(captions: Structured, scenes: Structured) -> npt.NDArray[np.bool_]:
    """Return whether each caption is true of its scene, elementwise with NumPy's broadcasting."""
    captions, scenes = np.asarray(captions), np.asarray(scenes)
    objects = -np.sort(-_code(scenes), axis=-1)  # objects first, then empty cells
    mentions = _code(captions)
    k = max(mentions.shape[-1], int((objects > 0).sum(axis=-1).max(initial=1)))
    mentions, objects = _pad(mentions, k), _pad(objects, k)

    # describes[i][j]: mention i fits object j. An absent mention fits anything, even an empty cell,
    # so the mentions can be assigned if all k entries of some permutation are true.
    describes = [
        [_DESCRIBES[mentions[..., i] * _CODES + objects[..., j]] for j in range(k)]
        for i in range(k)
    ]
    assignable = np.zeros_like(describes[0][0])
    for choice in permutations(range(k)):
        holds = describes[0][choice[0]]
        for i in range(1, k):
            holds = holds & describes[i][choice[i]]
        assignable = assignable | holds

    fitting = np.sum(np.stack(describes[0]), axis=0, dtype=np.int8)
    exact = (captions["count"] == 0) | (captions["count"] == fitting)
    background = (captions["background"] == 0) | (captions["background"] == scenes["background"])
    return np.asarray(assignable & exact & background, dtype=np.bool_)


def _pad(codes: npt.NDArray[np.int64], k: int) -> npt.NDArray[np.int64]:
    """The first k codes along the last axis, with zeros behind if there are fewer."""
    missing = max(k - codes.shape[-1], 0)
    return np.pad(codes[..., :k], [*((0, 0) for _ in codes.shape[1:]), (0, missing)])


def valid_matrix(scenes: Structured, captions: Structured) -> npt.NDArray[np.bool_]:
    """Truth of all pairs: entry (s, c) says whether caption c is true of scene s.

    scenes (n_scenes,), captions (n_captions,) -> bool (n_scenes, n_captions).
    """
    truth = np.empty((len(scenes), len(captions)), dtype=np.bool_)
    rows = max(1, 2_000_000 // max(len(captions), 1))  # bounds the memory of the steps between
    for start in range(0, len(scenes), rows):
        truth[start : start + rows] = valid(captions[None], scenes[start : start + rows, None])
    return truth


def cell_attributes(scenes: Structured) -> npt.NDArray[np.int64]:
    """Shape, colour and size of every cell: (n,) -> (n, cells, 3).

    All 0 where a cell is empty, otherwise k for the k-th of `SHAPES`, `COLOURS`, `SIZES`, from 1.
    """
    return np.stack([scenes["shape"], scenes["colour"], scenes["size"]], axis=-1).astype(np.int64)


def backgrounds(scenes: Structured) -> npt.NDArray[np.int64]:
    """Background of every scene as an index into `BACKGROUNDS`, from 0: (n,) -> (n,)."""
    return np.asarray(scenes["background"], dtype=np.int64) - 1
