"""RefCOCO+'s files."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import textwrap

import pytest
from lavis.common.registry import registry
from PIL import Image

from lavis_mafa.data import TrainingSet
from lavis_mafa.downstream import RefCocoPlusBuilder, refcoco

WITHOUT_BOXES = [
    {"image": "train2014/COCO_train2014_000000000012.jpg", "text": "red (left)", "ref_id": 3},
    {"image": "train2014/COCO_train2014_000000000007.jpg", "text": "green", "ref_id": 1},
    {"image": "train2014/COCO_train2014_000000000012.jpg", "text": "the other", "ref_id": 4},
]
REFS = [
    {"ref_id": 1, "ann_id": 10, "split": "testA", "sentences": []},
    {"ref_id": 3, "ann_id": 11, "split": "testB"},
    {"ref_id": 4, "ann_id": 12, "split": "testA"},
]
INSTANCES = {
    "images": [],
    "annotations": [
        {"id": 10, "bbox": [1, 2, 3, 4]},
        {"id": 11, "bbox": [0.5, 0, 10, 5]},
        {"id": 12, "bbox": [5, 5, 5, 5]},
    ],
}
BOXES = [[0.5, 0, 10, 5], [1, 2, 3, 4], [5, 5, 5, 5]]
ROWS = [
    {**row, "bbox": box, "split": split}
    for row, box, split in zip(WITHOUT_BOXES, BOXES, ("testB", "testA", "testA"), strict=True)
]
DETECTIONS = {"12": [[0, 0, 10, 5, 0.9], [5, 5, 5, 5]], "7": [[1, 2, 3, 4]]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "coco/train2014").mkdir(parents=True)
    for number, colour in ((12, "red"), (7, "lime")):
        picture = Image.new("RGB", (20, 12), colour)
        picture.save(tmp_path / f"coco/train2014/COCO_train2014_{number:012d}.jpg")
    write("train.json", [{"image": row["image"], "text": row["text"]} for row in ROWS])
    write("test.json", ROWS)
    write("dets.json", DETECTIONS)
    return tmp_path


def write(path, content):
    with open(path, "w") as file:
        json.dump(content, file)


def build(**changes):
    info = {
        "annotations": {"train": {"storage": "train.json"}, "test": {"storage": ["test.json"]}},
        "images": {"storage": "coco"},
        "detections": {"storage": "dets.json"},
    }
    processors = {
        "vis_processor": {
            k: {"name": "blip_image_eval", "image_size": 8} for k in ("train", "eval")
        }
    }
    return RefCocoPlusBuilder({"build_info": {**info, **changes}, **processors}).build_datasets()


def test_refcoco_evaluation_samples(folder):
    test = build()["test"]
    assert registry.get_builder_class("refcoco_plus") is RefCocoPlusBuilder
    assert len(test) == 3
    first = test[0]
    assert first.pop("image").shape == (3, 8, 8)
    assert first == {
        "text_input": "red left",
        "index": 0,
        "instance_id": "0",
        "size": [12, 20],
        "box": [0.5, 0.0, 10.0, 5.0],
        "boxes": [[0.0, 0.0, 10.0, 5.0], [5.0, 5.0, 5.0, 5.0]],
        "split": "testB",
        "ref_id": 3,
    }
    assert [test[i]["split"] for i in range(3)] == ["testB", "testA", "testA"]
    assert test[1]["boxes"] == [[1.0, 2.0, 3.0, 4.0]] == [test[1]["box"]]
    picture, text = test.show(1)
    assert picture.getpixel((3, 3))[1] > 200 and text == "green"


def test_refcoco_training_samples(folder):
    splits = build(annotations={"train": {"storage": ["train.json", "test.json"]}})
    assert list(splits) == ["train"]
    train = TrainingSet(splits["train"], seed=0)
    batch = train.collater([train[i, 0] for i in range(6)])
    assert batch["image"].shape == (6, 3, 8, 8)
    assert batch["image_id"].tolist() == [0, 1, 0, 0, 1, 0] == train.image_ids.tolist()
    assert batch["text_input"] == ["red left", "green", "the other"] * 2
    assert batch["instance_id"] == [str(i) for i in range(6)]
    assert train.show(4)[1] == "green"


def test_parts_and_numbers_of_rows_are_optional(folder):
    rows = [{"image": row["image"], "text": row["text"], "bbox": [1, 1, 2, 2]} for row in ROWS]
    rows[2] |= {"split": "mine", "image_id": 7}
    write("own.json", rows)
    val = build(annotations={"val": {"storage": "own.json"}})["val"]
    assert [val[i]["split"] for i in range(3)] == [None, None, "mine"]
    assert "ref_id" not in val[0] and val[2]["box"] == [1, 1, 2, 2]
    assert val[2]["boxes"] == [[1, 2, 3, 4]]  # image_id takes precedence over the file name


@pytest.mark.parametrize(
    "image, box, inside",
    [
        ("plain", [10, 1, 9, 9], True),
        ("plain", [12.4, -0.5, 8.2, 12.6], True),  # COCO's boxes end up to a pixel outside
        ("turned", [1, 10, 9, 9], True),
        ("turned", [10, 1, 9, 9], False),  # a box of the picture as it is stored
        ("plain", [10, 1, 19, 10], False),  # two corners
        ("plain", [0.5, 0.1, 0.3, 0.4], False),  # shares of width and height
        ("plain", [-5, 1, 4, 4], False),
    ],
)
def test_boxes_are_in_the_picture_as_viewers_show_it(folder, caplog, image, box, inside):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 12)).save(folder / "coco/plain.jpg")
    Image.new("RGB", (20, 12)).save(folder / "coco/turned.jpg", exif=exif)
    row = {"image": f"{image}.jpg", "text": "red", "bbox": box, "image_id": 7}

    def read(good):
        write("own.json", [row, *[{**row, "image": "plain.jpg", "bbox": [1, 1, 9, 9]}] * good])
        return build(annotations={"val": {"storage": "own.json"}})["val"]

    if inside:
        assert len(read(0)) == 1 and "outside" not in caplog.text
        return
    with pytest.raises(ValueError, match=rf"1 of 2 boxes cannot be used:\n  row 0: .*{image}\.jpg"):
        read(1)
    assert len(read(199)) == 200 and "1 of 200 boxes are outside of their pictures" in caplog.text


def test_image_key():
    assert refcoco._image_key({"image": "a/COCO_train2014_000000000120.jpg"}) == "120"
    assert refcoco._image_key({"image": "a/120_0.jpg", "image_id": 5}) == "5"
    assert refcoco._image_key({"image": "a/horse.jpg"}) == "horse"


BAD = {
    "no rows": ({"test.json": []}, "test.json has no rows"),
    "no text": ({"test.json": [{"image": "a.jpg", "text": " "}]}, "row 0: expected a text"),
    "no row": ({"test.json": ["a.jpg"]}, "test.json .*\n  row 0: .*got 'a.jpg'"),
    "no box": ({"test.json": WITHOUT_BOXES}, "row 0, row 1, row 2: it has no bbox"),
    "flat box": ({"test.json": [{**ROWS[0], "bbox": [1, 1, 0, 4]}]}, "row 0: box .* has no area"),
    "short box": ({"test.json": [{**ROWS[0], "bbox": [1, 1, 4]}]}, "row 0: .*got .1, 1, 4"),
    "nan box": ({"test.json": [{**ROWS[0], "bbox": [1, 1, 4, float("nan")]}]}, "row 0: .*nan"),
    "text box": ({"test.json": [{**ROWS[0], "bbox": [1, 1, True, "4"]}]}, "row 0: .*got .1, 1, T"),
    "image without detections": (
        {"dets.json": {"7": []}},
        "row 0, row 2: detections have no image '12'",
    ),
    "detections as a list": ({"dets.json": []}, "dets.json has another form"),
    "wrong detection": ({"dets.json": {"12": [[1, 2, 3]]}}, "dets.json .*\n  row 0: .*1, 2, 3"),
    "detection without a list": ({"dets.json": {"12": 3}}, "dets.json .*\n  row 0: .*'12', 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_files_are_rejected(folder, name):
    files, message = BAD[name]
    for path, content in files.items():
        write(path, content)
    with pytest.raises(ValueError, match=message):
        build()


def test_missing_files_are_named(folder):
    with pytest.raises(FileNotFoundError, match="images.storage: no such folder: 'nowhere'"):
        build(images={"storage": "nowhere"})
    with pytest.raises(FileNotFoundError, match="nothing"):
        build(detections={"storage": "nothing"})
    with pytest.raises(ValueError, match="detections.storage: expected a file of proposals"):
        build(detections={"storage": None})
    with pytest.raises(ValueError, match="expected train, val, test, .* got unknown testA"):
        build(annotations={"testA": {"storage": "test.json"}})
    with pytest.raises(ValueError, match="expected train, val, test, .* got none"):
        build(annotations={})
    (folder / "dets.json").write_text("{")
    with pytest.raises(ValueError, match="dets.json is not JSON"):
        build()


def test_conversion_as_documented(folder):
    """The documented program, on files in RefCOCO+'s formats, gives the rows of these tests."""
    (folder / "refcoco+").mkdir()
    (folder / "refcoco+/refs(unc).p").write_bytes(pickle.dumps(REFS, protocol=2))
    write("refcoco+/instances.json", INSTANCES)
    for split in ("val", "test"):
        write(f"refcoco+_{split}.json", WITHOUT_BOXES)
    code = textwrap.dedent(refcoco.__doc__.partition("::\n\n")[2])
    subprocess.run([sys.executable, "-c", code], check=True)
    for split in ("val", "test"):
        assert json.loads((folder / f"refcoco+_{split}_boxes.json").read_text()) == ROWS
