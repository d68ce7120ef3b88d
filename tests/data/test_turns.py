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
    RandomTurn,
    TurnedImageTrainProcessor,
    quick,
)

PIXELS = np.arange(12 * 20 * 3, dtype=np.uint8).reshape(12, 20, 3)


def turned_by_hand(pixels, times):
    """One turn moves the pixel of row r and column c to row W - 1 - c and column r."""
    for _ in range(times):
        high, wide = pixels.shape[:2]
        made = np.empty((wide, high, 3), np.uint8)
        for row in range(high):
            for column in range(wide):
                made[wide - 1 - column, row] = pixels[row, column]
        pixels = made
    return pixels


def test_each_of_four_turns_is_drawn_about_as_often():
    torch.manual_seed(0)
    expected = [turned_by_hand(PIXELS, times) for times in range(4)]
    counts = [0, 0, 0, 0]
    for _ in range(400):
        found = RandomTurn()(PIXELS)
        matches = [times for times in range(4) if np.array_equal(found, expected[times])]
        assert len(matches) == 1 and found.flags["C_CONTIGUOUS"]
        counts[matches[0]] += 1
    assert min(counts) > 70


def test_the_registered_processor_turns_what_lavis_would_return(monkeypatch):
    monkeypatch.setattr(augmentation, "FAST_RESIZE", False)
    cls = registry.get_processor_class("turned_image_train")
    assert cls is TurnedImageTrainProcessor
    config = OmegaConf.create({"image_size": 16, "min_scale": 1.0})
    slow, plain = cls.from_config(config), Blip2ImageTrainProcessor.from_config(config)
    fast = quick(slow)
    assert isinstance(fast, QuickAugmentation)
    turns = set()
    for seed in range(12):
        images = []
        for processor in (slow, fast, plain):
            torch.manual_seed(seed)
            images.append(processor(Image.fromarray(PIXELS)))
        assert torch.equal(images[0], images[1])
        found = [k for k in range(4) if torch.equal(torch.rot90(images[2], k, (1, 2)), images[0])]
        assert len(found) == 1
        turns.update(found)
    assert turns == {0, 1, 2, 3}
