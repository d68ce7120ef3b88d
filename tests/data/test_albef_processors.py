"""The processing of ALBEF, GRIT-VLP, MAFA and FNE: captions, questions, augmentation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lavis.common.registry import registry
from lavis.processors import randaugment
from lavis.processors.blip_processors import BlipImageEvalProcessor, BlipImageTrainProcessor
from omegaconf import OmegaConf
from PIL import Image

from lavis_mafa.data import TrainingSet
from lavis_mafa.data.augmentation import AlbefImageTrainProcessor, quick
from lavis_mafa.data.texts import AlbefCaptionProcessor, AlbefQuestionProcessor

# Texts


@pytest.mark.parametrize(
    "text, most, expected",
    [
        ('A man\'s T-shirt and/or hat, "red" (new)!', 30, "a mans t shirt and or hat red new"),
        ("<person> hugs <PERSON>-s dog\n", 30, "person hugs person s dog"),
        ("  two \n\t dogs:  here ", 30, "two dogs here"),
        ("a_b <b> & É 2", 30, "a_b <b> & é 2"),
        ("one two  three four", 3, "one two three"),
        ("a\nb*#;~\n", 30, "a\nb"),
        ("???", 30, ""),
    ],
)
def test_captions_are_processed_as_the_authors_do(text, most, expected):
    assert AlbefCaptionProcessor(max_words=most)(text) == expected


@pytest.mark.parametrize(
    "text, most, expected",
    [
        ("What's the man's T-shirt  for? ", 30, "whats the mans t shirt  for"),
        ("  a  b c", 3, "  a"),  # blanks are kept, and count as words
    ],
)
def test_questions_are_processed_as_the_authors_do(text, most, expected):
    assert AlbefQuestionProcessor(max_words=most)(text) == expected


@pytest.mark.parametrize("name", ["albef_caption", "albef_question"])
def test_thirty_words_unless_a_config_says_otherwise(name):
    cls, text = registry.get_processor_class(name), " ".join(map(str, range(60)))
    assert cls.from_config()(text) == " ".join(map(str, range(30)))
    assert cls.from_config(OmegaConf.create({"max_words": 50}))(text).endswith(" 48 49")


# Images


def noise(height=40, width=50, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_two_of_the_authors_operations_at_level_seven():
    step = AlbefImageTrainProcessor(image_size=32).transform.transforms[2]
    drawn = [step.get_random_ops() for _ in range(300)]
    assert {(len(one), *{level for _, _, level in one}) for one in drawn} == {(2, 7)}
    lavis = BlipImageTrainProcessor(image_size=32).transform.transforms[2]
    assert lavis.M == 5  # the difference
    assert {str(name) for one in drawn for name, _, _ in one} == set(lavis.augs)


def test_everything_except_the_augmentation_equals_lavis(monkeypatch):
    monkeypatch.setattr(randaugment.RandomAugment, "__call__", lambda self, image: image)
    config = OmegaConf.create({"image_size": 24, "min_scale": 0.2, "mean": [0.1, 0.2, 0.3]})
    made = []
    for name in ("albef_image_train", "blip_image_train"):
        torch.manual_seed(3)
        processor = registry.get_processor_class(name).from_config(config)
        assert processor.transform.transforms[0].scale == (0.2, 1.0)
        made.append(processor(Image.fromarray(noise())))
    assert torch.equal(*made)


def test_without_a_crop_images_are_resized_and_flipped(monkeypatch):
    monkeypatch.setattr(randaugment.RandomAugment, "__call__", lambda self, image: image)
    config = OmegaConf.create({"image_size": 24, "crop": False})
    processor = AlbefImageTrainProcessor.from_config(config)
    image = Image.fromarray(noise(30, 90))
    expected = BlipImageEvalProcessor(image_size=24)(image)
    found = [quick(processor)(image) for _ in range(20)]
    flipped = [torch.equal(one, expected.flip(2)) for one in found]
    assert all(
        torch.equal(one, expected) or is_flipped
        for one, is_flipped in zip(found, flipped, strict=True)
    )
    assert 0 < sum(flipped) < 20


class Pairs(torch.utils.data.Dataset):
    """Pairs of noise and a caption, processed by the authors' processors."""

    def __init__(self):
        self.vis_processor = AlbefImageTrainProcessor(image_size=32)
        self.text_processor = AlbefCaptionProcessor(prompt="a photo of ")

    def __len__(self):
        return 4

    def __getitem__(self, index):
        text = "???" if index == 3 else f"A dog's {index}"
        image = self.vis_processor(Image.fromarray(noise(seed=index)))
        return {"image": image, "text_input": self.text_processor(text)}


def test_a_caption_of_signs_only_is_unreadable():
    """Nothing is left of it but the prompt, so that training replaces the sample and says so."""
    sample = TrainingSet(Pairs())[3, 0]
    assert "no readable character" in sample["load_error"] and sample["loaded_index"] != 3
    assert sample["text_input"].startswith("a photo of a dogs ")
