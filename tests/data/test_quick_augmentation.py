"""Check the fast training processors against LAVIS's: images differ by steps of 1/255 only."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from conftest import PHOTOGRAPHS
from hypothesis import given, settings
from hypothesis import strategies as st
from lavis.processors import randaugment
from lavis.processors.blip_processors import (
    Blip2ImageTrainProcessor,
    BlipImageEvalProcessor,
    BlipImageTrainProcessor,
)
from PIL import Image, ImageOps
from torchvision import transforms

from lavis_mafa.data import augmentation
from lavis_mafa.data.augmentation import (
    AlbefImageTrainProcessor,
    QuickAugmentation,
    quick,
)
from lavis_mafa.data.image_reading import read_rgb

PROCESSORS = [BlipImageTrainProcessor, Blip2ImageTrainProcessor, AlbefImageTrainProcessor]


def sample_images(count=8):
    """Return photographs, if present, and noise of many sizes, the hardest to resize."""
    rng = np.random.default_rng(0)
    images = [read_rgb(path) for path in sorted(PHOTOGRAPHS.glob("images/*.jpg"))[:count]]
    for _ in range(count):
        noise = rng.integers(0, 256, (*rng.integers(20, 400, 2), 3), dtype=np.uint8)
        images.append(Image.fromarray(noise))
    return images


def process_with_seed(processor, image, seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    processed = processor(image)
    return processed, torch.rand(1).item(), np.random.random(), random.random()


@pytest.mark.parametrize("cls", PROCESSORS)
def test_everything_but_resizing_is_bit_identical(cls, monkeypatch):
    monkeypatch.setattr(augmentation, "FAST_RESIZE", False)
    slow = cls(image_size=64, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    fast = quick(slow)
    assert isinstance(fast, QuickAugmentation)
    for seed, source in enumerate(sample_images() * 3):
        image, *draws = process_with_seed(fast, source, seed)
        expected, *expected_draws = process_with_seed(slow, source, seed)
        assert torch.equal(image, expected) and image.is_contiguous()
        assert image.dtype == torch.float32 and draws == expected_draws


def crop_pairs(source, size, seed):
    """Return the fast processor's and Pillow's crop, each with the next random draw."""
    fast = quick(Blip2ImageTrainProcessor(image_size=size, min_scale=0.2))
    pairs = []
    for crop in (fast._cropped, fast.crop):
        torch.manual_seed(seed)
        pairs.append((np.asarray(crop(source)).astype(int), torch.rand(1).item()))
    return pairs


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 30), st.integers(0, 99))
@settings(max_examples=150)
def test_crops_of_any_size_are_close_to_pillow(width, height, size, seed):
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    previous, augmentation.FAST_RESIZE = augmentation.FAST_RESIZE, True
    try:
        (image, draw), (expected, expected_draw) = crop_pairs(Image.fromarray(noise), size, seed)
    finally:
        augmentation.FAST_RESIZE = previous
    assert image.shape == expected.shape and draw == expected_draw
    assert abs(image - expected).max() <= 2


def test_only_lavis_processors_are_replaced():
    class Own(BlipImageTrainProcessor):
        def __call__(self, image):
            return super().__call__(image) + 1

    changed, nearest = BlipImageTrainProcessor(), BlipImageTrainProcessor()
    changed.transform = transforms.Compose([transforms.ToTensor()])
    nearest.transform.transforms[0].interpolation = transforms.InterpolationMode.NEAREST
    for processor in (Own(), changed, nearest, BlipImageEvalProcessor(), len, None):
        assert quick(processor) is processor
    fast = quick(BlipImageTrainProcessor())
    assert quick(fast) is fast


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), min_size=3, max_size=3))
def test_auto_contrast_equals_pillow(ranges):
    rng = np.random.default_rng(0)
    image = np.stack(
        [rng.integers(min(r), max(r) + 1, (12, 9), dtype=np.uint8) for r in ranges], axis=-1
    )
    expected = np.asarray(ImageOps.autocontrast(Image.fromarray(image)))
    output = randaugment.func_dict["AutoContrast"](image)
    assert output.dtype == np.uint8
    assert np.abs(output.astype(int) - expected.astype(int)).max() <= 1
