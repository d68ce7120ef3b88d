"""The training processors of LAVIS in less time give its images, but for a step of 1/255."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from conftest import PHOTOGRAPHS
from hypothesis import given, settings
from hypothesis import strategies as st
from lavis.processors.blip_processors import (
    Blip2ImageTrainProcessor,
    BlipImageEvalProcessor,
    BlipImageTrainProcessor,
)
from PIL import Image
from torchvision import transforms

from lavis_mafa.datasets import TrainingSet
from lavis_mafa.datasets.image_reading import read_rgb
from lavis_mafa.processors import augmentation
from lavis_mafa.processors.augmentation import QuickAugmentation, quick

PROCESSORS = [BlipImageTrainProcessor, Blip2ImageTrainProcessor]


def pictures(count=8):
    """Photographs where they are there, and noise of many sizes, the hardest to resize."""
    rng = np.random.default_rng(0)
    found = [read_rgb(path) for path in sorted(PHOTOGRAPHS.glob("images/*.jpg"))[:count]]
    for _ in range(count):
        noise = rng.integers(0, 256, (*rng.integers(20, 400, 2), 3), dtype=np.uint8)
        found.append(Image.fromarray(noise))
    return found


def seeded(processor, picture, seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    image = processor(picture)
    return image, torch.rand(1).item(), np.random.random(), random.random()


@pytest.mark.parametrize("cls", PROCESSORS)
def test_all_but_the_resizing_is_equal_bit_for_bit(cls, monkeypatch):
    monkeypatch.setattr(augmentation, "FAST_RESIZE", False)
    slow = cls(image_size=64, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    fast = quick(slow)
    assert isinstance(fast, QuickAugmentation)
    for seed, picture in enumerate(pictures() * 3):
        image, *draws = seeded(fast, picture, seed)
        expected, *expected_draws = seeded(slow, picture, seed)
        assert torch.equal(image, expected) and image.is_contiguous()
        assert image.dtype == torch.float32 and draws == expected_draws


def crops(picture, size, seed):
    """The crop as the quick processor makes it and as Pillow does, and what is drawn next."""
    fast = quick(Blip2ImageTrainProcessor(image_size=size, min_scale=0.2))
    found = []
    for make in (fast._cropped, fast.crop):
        torch.manual_seed(seed)
        found.append((np.asarray(make(picture)).astype(int), torch.rand(1).item()))
    return found


def test_resized_crops_are_pillow_s_but_for_a_few_steps(monkeypatch):
    monkeypatch.setattr(augmentation, "FAST_RESIZE", True)
    off = np.zeros(256, int)
    for seed, picture in enumerate(pictures(20)):
        (image, draw), (expected, expected_draw) = crops(picture, 96, seed)
        assert image.shape == (96, 96, 3) and draw == expected_draw
        off += np.bincount(abs(image - expected).ravel(), minlength=256)
    assert off[1:].sum() < 0.01 * off.sum()
    assert off[2:].sum() <= 1e-4 * off.sum() and off[3:].sum() == 0


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 30), st.integers(0, 99))
@settings(deadline=None, max_examples=150)
def test_crops_of_any_size(width, height, size, seed):
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    before, augmentation.FAST_RESIZE = augmentation.FAST_RESIZE, True
    try:
        (image, draw), (expected, expected_draw) = crops(Image.fromarray(noise), size, seed)
    finally:
        augmentation.FAST_RESIZE = before
    assert image.shape == expected.shape and draw == expected_draw
    assert abs(image - expected).max() <= 2


def test_only_lavis_s_own_steps_are_replaced():
    class Own(BlipImageTrainProcessor):
        def __call__(self, picture):
            return super().__call__(picture) + 1

    changed, nearest = BlipImageTrainProcessor(), BlipImageTrainProcessor()
    changed.transform = transforms.Compose([transforms.ToTensor()])
    nearest.transform.transforms[0].interpolation = transforms.InterpolationMode.NEAREST
    for processor in (Own(), changed, nearest, BlipImageEvalProcessor(), len, None):
        assert quick(processor) is processor
    fast = quick(BlipImageTrainProcessor())
    assert quick(fast) is fast


def test_a_spawned_worker_can_take_it_along():
    fast, picture = quick(BlipImageTrainProcessor(image_size=32)), pictures(1)[-1]
    again = pickle.loads(pickle.dumps(fast))
    assert torch.equal(seeded(again, picture, 3)[0], seeded(fast, picture, 3)[0])


def test_training_sets_use_it():
    class Data(torch.utils.data.Dataset):
        def __init__(self, processor):
            self.vis_processor = processor

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return {"image": self.vis_processor(pictures(1)[-1]), "text_input": "a"}

    slow = BlipImageTrainProcessor(image_size=32)
    train_set = TrainingSet(Data(slow))
    assert isinstance(train_set.dataset.vis_processor, QuickAugmentation)
    one = train_set[0, 0]["image"]
    train_set.dataset.vis_processor = slow
    assert (one - train_set[0, 0]["image"]).abs().mean() < 0.02
    assert TrainingSet(Data(len)).dataset.vis_processor is len
