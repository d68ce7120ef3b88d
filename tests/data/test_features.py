"""Folders of features of images: made by `lavis-mafa features`, or one's own."""

from __future__ import annotations

import json
import os
import pickle
import runpy

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT
from PIL import Image
from shard_files import write_shards

from lavis_mafa.cli import main
from lavis_mafa.data import TrainingSet
from lavis_mafa.data.augmentation import QuickAugmentation
from lavis_mafa.data.feature_folder import FeatureFolder
from lavis_mafa.data.image_text_json import ImageTextJsonBuilder, ImageTextShardsBuilder
from lavis_mafa.tools.feature_making import Encoder, make_features, pictures_of

COUNT, SIZE = 7, 16


def halves_of(images):
    """The mean colours of the left and right half: (B, 3, H, W) -> (B, 2, 3)."""
    assert images.shape[1:] == (3, SIZE, SIZE)
    return torch.stack([half.mean((2, 3)) for half in images.chunk(2, dim=3)], dim=1)


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALVES = Encoder(halves_of, SIZE, MEAN, STD, "halves")
MEANS = Encoder(lambda images: images.mean((2, 3)), SIZE, (0, 0, 0), (1, 1, 1), "mine")


@pytest.fixture
def files(tmp_path):
    """Seven pictures with two captions each, of which the last picture is damaged."""
    draw, rows = np.random.default_rng(0), []
    (tmp_path / "images").mkdir()
    for k in range(COUNT):
        pixels = draw.integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/{k}.png")
        rows.append({"image": f"{k}.png", "caption": [f"red circle {k}", f"big box {k}"]})
    (tmp_path / f"images/{COUNT - 1}.png").write_bytes(b"\x89PNG damaged")
    (tmp_path / "train.json").write_text(json.dumps(rows))
    return tmp_path


def pairs_of(files):
    return pictures_of([files / "train.json"], files / "images")


def make(files, encoder=HALVES, **how):
    return make_features(pairs_of(files), files / "features", encoder, **how)


def halves(path):
    """The features of the two views of a picture, in float64."""
    colours = np.asarray(Image.open(path)).astype(np.float64) / 255
    plain = (np.stack([half.mean((0, 1)) for half in np.split(colours, 2, axis=1)]) - MEAN) / STD
    return np.stack([plain, plain[::-1]])


def built(builder, **info):
    return builder({"build_info": info}).build_datasets()


def of_json(files, **info):
    annotations = {s: {"storage": f"{files}/train.json"} for s in ("train", "val")}
    features = {"storage": f"{files}/features"}
    return built(ImageTextJsonBuilder, annotations=annotations, features=features, **info)


def test_features_are_what_training_reads(files, caplog):
    caplog.set_level("INFO")
    assert make(files) == 1, "a picture is unreadable"
    assert "7 images of 2 x 2 x 3 float16" in caplog.text
    assert caplog.text.count("unreadable: ") == 1
    splits = of_json(files)
    train, val = splits["train"], splits["val"]
    for k in range(COUNT - 1):
        expected = halves(files / f"images/{k}.png")
        row = train.features.row(k)
        assert row.dtype == np.float16 and np.allclose(row, expected, atol=2e-3)
        assert not np.allclose(expected[0], expected[1], atol=2e-2), "views differ"
        first = val[k]["image"]
        assert first.dtype == torch.float32 and np.array_equal(first.numpy(), row[0])
    with pytest.raises(OSError, match=r"6\.png: its features are NaN: an unreadable picture"):
        val[COUNT - 1]
    with pytest.raises(OSError, match=r"0\.png: build_info.images.storage names no folder"):
        train.show(0)
    assert train.source(0).caption == "red circle 0", "captions do not need the pictures"


def test_training_draws_views_as_it_draws_augmentations(files):
    make(files)
    pairs = TrainingSet(of_json(files)["train"], seed=3)
    part = pairs.parts[0]

    def views(epoch):
        found = [pairs[index, epoch]["image"].numpy() for index in range(12)]
        rows = [part.features.row(index // 2) for index in range(12)]
        match = [
            [np.array_equal(one, view) for view in row]
            for one, row in zip(found, rows, strict=True)
        ]
        return [one.index(True) for one in match]

    drawn = [views(epoch) for epoch in range(4)]
    assert {0, 1} == {one for epoch in drawn for one in epoch} and drawn[0] != drawn[1]
    torch.manual_seed(9)
    assert views(2) == drawn[2], "by seed, epoch and index only"
    sample = pairs[12, 0]
    assert "unreadable picture" in sample["load_error"] and sample["loaded_index"] < 12
    copy = pickle.loads(pickle.dumps(part.features))
    assert "_arrays" not in vars(copy), "a worker maps the files itself"
    assert np.array_equal(copy.row(3), part.features.row(3))


def test_con_d_may_read_the_pictures_of_images_whose_features_are_trained_on(files):
    make(files)
    splits = of_json(files, images={"storage": f"{files}/images"})
    pairs = TrainingSet(splits["train"])
    assert pairs.add_view("con_d_image", lambda picture: torch.tensor(picture.size))
    sample = pairs[0, 0]
    assert sample["con_d_image"].tolist() == [SIZE, SIZE] and sample["image"].shape == (2, 3)
    assert not isinstance(splits["train"].vis_processor, QuickAugmentation)


def test_making_resumes_and_is_shared(files, monkeypatch):
    monkeypatch.setattr("lavis_mafa.tools.feature_making._FILE_BYTES", 2 * 2 * 2 * 3 * 2)
    out, encoded = files / "features", []

    def encode(images):
        encoded.extend(images[:, 0, 0, 0].tolist())
        if len(encoded) > stop:
            raise KeyboardInterrupt
        return images.mean((2, 3))[:, None].repeat(1, 2, 1)

    stop = 5  # a blank picture first, then two views of each
    encoder, how = Encoder(encode, SIZE, MEAN, STD, "mine"), {"batch_size": 1}
    with pytest.raises(KeyboardInterrupt):
        make(files, encoder, part=(1, 2), **how)
    made = out / "features_2.npy"  # the second of four files, each of two rows
    assert [path.name for path in out.glob("features*")] == [made.name]
    before, stop = made.stat().st_mtime_ns, 99
    encoded.clear()
    make(files, encoder, part=(1, 2), **how)
    assert len(encoded) == 2 and made.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="features_2.npy begins at row 2, but the files before"):
        FeatureFolder(out)
    make(files, encoder, part=(0, 2), **how)
    assert FeatureFolder(out).shape == (2, 2, 3) and len(FeatureFolder(out).names()) == COUNT
    whole = np.concatenate([FeatureFolder(out).row(k)[None] for k in range(COUNT)])
    make_features(pairs_of(files), files / "one", encoder, **how)
    again = np.concatenate([FeatureFolder(files / "one").row(k)[None] for k in range(COUNT)])
    assert np.array_equal(whole, again, equal_nan=True)
    other = Encoder(encode, SIZE, MEAN, STD, "another")
    with pytest.raises(ValueError, match="was written for something else .encoder: mine"):
        make(files, other, **how)


def command(files, *more):
    given = [f"{files}/train.json", "--images", f"{files}/images", "--output", f"{files}/features"]
    return ["features", *given, "--workers", "0", *map(str, more)]


def test_command_with_a_model_of_timm(files):
    import timm

    torch.manual_seed(0)
    name = "mobilenetv3_small_075"
    model = timm.create_model(name, num_classes=10).eval()
    torch.save(model.state_dict(), files / "weights.pth")
    given = ["--encoder", name, "--weights", files / "weights.pth", "--image-size", 64]
    assert main(command(files, *given, "--views", "plain")) == 1
    folder = FeatureFolder(files / "features")
    picture = Image.open(files / "images/0.png").resize((64, 64), Image.Resampling.BICUBIC)
    mean, std = (np.array(model.default_cfg[key]) for key in ("mean", "std"))
    pixels = torch.tensor((np.asarray(picture) / 255 - mean) / std).float().permute(2, 0, 1)
    with torch.no_grad():
        expected = model.forward_features(pixels[None])[0].flatten(1).T
    assert folder.shape == (1, *expected.shape)
    assert torch.allclose(torch.tensor(np.array(folder.row(0)[0])).float(), expected, atol=2e-3)


def test_example_with_a_users_encoder(files):
    run = runpy.run_path(str(ROOT / "examples/own_features.py"))["main"]
    assert run(str(files / "images"), str(files / "features"), str(files / "train.json")) == 1
    assert of_json(files)["val"][0]["image"].shape == (49, 3)


def test_images_in_shards_and_parquet_are_found_wherever_they_lie(files):
    pictures = [(files / f"images/{k}.png").read_bytes() for k in range(COUNT - 1)]
    samples = [(f"{k % 3}", data, "png", f"box {k}", {}) for k, data in enumerate(pictures)]
    for k, name in ((0, "shards"), (3, "more")):
        write_shards(files / name, iter(samples[k : k + 3]))
    pairs = pictures_of([f"{files}/{name}/*.tar" for name in ("shards", "more")], None)
    with pytest.raises(ValueError, match=r"two images are named 'pairs-000000\.tar/0\.png'"):
        make_features(pairs, files / "double", MEANS)
    os.rename(files / "more/pairs-000000.tar", files / "shards/other.tar")
    table = pa.table({"image": pictures, "caption": [f"box {k}" for k in range(len(pictures))]})
    (files / "hub").mkdir()
    for k in (0, 3):
        pq.write_table(table.slice(k, 3), files / f"hub/train-{k}.parquet")
    for builder, source in ((ImageTextShardsBuilder, "shards"), (ImageTextJsonBuilder, "hub")):
        suffix = "*.tar" if source == "shards" else "*.parquet"
        pairs = pictures_of([f"{files}/{source}/{suffix}"], None)
        make_features(pairs, files / f"of_{source}", MEANS)
        os.rename(files / source, files / f"moved_{source}")
        annotations = {"train": {"storage": f"{files}/moved_{source}/{suffix}"}}
        features = {"storage": f"{files}/of_{source}"}
        train = built(builder, annotations=annotations, features=features)["train"]
        assert len(train) == COUNT - 1
        for k in range(len(train)):
            pixels = np.asarray(train.picture(k)) / 255
            assert np.allclose(train[k]["image"], pixels.mean((0, 1)), atol=1e-3)


def write_own(folder, features, names, name="features.npy"):
    folder.mkdir(exist_ok=True)
    np.save(folder / name, features)
    (folder / "names.txt").write_text("\n".join(names))


@pytest.mark.parametrize(("shape", "expected"), [((7, 3), (1, 1, 3)), ((7, 2, 3), (1, 2, 3))])
def test_features_made_by_the_user(files, shape, expected):
    features = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    names = [f"{k}.png" for k in reversed(range(COUNT))]
    write_own(files / "features", features, names)
    splits = of_json(files)
    assert splits["train"].features.shape == expected
    assert np.array_equal(splits["val"][1]["image"], features[5].reshape(expected[1:]))
    with pytest.raises(ValueError, match="has features that were not made here"):
        make(files, MEANS)
    odd = ["a\u0085b.png", *names[1:]]
    (files / "features/names.txt").write_bytes(f"\ufeff{chr(10).join(odd)}\n".encode())
    assert FeatureFolder(files / "features").names() == odd


def _cut(folder):
    data = (folder / "features.npy").read_bytes()
    (folder / "features.npy").write_bytes(data[:-10])


def _pickle(folder):
    np.save(folder / "features.npy", np.array([{}] * COUNT), allow_pickle=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "features.npy").unlink(), r"expected features of one shape, found no"),
        (lambda f: (f / "names.txt").unlink(), r"has no names\.json or names\.txt"),
        (lambda f: (f / "names.json").write_text('["0.png", 1]'), "expected a list of image names"),
        (lambda f: (f / "names.txt").write_text("0.png"), "has 1 names and 7 rows"),
        (lambda f: (f / "names.txt").write_text("0.png\n" * 8), "has 8 names and 7 rows"),
        (lambda f: np.save(f / "features.npy", np.zeros((7, 2), int)), "has int64 of the shape"),
        (lambda f: np.save(f / "features_7.npy", np.zeros((1, 4))), "has float64 of the shape"),
        (lambda f: np.save(f / "features_7.npy", np.zeros((1, 9), "f4")), "of one shape, found"),
        (lambda f: np.save(f / "features_x.npy", np.zeros((1, 4))), "that begins at row N"),
        (
            lambda f: np.save(f / "features_0.npy", np.zeros((7, 2, 3), "f2")),
            "two begin at one row",
        ),
        (_cut, r"features\.npy is damaged"),
        (_pickle, r"features\.npy is damaged"),
    ],
)
def test_damaged_folder(files, damage, message):
    names = [f"{k}.png" for k in range(COUNT)]
    write_own(files / "features", np.zeros((COUNT, 2, 3), np.float16), names)
    assert len(of_json(files)["train"]) == 2 * COUNT
    damage(files / "features")
    with pytest.raises(ValueError, match=message):
        of_json(files)
