"""Pre-train the tiny image encoder on attributes of scenes that no data set uses.

This replaces the papers' ImageNet weights, since a model with random weights does not learn shapes
within a demo.

    python -m research.toy_start --output start.pth --arch albef_mafa --seed 0
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lavis_mafa import load_model
from lavis_mafa.toyworld import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SIZES,
    WorldConfig,
    backgrounds,
    cell_attributes,
    make_scenes,
    render,
)
from lavis_mafa.toyworld.builder import IMAGE_MEAN, IMAGE_STD
from lavis_mafa.toyworld.world import Structured
from research.image_start import save_encoder, train_encoder

LR = 5e-3
BATCH = 128
SEED = 1_000_003  # seed of the scenes; no data set uses it
# Number of classes of a cell's attributes, in the order of `cell_attributes`; class 0: empty.
CLASSES = {"shape": len(SHAPES) + 1, "colour": len(COLOURS) + 1, "size": len(SIZES) + 1}


def _train(encoder: Any, world: WorldConfig, steps: int, attributes: Sequence[str]) -> float:
    """Train a ViT to predict attributes of the object in every cell, and the background.

    A cell is predicted from the patches that cover it, and all cells also from [CLS], which ITC
    uses.

    Args:
        encoder: a ViT of LAVIS (ALBEF's, BLIP's, BLIP-2's); patches must tile cells evenly.
        world: config of the scenes.
        steps: number of mini-batches of `BATCH` new scenes.
        attributes: names in `CLASSES` to learn.

    Returns:
        Accuracy on attributes of occupied cells from [CLS], 0 to 1, over the last tenth of steps.
    """
    rng = np.random.default_rng(SEED)
    cells = world.grid**2
    width = encoder.embed_dim
    columns = [list(CLASSES).index(name) for name in attributes]
    classes = [CLASSES[name] for name in attributes]
    local = nn.Linear(width, sum(classes))
    overall = nn.Linear(width, cells * sum(classes) + len(BACKGROUNDS))

    def loss_of(scenes: Structured) -> tuple[Tensor, Callable[[], float]]:
        images = _normalised(render(world, scenes, rng))
        cell_labels = torch.from_numpy(cell_attributes(scenes)[..., columns])
        ground = torch.from_numpy(backgrounds(scenes))
        tokens = encoder.forward_features(images)
        by_cell = local(_pool_cells(tokens[:, 1:], world.grid))
        from_cls = overall(tokens[:, 0])
        by_cell = by_cell.split(classes, dim=-1)
        cls_cells = from_cls[:, : -len(BACKGROUNDS)].reshape(BATCH, cells, -1)
        cls_cells = cls_cells.split(classes, dim=-1)
        loss = _attribute_loss(by_cell, cell_labels) + _attribute_loss(cls_cells, cell_labels)
        loss = loss + F.cross_entropy(from_cls[:, -len(BACKGROUNDS) :], ground)
        return loss, lambda: _accuracy(cls_cells, cell_labels)

    scenes = (make_scenes(world, BATCH, rng) for _ in range(steps))
    return train_encoder(encoder, [local, overall], scenes, loss_of, steps, LR)


def _normalised(images: np.ndarray) -> Tensor:
    scaled = (images.astype(np.float32) / 255 - IMAGE_MEAN) / IMAGE_STD
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)))


def _pool_cells(tokens: Tensor, grid: int) -> Tensor:
    """Average patches ``(B, patches, D)`` over each cell: ``(B, cells, D)``."""
    side = int(tokens.shape[1] ** 0.5)
    if side * side != tokens.shape[1] or side % grid:
        raise ValueError(f"{tokens.shape[1]} patches do not tile a grid of {grid} x {grid} cells")
    per = side // grid
    shaped = tokens.reshape(len(tokens), grid, per, grid, per, -1)
    return shaped.mean(dim=(2, 4)).flatten(1, 2)


def _attribute_loss(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    losses = [
        F.cross_entropy(part.flatten(0, 1), labels[..., k].flatten())
        for k, part in enumerate(logits)
    ]
    return torch.stack(losses).sum()


def _accuracy(logits: Sequence[Tensor], labels: Tensor) -> float:
    occupied = (labels > 0).all(dim=-1)
    predicted = torch.stack([part.argmax(-1) for part in logits], dim=-1)
    return float((predicted == labels)[occupied].float().mean())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="image_start", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="checkpoint to write")
    parser.add_argument("--arch", default="albef_mafa", help="model of the image encoder")
    parser.add_argument("--preset", default="dense", help="preset of the scenes")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--attributes",
        nargs="+",
        choices=list(CLASSES),
        default=list(CLASSES),
        help="attributes to predict",
    )
    parser.add_argument("--seed", type=int, default=42, help="seed of the random weights")
    args = parser.parse_args(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    # Several threads wait for each other longer than they help a model of this size.
    torch.set_num_threads(1)
    world = WorldConfig.preset(args.preset)
    torch.manual_seed(args.seed)
    encoder = load_model(args.arch, "tiny").visual_encoder
    right = _train(encoder, world, args.steps, args.attributes)
    save_encoder(encoder, args.output)
    print(f"predicts {100 * right:.0f} % of the attributes of objects; saved as {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
