"""Turns by 90 degrees as a step of image augmentation."""

from __future__ import annotations

import numpy as np
import torch
from lavis.common.registry import registry
from lavis.processors.blip_processors import Blip2ImageTrainProcessor
from omegaconf import OmegaConf
from PIL import Image

from lavis_mafa.data import augmentation
from lavis_mafa.data.augmentation import (
    QuickAugmentation,
    TurnedImageTrainProcessor,
    quick,
)

PIXELS = np.arange(12 * 20 * 3, dtype=np.uint8).reshape(12, 20, 3)


def test_the_registered_processor_turns_what_lavis_would_return(monkeypatch):
    monkeypatch.setattr(augmentation, "FAST_RESIZE", False)
    cls = registry.get_processor_class("turned_image_train")
    assert cls is TurnedImageTrainProcessor
    config = OmegaConf.create({"image_size": 16, "min_scale": 1.0})
    slow, plain = cls.from_config(config), Blip2ImageTrainProcessor.from_config(config)
    fast = quick(slow)
    assert isinstance(fast, QuickAugmentation)
    counts = [0, 0, 0, 0]
    for seed in range(100):
        images = []
        for processor in (slow, fast, plain):
            torch.manual_seed(seed)
            images.append(processor(Image.fromarray(PIXELS)))
        assert torch.equal(images[0], images[1])
        found = [k for k in range(4) if torch.equal(torch.rot90(images[2], k, (1, 2)), images[0])]
        assert len(found) == 1
        counts[found[0]] += 1
    assert min(counts) > 12
