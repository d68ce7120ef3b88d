"""Large JPEGs are decoded smaller, but never below what a crop needs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lavis.datasets.datasets.image_text_pair_datasets import ImageTextPairDataset
from lavis.processors.blip_processors import BlipCaptionProcessor, BlipImageTrainProcessor
from PIL import Image, ImageFilter

from lavis_mafa.data import TrainingSet
from lavis_mafa.data.augmentation import quick
from lavis_mafa.data.image_reading import read_rgb, reduced_jpegs
from lavis_mafa.data.pairs import TrainPairs


def smooth_picture(width, height):
    """Return a picture without fine detail, of which a reduced one is nearly the same."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    blurred = Image.fromarray(noise).filter(ImageFilter.GaussianBlur(12))
    return Image.fromarray(
        np.clip((np.asarray(blurred, np.float32) - 128) * 8 + 128, 0, 255).astype(np.uint8)
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    smooth_picture(800, 600).save(folder / "0.jpg", quality=95)
    smooth_picture(800, 600).save(folder / "1.png")
    rows = [{"image": f"{n}.{kind}", "caption": "a"} for n, kind in enumerate(("jpg", "png"))]
    (folder / "train.json").write_text(json.dumps(rows))
    return folder


@pytest.mark.parametrize("asked, factor", [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (50, 8)])
@pytest.mark.parametrize("size", [(800, 600), (803, 607), (97, 64)])
def test_the_decoder_reduces_by_a_power_of_two(asked, factor, size, tmp_path):
    path = tmp_path / "a.jpg"
    smooth_picture(*size).save(path)
    with reduced_jpegs(lambda width, height: asked):
        assert read_rgb(path).size == tuple(-(-side // factor) for side in size)
    assert read_rgb(path).size == size


def test_a_reduced_jpeg_is_upright_and_must_be_whole(large, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    smooth_picture(400, 200).save(tmp_path / "turned.jpg", exif=exif)
    content = (large / "0.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(content[: len(content) // 2])
    with reduced_jpegs(lambda width, height: 4):
        assert read_rgb(tmp_path / "turned.jpg").size == (50, 100)
        with pytest.raises(OSError, match=r"cut\.jpg"):
            read_rgb(tmp_path / "cut.jpg")


@given(
    st.integers(1, 2000),
    st.integers(1, 2000),
    st.integers(8, 400),
    st.floats(0.05, 1.0),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=300)
def test_no_crop_is_enlarged_that_was_not_before(width, height, size, least, seed):
    fast = quick(BlipImageTrainProcessor(image_size=size, min_scale=least))
    factor = fast.reduction(width, height)
    assert factor >= 1
    if factor > 1:
        reduced = Image.new("L", (-(-width // factor), -(-height // factor)))
        torch.manual_seed(seed)
        *_, high, wide = fast.crop.get_params(reduced, fast.crop.scale, fast.crop.ratio)
        assert min(high, wide) >= size


@pytest.mark.parametrize("cls", [TrainPairs, ImageTextPairDataset])
def test_training_sets_reduce_what_their_processors_allow(large, cls, tmp_path):
    def sample(reduce_jpegs, view=None):
        own = {"cache_dir": str(tmp_path)} if cls is TrainPairs else {}
        data = cls(
            BlipImageTrainProcessor(image_size=64),
            BlipCaptionProcessor(),
            str(large),
            [str(large / "train.json")],
            **own,
        )
        train_set = TrainingSet(data, reduce_jpegs=reduce_jpegs)
        if view is not None:
            train_set.add_view("other", view)
        sizes = []
        inner = quick(data.vis_processor) if view is None else data.vis_processor.processor
        crop = inner._cropped
        inner._cropped = lambda picture: sizes.append(picture.size) or crop(picture)
        return train_set[0, 0]["image"], sizes

    image, sizes = sample(False)
    smaller, reduced_sizes = sample(True)
    assert sizes == [(800, 600)] and reduced_sizes == [(200, 150)]
    # The crop's place is drawn in pixels of the smaller picture.
    assert smaller.shape == image.shape
    # A processor that we know nothing about, such as Con-D's, gets the whole picture.
    assert sample(True, view=lambda picture: torch.zeros(1))[1] == [(800, 600)]
