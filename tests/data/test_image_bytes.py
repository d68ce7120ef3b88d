"""Mini-batches with images as bytes equal those with normalised images bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from lavis.datasets.datasets.image_text_pair_datasets import ImageTextPairDataset
from lavis.processors.blip_processors import BlipCaptionProcessor, BlipImageTrainProcessor
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, default_collate

from lavis_mafa.algorithm.momentum import SECOND_VIEW
from lavis_mafa.data import TrainingSet
from lavis_mafa.data.augmentation import AlbefImageTrainProcessor, ImageBytes
from lavis_mafa.data.pairs import TrainPairs
from lavis_mafa.training.loaders import to_device

CPU = torch.device("cpu")


@pytest.fixture
def pictures(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(4):
        noise = rng.integers(0, 256, (50, 70, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number}.png")
    rows = [{"image": f"{number}.png", "caption": f"a {number}"} for number in range(4)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    return tmp_path


class Brighter(ImageTextPairDataset):
    """A user's set that changes the images after their processor."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "image": sample["image"] + 1.0}


class Stacked(ImageTextPairDataset):
    """A user's set that collates by itself."""

    def collater(self, samples):
        batch = default_collate(samples)
        return {**batch, "image": batch["image"] + 1.0}


def data(folder, cls, image_processor=BlipImageTrainProcessor, **options):
    own = {"cache_dir": str(folder / "cache")} if cls is TrainPairs else {}
    processors = image_processor(image_size=32, **options), BlipCaptionProcessor()
    return cls(*processors, str(folder), [str(folder / "train.json")], **own)


def batch_of(train_set, as_bytes):
    if as_bytes:
        train_set.send_bytes()
    loader = DataLoader(
        train_set, batch_sampler=[[(n, 3) for n in range(4)]], collate_fn=train_set.collater
    )
    (batch,) = loader
    return batch


@pytest.mark.parametrize("cls", [TrainPairs, ImageTextPairDataset])
@pytest.mark.parametrize("processor", [BlipImageTrainProcessor, AlbefImageTrainProcessor])
def test_images_sent_as_bytes_are_equal_on_the_device(pictures, cls, processor):
    own = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.25)}
    made = []
    for as_bytes in (False, True):
        train_set = TrainingSet(data(pictures, cls, processor, **own))
        train_set.add_view(SECOND_VIEW)
        made.append(batch_of(train_set, as_bytes))
    plain, sent = made
    for name in ("image", SECOND_VIEW):
        assert isinstance(sent[name], ImageBytes) and sent[name].values.dtype is torch.uint8
        assert sent[name].values.shape == (4, 3, 32, 32)
        assert torch.equal(to_device(sent, CPU)[name], plain[name])
    assert not torch.equal(plain["image"], plain[SECOND_VIEW])


@pytest.mark.parametrize("cls", [Brighter, Stacked])
def test_sets_that_use_the_images_get_them_normalised(pictures, cls):
    plain, sent = (batch_of(TrainingSet(data(pictures, cls)), flag) for flag in (False, True))
    assert torch.equal(sent["image"], plain["image"])


def test_sets_that_normalise_differently_are_not_sent_as_bytes(pictures):
    parts = [data(pictures, TrainPairs), data(pictures, TrainPairs, mean=(0.1, 0.1, 0.1))]

    class Both(ConcatDataset):
        collater = staticmethod(default_collate)

    batch = batch_of(TrainingSet(Both(parts)), True)
    assert batch["image"].dtype is torch.float32
