"""The reward of `lavis_mafa.algorithm.grit.learned_hardness`: the fall of the language loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lavis_mafa.algorithm.backbone import Backbone
from lavis_mafa.algorithm.tokens import captions_of


@torch.no_grad()
def language_loss(
    model: nn.Module, backbone: Backbone, samples: Mapping[str, Any], seed: int
) -> Tensor:
    """Return the mean language loss of a mini-batch's own pairs (scalar), without training.

    The model is in evaluation mode meanwhile, and MLM hides the same words in every call with the
    same ``seed``, so that two calls differ by the model's weights only. The mode of each module and
    all random states are as before afterwards.

    Args:
        model: whose modules ``backbone`` drives.
        samples: ``image`` ``(B, 3, H, W)`` and captions, as in
            `lavis_mafa.algorithm.step.run_step`.
        seed: of the words that MLM hides.
    """
    images: Tensor = samples["image"]
    with evaluating(model), torch.random.fork_rng([images.device.index] if images.is_cuda else []):
        torch.manual_seed(seed)
        encoded, texts = backbone.encode_images(images), backbone.encode_texts(captions_of(samples))
        own = torch.arange(len(images), device=encoded.embeds.device)
        return backbone.language_losses(encoded, texts, own, own).float().mean()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and restore its own mode afterwards."""
    # Not model.train() afterwards: frozen parts and momentum encoders stay in evaluation mode.
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
