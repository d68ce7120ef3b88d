"""Bad images and captions affect no other samples: each kind is trained on or replaced."""

from __future__ import annotations

import itertools
import json
import os
from functools import partial

import pytest
import torch
from bad_pairs import (
    CAPTIONS,
    CUT,
    EXPECTED_PIXEL,
    PACKED,
    POSTSCRIPT,
    REPLACED,
    UNKNOWN,
    DefectivePairs,
    iptc,
)
from faulty_runs import bits_differing, state
from lavis.datasets.datasets.caption_datasets import CaptionDataset
from lavis.datasets.datasets.image_text_pair_datasets import ImageTextPairDataset
from lavis.datasets.datasets.retrieval_datasets import RetrievalDataset
from lavis.processors.blip_processors import BlipCaptionProcessor
from PIL import Image, ImageFile
from runs import (
    PROCESSORS,
    TOY,
    recording,
    records,
    run_here,
    write_toy_config,
)

from lavis_mafa.data import TrainingSet
from lavis_mafa.data.data_check import check
from lavis_mafa.data.image_reading import read_rgb
from lavis_mafa.data.pairs import TrainPairs
from lavis_mafa.training.guard import UnreadableError

SETS = {
    "image_text_json": TrainPairs,
    "image_text_shards": partial(TrainPairs, vis_root=None),
    "image_text_parquet": partial(TrainPairs, vis_root=None),
    "coco_caption": CaptionDataset,
    "flickr30k": RetrievalDataset,
    "sbu_caption": ImageTextPairDataset,
}
pytestmark = [
    pytest.mark.timeout(280),  # opening a pipe blocks
    pytest.mark.filterwarnings("ignore:::PIL"),  # pytest replaces our own warning filter
]
# One builder of ours, which share their tables and data sets, and one of LAVIS's.
QUICK = (("image_text_shards", 0), ("flickr30k", 2))
EXPECTED_ERROR = {
    "pipe": "is a pipe",
    "folder": "Is a directory",
    "PostScript": "cannot identify image file",
    "PostScript inside IPTC": "cannot identify image file",
    "bomb of 144 megapixels": "144000000 pixels, more than the 89478485 allowed",
    "text-chunk bomb": "MAX_TEXT_CHUNK",
    "truncated JPEG": "truncated",
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {}

    def folder(builder):
        if builder not in folders:
            folders[builder] = DefectivePairs(tmp_path_factory.mktemp(builder) / "data", builder)
        return folders[builder]

    return folder


def first_pixel(image):
    return torch.tensor(image.getpixel((0, 0)))


def train_set(folder, processor=first_pixel):
    processors = processor, BlipCaptionProcessor()
    files = [str(folder.annotations())]
    if folder.builder in PACKED:
        return TrainingSet(SETS[folder.builder](*processors, ann_paths=files), seed=3)
    root = str(folder.path / "images")
    return TrainingSet(SETS[folder.builder](*processors, root, files), seed=3)


# What is read, and what is replaced


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("builder", SETS)
def test_bad_samples_are_either_read_or_replaced(folder_of, monkeypatch, builder, lenient):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)  # importing LAVIS sets it
    folder = folder_of(builder)
    train = train_set(folder)
    assert len(train) == len(folder.rows)
    processed = BlipCaptionProcessor()
    samples = [train[index, 0] for index in range(len(train))]
    for kind, index in folder.images.items():
        sample, pixel = samples[index], EXPECTED_PIXEL.get(kind)
        if pixel:
            assert sample["load_error"] == "" and sample["loaded_index"] == index, kind
            is_close = (sample["image"] - torch.tensor(pixel)).abs().max() <= 2
            assert is_close, f"{kind} is read as {sample['image'].tolist()}"
        else:
            assert sample["load_error"], f"{kind} is read"
            assert EXPECTED_ERROR.get(kind, "") in sample["load_error"]
    for kind, index in folder.captions.items():
        sample, refused = samples[index], index in folder.bad
        assert bool(sample["load_error"]) == refused, (kind, sample["load_error"])
        if not refused:
            assert sample["text_input"] == processed(CAPTIONS[kind][0]), kind
    replaced = {s["index"] for s in samples if s["load_error"]}
    assert replaced == folder.bad and len(folder.bad) >= 10
    for sample in samples:
        index, loaded = sample["index"], sample["loaded_index"]
        assert loaded not in folder.bad and (loaded == index) == (index not in folder.bad)
        assert torch.equal(sample["image"], samples[loaded]["image"])
        assert sample["text_input"] == samples[loaded]["text_input"]
        sample["load_error"].encode("utf-8")  # it must be writable to a log file


@pytest.mark.parametrize("content", [POSTSCRIPT, iptc(POSTSCRIPT)], ids=["plain", "inside IPTC"])
def test_postscript_is_never_run(tmp_path, monkeypatch, content):
    """Neither by our reader nor by Pillow's own, by which LAVIS's other data sets read."""
    mark, program = tmp_path / "it_ran", tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(OSError, match="a.jpg"):
        read_rgb(tmp_path / "a.jpg")
    with pytest.raises(OSError, match="Ghostscript"):
        Image.open(tmp_path / "a.jpg").convert("RGB")
    assert not mark.exists()


def test_check_data_finds_the_samples_that_training_replaces(folder_of):
    """By the same rules, for rows of `image_text_json` and of LAVIS's data sets."""
    for builder in ("image_text_json", "sbu_caption"):
        folder = folder_of(builder)
        root = folder.path / "images"
        found = check([folder.annotations()], root, workers=2)
        report, unusable = found["problems"], found["unusable"]
        expected = {folder.rows[k]["image"] for k in folder.bad if k not in folder.handling}
        found = [*report["missing_files"], *report["unreadable_images"]]
        malformed = report["malformed_rows"]
        assert len(found) + sum("ud83d.jpg" in line for line in malformed) == len(expected)
        captions = [k for k in folder.bad if folder.handling.get(k) == REPLACED]
        assert len(report["empty_captions"]) == len(captions) >= 3
        assert unusable == (2 if builder == "sbu_caption" else 0)


# Runs

EVALUATION = {"flickr30k", "coco_caption"}  # builders whose defaults have val and test


def config_of(folder, path):
    """Write the toy config with the folder's pairs instead of the toy world; return its path."""
    annotations = {"train": str(folder.annotations())}
    if folder.builder in EVALUATION:
        held_out = [{"image": folder.rows[0]["image"], "caption": ["red"], "image_id": "0"}]
        (path / "held_out.json").write_text(json.dumps(held_out))
        annotations.update(dict.fromkeys(("val", "test"), str(path / "held_out.json")))
    settings_ = {
        **PROCESSORS,
        "build_info": {
            "annotations": {s: {"url": f, "storage": f} for s, f in annotations.items()},
            "images": {"storage": str(folder.path / "images")},
        },
    }
    if folder.builder.startswith("image_text"):
        for files in settings_["build_info"]["annotations"].values():
            del files["url"]
    if folder.builder in PACKED:
        del settings_["build_info"]["images"]
    name = folder.builder.replace("parquet", "json")
    return write_toy_config(path / "config.yaml", {name: settings_})


WITHOUT_TOY = {
    **TOY,
    "model__mafa__con_d__arch": None,
    "run__max_epoch": 2,
    "run__grit__start_epoch": 1,
}


def lines(folder, name="unreadable.jsonl"):
    return [json.loads(line) for line in open(folder / "job" / name, encoding="utf-8")]


@pytest.mark.parametrize(
    "builder, workers",
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.faults)
        for pair in itertools.product(SETS, (0, 2))
    ],
)
def test_run_replaces_only_bad_samples(folder_of, tmp_path, builder, workers):
    folder = folder_of(builder)
    count, bad = len(folder.rows), sorted(folder.bad)
    changes = {**WITHOUT_TOY, "run__max_unreadable": 0.9, "run__num_workers": workers}
    changes["config"] = config_of(folder, tmp_path)
    full, resumed = tmp_path / "whole", tmp_path / "cut"
    with recording() as trained:
        run_here(full, **changes)
    steps = count // 8
    replaced = lines(full)
    for epoch in (0, 1):
        of_epoch = [r for r in trained if r["epoch"] == epoch]
        assert [len(r["index"]) for r in of_epoch] == [8] * steps  # full mini-batches
        indices = [index for r in of_epoch for index in r["index"]]
        assert sorted(indices) == [*range(count)]
        replaced_in_epoch = [r for r in replaced if r["epoch"] == epoch]
        assert sorted(r["index"] for r in replaced_in_epoch) == bad  # each once
        loaded = {r["index"]: r["read"] for r in replaced_in_epoch}
        assert not folder.bad & {*loaded.values()}
        epoch_record = records(full, "epoch")[epoch]
        trained_on = [loaded.get(index, index) for index in range(count)]
        fates = [folder.handling.get(index) for index in trained_on]
        assert epoch_record["samples_replaced"] == len(bad)
        assert epoch_record["captions_cut"] == fates.count(CUT) >= 1
        assert epoch_record["captions_unknown"] == fates.count(UNKNOWN) >= 1
    # Stopped within an epoch and resumed: the same replacements, statistics and weights.
    run_here(resumed, **changes, run__max_steps=steps + 3)
    run_here(resumed, **changes, run__resume_ckpt_path="auto")
    assert lines(resumed) == replaced
    assert bits_differing(state(resumed), state(full)) == 0
    timeless = [
        [{k: v for k, v in r.items() if k != "time"} for r in records(f, "epoch")]
        for f in (full, resumed)
    ]
    assert timeless[0] == timeless[1]


def test_too_many_bad_samples_stop_the_run_with_a_list(folder_of, tmp_path):
    folder = folder_of("image_text_json")
    config = config_of(folder, tmp_path)
    with pytest.raises(UnreadableError, match="than run.max_unreadable = 0.1 allows") as caught:
        run_here(tmp_path, **WITHOUT_TOY, config=config, run__max_unreadable=0.1)
    listed = {int(line.split(":")[0]) for line in str(caught.value).split("\n  ")[1:]}
    assert listed <= folder.bad and len(listed) >= 5
    assert {r["index"] for r in lines(tmp_path)} == listed
    assert not (tmp_path / "job" / "checkpoint_last.pth").exists()
