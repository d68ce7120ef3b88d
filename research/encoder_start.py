"""Train a start for a model's image encoder from labels of images.

Small models that are trained from random weights need it in place of ImageNet's weights: contrast
with captions alone teaches them little about images in a few epochs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from lavis.common.registry import registry
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lavis_mafa.datasets.image_reading import read_rgb
from lavis_mafa.io.processes import progress
from lavis_mafa.processors.augmentation import quick
from lavis_mafa.runners.checkpoint import save_atomically

PREFIX = "visual_encoder."
WEIGHT_DECAY = 0.02
EXPECTED = (
    'expected a JSON object {"a.jpg": "beach", ...} or list [["a.jpg", "beach"], ...] of image '
    "paths and labels"
)

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class StartSettings:
    """How long and how fast a start is trained.

    Attributes:
        epochs: passes over the labelled images.
        batch_size: images of a mini-batch.
        lr: the highest learning rate, of a one-cycle schedule.
        seed: of the weights, the order and the augmentation.
    """

    epochs: int = 30
    batch_size: int = 64
    lr: float = 2e-3
    seed: int = 42


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
        batches: at least ``steps``.
        loss_of: returns a mini-batch's loss, and what computes its accuracy (0 to 1).

    Returns:
        The accuracy over the last tenth of the steps, 0 to 1.
    """
    parameters = [*encoder.parameters()]
    for head in heads:
        parameters += head.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=WEIGHT_DECAY)
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


class LabelledImages(Dataset[tuple[Tensor, int]]):
    """Images with the number of their label.

    Args:
        labels: by path below ``folder``.
        processor: PIL image (RGB) -> tensor.

    Attributes:
        names: of the labels, sorted; a number is a place in it.
    """

    def __init__(self, labels: Mapping[str, str], folder: str, processor: Any) -> None:
        self.paths = [os.path.join(folder, image) for image in labels]
        self.names = sorted(set(labels.values()))
        self.numbers = [self.names.index(label) for label in labels.values()]
        self.processor = processor

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.processor(read_rgb(self.paths[index])), self.numbers[index]


def read_labels(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read labels by image path from a JSON object or a list of pairs.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it has another form, or fewer than two different labels.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from None
    rows = list(content.items()) if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise ValueError(f"{path}: {EXPECTED}")
    for place, row in enumerate(rows):
        if not (
            isinstance(row, (list, tuple))
            and [type(one) for one in row] in ([str, str], [str, int])
        ):
            raise ValueError(f"{path}: entry {place} is {row!r}; {EXPECTED}")
    labels = {image: str(label) for image, label in rows}
    if len(set(labels.values())) < 2:
        raise ValueError(
            f"{path}: {len(set(labels.values()))} different labels, expected 2 or more"
        )
    return labels


def start_from_labels(
    cfg: Any, labels: Mapping[str, str], folder: str, settings: StartSettings, path: Path
) -> float:
    """Train the image encoder of a config's model to predict labels, and save it.

    Labels are predicted from [CLS], which ITC uses, and from the mean of the patches, which fusion
    attends to. Images are processed as in training. The model starts as its config says.

    Args:
        cfg: a checked config; its first dataset has the training processor of images.
        labels: by path below ``folder``.
        path: of the checkpoint to write.

    Returns:
        The accuracy of [CLS] on augmented images over the last tenth of the steps, 0 to 1.

    Raises:
        ValueError: if the model has no ViT of LAVIS, or the config no processor.
        OSError: if an image cannot be read.
    """
    torch.manual_seed(settings.seed)
    np.random.seed(settings.seed)
    model_cls = registry.get_model_class(cfg.model_cfg.arch)
    encoder: Any = getattr(model_cls.from_config(cfg.model_cfg), "visual_encoder", None)
    if not hasattr(encoder, "forward_features"):
        raise ValueError(
            f"model.arch: {cfg.model_cfg.arch} has no image encoder that can be started from "
            "labels; use albef_mafa or blip_mafa"
        )
    images = LabelledImages(labels, folder, quick(_train_processor(cfg)))
    loader = DataLoader(images, min(settings.batch_size, len(images)), shuffle=True, drop_last=True)
    steps = settings.epochs * len(loader)
    heads = [nn.Linear(encoder.embed_dim, len(images.names)) for _ in range(2)]

    def loss_of(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Callable[[], float]]:
        pictures, numbers = batch
        tokens = encoder.forward_features(pictures)
        overall, local = heads[0](tokens[:, 0]), heads[1](tokens[:, 1:].mean(dim=1))
        loss = F.cross_entropy(overall, numbers) + F.cross_entropy(local, numbers)
        return loss, lambda: float((overall.argmax(1) == numbers).float().mean())

    batches = (batch for _ in range(settings.epochs) for batch in loader)
    right = train_encoder(encoder, heads, batches, loss_of, steps, settings.lr)
    save_encoder(encoder, path)
    return right


def _train_processor(cfg: Any) -> Any:
    name, dataset = next(iter(cfg.datasets_cfg.items()))
    chosen = (dataset.get("vis_processor") or {}).get("train")
    if chosen is None:
        raise ValueError(f"datasets.{name}.vis_processor.train: is empty; name a processor")
    return registry.get_processor_class(chosen.name).from_config(chosen)
