"""Render scenes: anti-aliased shapes from signed distances, all objects of a chunk at once."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lavis_mafa.toyworld.world import SHAPES, Structured, WorldConfig

_Float = npt.NDArray[np.float32]

# In the order of COLOURS and BACKGROUNDS. Backgrounds are unsaturated or dark, objects neither, and
# any two stay apart under colour jitter and noise.
OBJECT_RGB = np.array(
    [
        (225, 30, 40),  # red
        (40, 175, 55),  # green
        (40, 75, 230),  # blue
        (250, 222, 40),  # yellow
        (185, 45, 205),  # purple
        (40, 215, 225),  # cyan
    ],
    dtype=np.float32,
)
BACKGROUND_RGB = np.array(
    [(22, 22, 22), (235, 235, 235), (130, 130, 130), (95, 62, 35)],  # black, white, grey, brown
    dtype=np.float32,
)
_RADIUS = np.array([0.23, 0.40], dtype=np.float32)  # small, big: half the extent, in cells
_CHUNK = 1000  # scenes rendered at once; part of what the seed means


def render(
    config: WorldConfig, scenes: Structured, rng: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Render n scenes: (n,) -> uint8 (n, H, W, 3), H = W = `config.image_size`.

    Position and colour jitter and pixel noise come from `rng`; scenes must be of the same config.
    """
    side = config.image_size
    images = np.empty((len(scenes), side, side, 3), dtype=np.uint8)
    for start in range(0, len(scenes), _CHUNK):
        chunk = scenes[start : start + _CHUNK]
        images[start : start + _CHUNK] = _render_chunk(config, chunk, rng)
    return images


def _render_chunk(
    config: WorldConfig, scenes: Structured, rng: np.random.Generator
) -> npt.NDArray[np.uint8]:
    n, size, grid = len(scenes), config.cell_size, config.grid
    ground = _jitter(BACKGROUND_RGB[scenes["background"] - 1], config.colour_jitter, rng)
    # (scene, cell, y, x, channel): a shape never leaves its cell, so each cell is painted alone
    canvas = np.broadcast_to(ground[:, None, None, None], (n, grid**2, size, size, 3)).copy()

    scene, cell = np.nonzero(scenes["shape"])
    paint = OBJECT_RGB[scenes["colour"][scene, cell] - 1]
    paint = _jitter(paint, config.colour_jitter, rng)[:, None, None]
    offset = (2 * rng.random((len(scene), 2), dtype=np.float32) - 1) * config.position_jitter * size
    radius = _RADIUS[scenes["size"][scene, cell] - 1] * size
    cover = _coverage(scenes["shape"][scene, cell], radius, offset, size)[..., None]
    canvas[scene, cell] += cover * (paint - canvas[scene, cell])

    canvas = canvas.reshape(n, grid, grid, size, size, 3).swapaxes(2, 3)
    image = canvas.reshape(n, grid * size, grid * size, 3)
    noise = rng.standard_normal(image.shape, dtype=np.float32) * config.noise_sd
    return np.clip(np.rint(image + noise), 0, 255).astype(np.uint8)


def _jitter(rgb: _Float, amount: float, rng: np.random.Generator) -> _Float:
    return rgb + ((2 * rng.random(rgb.shape, dtype=np.float32) - 1) * amount).astype(np.float32)


def _coverage(shape: npt.NDArray[np.int8], radius: _Float, offset: _Float, size: int) -> _Float:
    """Return the share of each pixel that each object covers, in [0, 1]: (objects, size, size).

    shape (objects,) from 1; radius (objects,) and offset (objects, 2) as (y, x), in pixels.
    """
    centre = np.arange(size, dtype=np.float32) - (size - 1) / 2
    cover = np.empty((len(shape), size, size), dtype=np.float32)
    for index, name in enumerate(SHAPES, start=1):
        which = np.flatnonzero(shape == index)
        y = (centre - offset[which, :1])[:, :, None]
        x = (centre - offset[which, 1:])[:, None, :]
        cover[which] = np.clip(0.5 - _distance(name, y, x, radius[which, None, None]), 0, 1)
    return cover


def _distance(name: str, y: _Float, x: _Float, r: _Float) -> _Float:
    """Return the signed distance to the outline in pixels, negative inside; y points down."""
    distance: _Float
    if name == "circle":
        distance = np.hypot(x, y) - r
    elif name == "square":
        distance = np.maximum(abs(x), abs(y)) - 0.88 * r
    elif name == "triangle":  # equilateral, standing, 2 r wide; centred by its height
        inner = r / math.sqrt(3)
        y = y - 0.5 * inner
        distance = np.maximum(math.sqrt(3) / 2 * abs(x) - 0.5 * y, y) - inner
    elif name == "cross":
        bar = 0.32 * r
        upright = np.maximum(abs(x) - bar, abs(y) - r)
        distance = np.minimum(upright, np.maximum(abs(x) - r, abs(y) - bar))
    else:
        raise ValueError(f"no such shape: {name!r}, expected one of {SHAPES}")
    return distance
