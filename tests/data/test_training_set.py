"""`TrainingSet`: samples depend on index and epoch only, whoever reads them, whatever is broken."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lavis.datasets.datasets.base_dataset import ConcatDataset
from lavis.datasets.datasets.caption_datasets import CaptionDataset
from lavis.datasets.datasets.image_text_pair_datasets import ImageTextPairDataset
from lavis.processors.blip_processors import BlipCaptionProcessor, BlipImageTrainProcessor
from PIL import Image
from torch.utils.data import ChainDataset, DataLoader, Dataset, IterableDataset

from lavis_mafa.algorithm.grit import EpochBatches
from lavis_mafa.algorithm.grit.sampler import EpochPlan
from lavis_mafa.data import TrainingSet
from lavis_mafa.data.data_identity import DataIdentity
from lavis_mafa.data.training_set import ATTEMPTS, _image_ids_of


def generator_states():
    """Return the states of all random generators in a comparable form."""
    numpy = np.random.get_state()
    python = random.getstate()
    return python, (numpy[1].tolist(), *numpy[2:]), torch.get_rng_state().tolist()


def lavis_set(folder, names, captions=None, cls=ImageTextPairDataset, root=None):
    """Build one of LAVIS's data sets over image files, with its own random augmentation."""
    captions = captions or [f"caption {k}" for k in range(len(names))]
    rows = [
        {"image": name, "caption": caption, "image_id": f"id_{name}"}
        for name, caption in zip(names, captions, strict=True)
    ]
    path = folder / f"{len(list(folder.glob('*.json')))}.json"
    path.write_text(json.dumps(rows))
    processors = BlipImageTrainProcessor(image_size=32), BlipCaptionProcessor()
    return cls(*processors, str(root or folder), [str(path)])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with 0.jpg ... 5.jpg, noise images that compress badly."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(6):
        noise = rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.jpg", quality=95)
    return folder


@pytest.fixture
def six_images(pictures, tmp_path):
    return lavis_set(tmp_path, [f"{k}.jpg" for k in range(6)], root=pictures)


class RandomSamples(Dataset):
    """Samples of three random draws; broken ones raise or are None."""

    def __init__(self, size=8, broken=None):
        self.size = size
        self.broken = broken or {}
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        problem = self.broken.get(index)
        if isinstance(problem, Exception):
            raise problem
        if problem == "empty":
            return None
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
        return {"image": torch.tensor(drawn, dtype=torch.float64), "text_input": f"{index}"}


# Contents of a sample


@pytest.mark.strict_smoke
def test_sample_has_the_keys_that_the_step_needs(six_images):
    train = TrainingSet(six_images, seed=3)
    sample = train[4, 0]
    expected = {"image", "text_input", "index", "loaded_index", "image_id", "load_error"}
    assert sample.keys() == expected
    assert sample["image"].shape == (3, 32, 32) and sample["text_input"] == "caption 4"
    assert (sample["index"], sample["loaded_index"], sample["load_error"]) == (4, 4, "")
    assert sample["image_id"] == 4 and len(train) == 6


def test_collated_samples(six_images, pictures, tmp_path):
    # LAVIS's concatenation drops keys that some parts lack; ours are kept.
    names = ["5.jpg", "gone.jpg", "0.jpg"]
    train = TrainingSet(
        ConcatDataset([six_images, lavis_set(tmp_path, names, cls=CaptionDataset, root=pictures)])
    )
    batch = train.collater([train[k, 0] for k in (1, 6, 7)])
    assert batch["image"].shape == (3, 3, 32, 32)
    assert batch["text_input"][:2] == ["caption 1", "caption 0"]
    assert batch["index"].tolist() == [1, 6, 7] and batch["index"].dtype == torch.int64
    assert batch["loaded_index"].tolist()[:2] == [1, 6] and batch["loaded_index"][2] != 7
    # LAVIS's own image_id (0 of the second set) is replaced by one across all sets.
    assert batch["image_id"].tolist()[:2] == [1, 5]
    assert batch["image_id"][2] == train.image_ids[batch["loaded_index"][2]]
    assert batch["load_error"][:2] == ["", ""] and "gone.jpg" in batch["load_error"][2]


def test_truth_is_known_and_ids_are_not_copied_for_a_single_set_only(toy, six_images):
    assert TrainingSet(toy["train"]).truth == toy["train"].truth
    assert TrainingSet(toy["train"]).image_ids is toy["train"].image_ids  # not copied
    assert TrainingSet(ConcatDataset([toy["train"]])).truth == toy["train"].truth
    assert TrainingSet(ConcatDataset([toy["train"], six_images])).truth is None
    assert TrainingSet(six_images).truth is None


def test_iterable_data_sets_are_rejected(six_images):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    stream = Stream()
    # The results of LAVIS's concat_datasets for web data sets, and for both kinds together.
    for data in (
        stream,
        ChainDataset([stream]),
        (ConcatDataset([six_images]), ChainDataset([stream])),
    ):
        with pytest.raises(TypeError, match="map-style data sets.*image_text_json"):
            TrainingSet(data)


# Augmentation


@pytest.mark.strict_smoke
def test_augmentation_depends_only_on_seed_epoch_and_index(six_images):
    first = TrainingSet(six_images, seed=1)[2, 5]["image"]
    train = TrainingSet(six_images, seed=1)
    for drawn in range(3):
        random.seed(drawn), np.random.seed(drawn), torch.manual_seed(drawn)
        train[drawn, 0], train[drawn, 5], train[2, 4]
        assert torch.equal(train[2, 5]["image"], first)


def test_all_three_generators_are_seeded_and_restored():
    train = TrainingSet(RandomSamples(), seed=1)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    before = generator_states()
    expected = random.random(), np.random.rand(), torch.rand(())
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    first = train[3, 0]["image"]
    assert generator_states() == before
    assert (random.random(), np.random.rand(), torch.rand(())) == expected
    assert torch.equal(train[3, 0]["image"], first)
    others = [
        train[3, 1]["image"],
        train[4, 0]["image"],
        TrainingSet(RandomSamples(), seed=2)[3, 0]["image"],
    ]
    for other in others:
        assert (other != first).all()  # all three draws differ
    assert len({float(value) for drawn in [first, *others] for value in drawn}) == 12


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_number_of_workers_has_no_influence(workers):
    train = TrainingSet(RandomSamples(8, {5: OSError("broken")}), seed=1)
    plan = EpochPlan(np.array([3, 1, 5, 7, 0, 2, 4, 6]), batch_size=2, world_size=1)
    loader = DataLoader(
        train,
        batch_sampler=EpochBatches(plan, 0, epoch=2),
        num_workers=workers,
        collate_fn=train.collater,
        generator=torch.Generator(),
    )
    batches = list(loader)
    assert torch.cat([batch["index"] for batch in batches]).tolist() == plan.order.tolist()
    for batch in batches:
        expected = torch.stack([train[int(k), 2]["image"] for k in batch["index"]])
        assert torch.equal(batch["image"], expected)


# Samples that cannot be read

PROBLEMS = [
    FileNotFoundError("no file"),
    OSError("image file is truncated"),
    SyntaxError("broken PNG file"),
    ValueError("buffer is not large enough"),
    Image.DecompressionBombError("too many pixels"),
    "empty",
]


@pytest.mark.strict_smoke
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_unreadable_samples_are_replaced(problem):
    data = RandomSamples(50, {7: problem})
    train = TrainingSet(data, seed=4)
    sample = train[7, 3]
    assert sample["index"] == 7
    other = sample["loaded_index"]
    assert other != 7 and sample["text_input"] == str(other) and data.read == [7, other]
    assert sample["image_id"] == int(train.image_ids[other])
    message = sample["load_error"]
    if problem == "empty":
        assert message == "OSError: sample 7 is empty"
    else:
        assert message == f"{type(problem).__name__}: {problem}"
    # The replacement equals the sample requested by its own index.
    assert torch.equal(sample["image"], train[other, 3]["image"])
    # The same choice in every epoch and run; a different one for other samples and seeds.
    assert train[7, 8]["loaded_index"] == other
    replacements = {
        TrainingSet(RandomSamples(50, {k: problem}), seed=seed)[k, 0]["loaded_index"]
        for k in (7, 8, 9)
        for seed in range(4)
    }
    assert len(replacements) > 6


def test_no_readable_sample_is_an_error():
    data = RandomSamples(8, {k: OSError(f"number {k}") for k in range(8)})
    with pytest.raises(
        OSError,
        match=f"sample 3 and {ATTEMPTS - 1} in its place cannot be read; first: OSError: number 3",
    ):
        TrainingSet(data)[3, 0]
    assert len(data.read) == ATTEMPTS


# Samples of the same image


class Part:
    def __init__(self, size, **known):
        self.size = size
        self.__dict__.update(known)

    def __len__(self):
        return self.size


numbered = st.lists(st.integers(0, 30), min_size=1, max_size=6)
named = st.tuples(
    st.sampled_from(["/a", "/a/b", "/c"]),
    st.lists(st.sampled_from(["x", "b/x", "./x", "y"]), min_size=1, max_size=6),
)


@settings(max_examples=200)
@given(st.lists(st.one_of(numbered, named, st.integers(1, 4)), min_size=1, max_size=5))
def test_image_ids_are_equal_iff_images_are(given_parts):
    parts, images = [], []
    for part_number, part in enumerate(given_parts):
        if isinstance(part, int):
            parts.append(Part(part))
            images += [(part_number, "sample", k) for k in range(part)]
        elif isinstance(part, list):
            parts.append(Part(len(part), image_ids=np.array(part)))
            images += [(part_number, "number", k) for k in part]
        else:
            root, names = part
            parts.append(Part(len(names), vis_root=root, annotation=[{"image": n} for n in names]))
            images += [os.path.normpath(f"{root}/{name}") for name in names]
    ids = _image_ids_of(parts)
    assert len(ids) == len(images) == sum(map(len, parts))
    for i, mine in enumerate(images):
        for j, other in enumerate(images):
            assert (ids[i] == ids[j]) == (mine == other)


@pytest.mark.parametrize("wrong", [[0, 0, 1], [0.5] * 4, [0, 0, -1, 1], list("aabb")], ids=str)
@pytest.mark.parametrize("others", [0, 1])
def test_wrong_image_ids_of_a_data_set_are_refused(wrong, others):
    with pytest.raises(ValueError, match="image_ids of Part: expected 4 integers from 0 on, got"):
        _image_ids_of([Part(4, image_ids=wrong), *[Part(4) for _ in range(others)]])


# Display


def test_show_finds_the_image_in_its_part(pictures, tmp_path, toy):
    first = lavis_set(tmp_path, ["0.jpg", "1.jpg"], ["Zero!", "One"], root=pictures)
    last = lavis_set(tmp_path, ["3.jpg"], ["Three"], root=pictures)
    train = TrainingSet(ConcatDataset([first, toy["train"], last]))
    size = len(toy["train"])
    for index, name, caption in ((0, "0", "Zero!"), (1, "1", "One"), (size + 2, "3", "Three")):
        picture, text = train.show(index)
        expected = Image.open(pictures / f"{name}.jpg").convert("RGB")
        assert text == caption and np.array_equal(np.asarray(picture), np.asarray(expected))
    for local in (0, 5, size - 1):
        picture, text = train.show(local + 2)
        expected, caption = toy["train"].show(local)
        assert text == caption and np.array_equal(np.asarray(picture), np.asarray(expected))
    single_part = TrainingSet(last).show(0)
    assert single_part[1] == "Three" and single_part[0].size == (80, 60)


class OfFiles(torch.utils.data.Dataset):
    """Samples with files, without a table or annotations."""

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def source(self, index):
        return f"images/{self.names[index]}", "a caption"


@pytest.mark.parametrize("other", ["xbc", "axc", "abx"])
def test_another_file_is_another_identity(other):
    known, found = (DataIdentity.of(TrainingSet(OfFiles(names))) for names in ("abc", other))
    assert known.image_rows != found.image_rows and known.caption_rows == found.caption_rows
