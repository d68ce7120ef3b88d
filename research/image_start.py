"""Pre-train the image encoder of a small model on labels of images.

Small models need it instead of weights trained on ImageNet: from random weights, a contrastive loss
teaches them little about images in a few epochs.

    python -m research image-start --cfg-path albef_small_own_data --labels labels.json \\
        --images images --output start.pth

labels.json is {"a.jpg": "beach", ...}, paths below the folder of --images. The checkpoint is the
model.pretrained of a training run. Exit status: 0, or 2 for unusable arguments or files.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from lavis.common.registry import registry
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lavis_mafa.commands.arguments import add_options
from lavis_mafa.data.augmentation import quick
from lavis_mafa.data.image_reading import read_rgb
from lavis_mafa.io.files import read_json
from lavis_mafa.io.processes import progress
from lavis_mafa.settings import load_config
from lavis_mafa.training.checkpoint import save_atomically

PREFIX = "visual_encoder."
_WEIGHT_DECAY = 0.02

Batch = TypeVar("Batch")


def train_encoder(
    encoder: nn.Module,
    heads: Iterable[nn.Module],
    batches: Iterable[Batch],
    loss_of: Callable[[Batch], tuple[Tensor, Callable[[], float]]],
    steps: int,
    lr: float,
) -> float:
    """Train an image encoder with linear heads by AdamW and a one-cycle schedule.

    Args:
        batches: at least ``steps`` mini-batches.
        loss_of: returns a mini-batch's loss, and a function that computes its accuracy (0 to 1).

    Returns:
        The accuracy over the last tenth of the steps, 0 to 1.
    """
    parameters = [*encoder.parameters()]
    for head in heads:
        parameters += head.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    right: list[float] = []
    encoder.train()
    bar = progress(range(steps), desc="image encoder's start")
    for step, batch in zip(bar, batches, strict=False):
        loss, accuracy = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step >= steps * 9 // 10:
            right.append(accuracy())
        bar.set_postfix(loss=f"{float(loss.detach()):.3f}", refresh=False)
    return float(np.mean(right))


def save_encoder(encoder: nn.Module, path: Path) -> None:
    """Save an image encoder as a checkpoint that ``model.pretrained`` takes."""
    state = {f"{PREFIX}{key}": value for key, value in encoder.state_dict().items()}
    save_atomically({"model": state}, path)


class _LabelledImages(Dataset[tuple[Tensor, int]]):
    """Images with the numbers of their labels.

    Args:
        labels: labels by path below ``folder``.
        processor: PIL image (RGB) -> tensor.

    Attributes:
        names: the sorted names of the labels; a label's number is its index.
    """

    def __init__(self, labels: Mapping[str, str], folder: str, processor: Any) -> None:
        self.paths = [os.path.join(folder, image) for image in labels]
        self.names = sorted(set(labels.values()))
        places = {name: place for place, name in enumerate(self.names)}
        self.numbers = [places[label] for label in labels.values()]
        self.processor = processor

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.processor(read_rgb(self.paths[index])), self.numbers[index]


def read_labels(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read labels by image path from a JSON object.

    Raises:
        ValueError: if the object has another form, or fewer than two different labels.
    """
    content = read_json(path)
    if not isinstance(content, dict) or len(set(map(str, content.values()))) < 2:
        raise ValueError(
            f'{path}: expected a JSON object {{"a.jpg": "beach", ...}} of image paths and at least '
            "two different labels"
        )
    return {image: str(label) for image, label in content.items()}


def _start_from_labels(cfg: Any, labels: Mapping[str, str], args: argparse.Namespace) -> float:
    """Train the image encoder of a config's model to predict labels, and save it.

    Labels are predicted from [CLS], which ITC uses, and from the mean of the patches, which fusion
    attends to. Images are processed as in training. The model is initialised as its config says.

    Args:
        cfg: a checked config; its first dataset has the training processor of images.
        labels: labels by path below ``args.images``.
        args: arguments of the command.

    Returns:
        The accuracy of [CLS] on augmented images over the last tenth of the steps, 0 to 1.

    Raises:
        ValueError: if the model has no ViT of LAVIS, or the config no processor.
        OSError: if an image cannot be read.
    """
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    model_cls = registry.get_model_class(cfg.model_cfg.arch)
    encoder: Any = getattr(model_cls.from_config(cfg.model_cfg), "visual_encoder", None)
    if not hasattr(encoder, "forward_features"):
        raise ValueError(
            f"model.arch: {cfg.model_cfg.arch} has no image encoder that can be started from "
            "labels; use albef_mafa or blip_mafa"
        )
    images = _LabelledImages(labels, args.images, quick(_train_processor(cfg)))
    loader = DataLoader(images, min(args.batch_size, len(images)), shuffle=True, drop_last=True)
    steps = args.epochs * len(loader)
    heads = [nn.Linear(encoder.embed_dim, len(images.names)) for _ in range(2)]

    def loss_of(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Callable[[], float]]:
        pictures, numbers = batch
        tokens = encoder.forward_features(pictures)
        overall, local = heads[0](tokens[:, 0]), heads[1](tokens[:, 1:].mean(dim=1))
        loss = F.cross_entropy(overall, numbers) + F.cross_entropy(local, numbers)
        return loss, lambda: float((overall.argmax(1) == numbers).float().mean())

    batches = (batch for _ in range(args.epochs) for batch in loader)
    right = train_encoder(encoder, heads, batches, loss_of, steps, args.lr)
    save_encoder(encoder, args.output)
    return right


def _train_processor(cfg: Any) -> Any:
    dataset = next(iter(cfg.datasets_cfg.values()))
    chosen = dataset.vis_processor.train
    return registry.get_processor_class(chosen.name).from_config(chosen)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m research image-start``."""
    add_options(parser, run="folder of a run, instead of --cfg-path: its config")
    parser.add_argument("--labels", required=True, help="JSON file of image paths and labels")
    parser.add_argument("--images", required=True, help="folder that the paths are relative to")
    parser.add_argument("--output", type=Path, required=True, help="checkpoint to write")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the images (30)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per mini-batch (64)")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate (2e-3)")
    parser.add_argument("--seed", type=int, default=42, help="seed of weights, order, crops (42)")


def run(args: argparse.Namespace) -> None:
    """Train the encoder and write its checkpoint."""
    args.output.parent.mkdir(parents=True, exist_ok=True)
    # For a model of this size, several threads are slower than one.
    torch.set_num_threads(1)
    try:
        labels = read_labels(args.labels)
        cfg = load_config(args.cfg_path, args.options, machine=False)
        right = _start_from_labels(cfg, labels, args)
    except (OSError, ValueError) as error:
        args.error(str(error))
    print(f"predicts {100 * right:.0f} % of the labels; saved as {args.output}")


if __name__ == "__main__":
    from research.__main__ import main

    sys.exit(main(["image-start", *sys.argv[1:]]))
