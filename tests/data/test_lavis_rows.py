"""What LAVIS's builders make of annotation files as people write them."""

from __future__ import annotations

import json
import sys
import unicodedata

import numpy as np
import pytest
import yaml
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from lavis.datasets.datasets.coco_vqa_datasets import COCOVQADataset
from omegaconf import OmegaConf
from PIL import Image
from runs import PROCESSORS, ROOT, finish, spawn

from lavis_mafa.data import TrainingSet
from lavis_mafa.data.lavis_rows import build_checked, read_sample

IMAGE = "1.png"


def build(folder, name, contents, split="val", allowed=0.0):
    """Build a split of a LAVIS builder from files with the given contents."""
    for image in (IMAGE, "1.jpg"):
        Image.new("RGB", (8, 8)).save(folder / image)
    builder = registry.get_builder_class(name)
    config = OmegaConf.to_container(load_dataset_config(builder.default_config_path()))
    paths = [str(folder / f"{number}.json") for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        with open(path, "w") as file:
            file.write(content if isinstance(content, str) else json.dumps(content))
    config["build_info"] = {
        "annotations": {split: {"url": paths, "storage": paths}},
        config["data_type"]: {"storage": str(folder)},
    }
    for kind, processor in (("vis", "blip_image_eval"), ("text", "blip_caption")):
        given = {"name": processor, **({"image_size": 8} if kind == "vis" else {})}
        config[f"{kind}_processor"] = {"train": given, "eval": given}
    made = OmegaConf.create(config)
    built = build_checked(lambda: {name: builder(made).build_datasets()}, {name: made}, allowed)
    return built[name][split]


PAIR = {"image": IMAGE, "image_id": 7, "caption": "a dog"}
LISTED = {"image": IMAGE, "caption": ["a dog", "b"]}
ASKED = {"image": IMAGE, "question": "what?", "question_id": 1}
NLVR = {"images": [IMAGE, IMAGE], "sentence": "a dog", "label": "True"}
CHOICES = {**ASKED, "choices": ["a", "b"], "correct_choice_idx": 0}


@pytest.mark.parametrize(
    ("name", "split", "contents"),
    [
        ("coco_retrieval", "train", [[PAIR], [{**PAIR, "image_id": "x"}]]),
        ("coco_retrieval", "val", [[LISTED], [{**LISTED, "image": "1.jpg"}]]),
        ("flickr30k", "test", [[LISTED]]),
        ("sbu_caption", "train", [[PAIR]]),
        ("coco_caption", "val", [[PAIR, {**PAIR, "caption": ["b", None]}]]),
        ("coco_vqa", "train", [[{**ASKED, "answer": ["red", ""]}]]),
        ("coco_vqa", "val", [[ASKED, {**ASKED, "question_id": "q-1"}], ["red", "blue"]]),
        ("vg_vqa_mafa", "train", [[{**ASKED, "answer": "red"}]]),
        ("aok_vqa", "train", [[{**CHOICES, "direct_answers": ["red"]}]]),
        ("nlvr_mafa", "val", [[NLVR]]),
    ],
)
def test_files_of_the_right_form_are_read(tmp_path, name, split, contents):
    data = build(tmp_path, name, contents, split)
    rows = contents[0] if name == "coco_vqa" else [row for one in contents for row in one]
    assert len(data) == len(rows) and data[0] is not None
    assert [{**row, **own} for row, own in zip(data.annotation, rows, strict=True)] == (
        data.annotation
    )


@pytest.mark.parametrize(
    ("name", "split", "row", "message"),
    [
        ("coco_retrieval", "val", PAIR, "'caption': expected a list of texts, of one where"),
        ("coco_retrieval", "val", {**PAIR, "caption": []}, "'caption': expected a list of texts"),
        ("coco_retrieval", "val", {**PAIR, "caption": None}, "'caption' is missing or null"),
        ("coco_retrieval", "val", {**PAIR, "caption": ["a", 7]}, "expected a list of texts"),
        ("flickr30k", "test", {"caption": ["a dog"]}, "'image' is missing or null"),
        ("coco_retrieval", "train", {**PAIR, "caption": ["a dog"]}, "'caption': expected a text"),
        ("coco_retrieval", "train", {"image": IMAGE, "caption": "a"}, "'image_id' is missing"),
        ("sbu_caption", "train", "a dog", "expected an object, got 'a dog'"),
        ("coco_vqa", "train", {**ASKED, "answer": "red"}, "got 'red' (question 1)"),
        ("coco_vqa", "train", {**ASKED, "answer": []}, "'answer': expected a list"),
        ("coco_vqa", "train", {**ASKED, "answer": [{"answer": "red"}]}, "expected a list of ans"),
        ("coco_vqa", "train", {**ASKED, "answer": [3]}, "'answer': expected a list of answers"),
        ("coco_vqa", "train", ASKED, "'answer' is missing or null, got image"),
        ("gqa", "train", {**ASKED, "answer": ["red"]}, "'answer': expected a text"),
        ("aok_vqa", "train", {**ASKED, "direct_answers": "red"}, "'direct_answers': expected a li"),
        ("nlvr", "val", {**NLVR, "images": IMAGE}, "'images': expected a list of texts"),
    ],
)
def test_other_values_are_refused_by_file_and_row(tmp_path, name, split, row, message):
    with pytest.raises(ValueError) as error:
        build(tmp_path, name, [[row]], split)
    assert f"{tmp_path / '0.json'} cannot be used" in str(error.value)
    assert "0.json, row 0: " in str(error.value) and message in str(error.value)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([[]], r"0\.json has no rows"),
        ([{"annotations": [PAIR]}], r"0\.json: expected a list of rows, got \{'annotations'"),
        (['"text"'], r"0\.json: expected a list of rows, got 'text'"),
        ([[LISTED], "[{]"], r"1\.json is not JSON"),
    ],
)
def test_files_without_rows_are_refused(tmp_path, contents, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, "coco_retrieval", contents)


def test_unusable_training_pairs_are_counted_up_to_the_permitted_share(tmp_path, caplog):
    rows = [PAIR] * 8 + [{**PAIR, "caption": None}, {**PAIR, "caption": ["a"]}]
    data = build(tmp_path, "coco_retrieval", [rows], "train", allowed=0.2)
    assert "2 of 10 rows of" in caplog.text and "row 8: 'caption' is missing" in caplog.text
    for index in (8, 9):
        with pytest.raises(ValueError, match=f"row {index}: expected text as 'caption'"):
            read_sample(data, index)
    with pytest.raises(ValueError, match="cannot be used"):
        build(tmp_path, "coco_retrieval", [rows], "train", allowed=0.1)


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("bad", [{"caption": "a"}, {"image": None, "caption": "a"}], ids=str)
def test_rows_without_an_image_are_unreadable_samples(tmp_path, place, bad):
    rows = [{"image": IMAGE, "caption": f"caption {k}"} for k in range(6)]
    rows[place] = bad
    data = TrainingSet(build(tmp_path, "sbu_caption", [rows], "train", allowed=0.2))
    assert len(set(np.delete(data.image_ids, place).tolist())) == 1
    assert "expected text as 'image'" in data[place, 0]["load_error"]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        (
            "coco_retrieval",
            [LISTED, {**LISTED, "image": "./1.png"}],
            "row 1: .* got '1.png', the id of row 0",
        ),
        ("coco_vqa", [ASKED, ASKED], "row 1: .* got '1', the id of row 0 as well"),
        ("gqa", [ASKED, {**ASKED, "question_id": "1"}], "'1', the id of row 0 as well"),
        ("coco_caption", [{"image": f"{i}/x_1.jpg"} for i in "ab"], "'1', the id of a/x_1.jpg"),
    ],
)
def test_rows_that_share_an_id_are_refused(tmp_path, name, rows, message):
    files = [rows, ["red"]] if name == "coco_vqa" else [rows]
    with pytest.raises(ValueError, match=message):
        build(tmp_path, name, files)


@pytest.mark.parametrize("split, row", [("train", PAIR), ("val", LISTED)])
def test_pictures_are_found_by_any_unicode_form_of_their_names(tmp_path, split, row):
    names = [unicodedata.normalize(form, "café.png") for form in ("NFC", "NFD")]
    Image.new("RGB", (8, 8), "red").save(tmp_path / names[1])
    data = build(tmp_path, "coco_retrieval", [[{**row, "image": names[0]}]], split)
    assert data[0]["image"].shape == (3, 8, 8) and data.annotation[0]["image"] == names[1]
    Image.new("RGB", (8, 8), "red").save(tmp_path / names[0])
    data = build(tmp_path, "coco_retrieval", [[{**row, "image": names[0]}]], split)
    assert data.annotation[0]["image"] == names[0]


@pytest.mark.parametrize("number", [1, 3])
def test_number_of_files_with_questions_is_checked(tmp_path, number):
    files = [[ASKED], ["red"], {}][:number]
    with pytest.raises(ValueError, match=rf"val has {number} file\(s\), .*0\.json.*expected 2 or"):
        build(tmp_path, "coco_vqa", files)


def test_data_set_of_a_user_may_read_its_rows_itself(tmp_path, monkeypatch):
    class Own(COCOVQADataset):
        def __getitem__(self, index):
            return self.annotation[index]["answer"]

    monkeypatch.setattr(registry.get_builder_class("coco_vqa"), "train_dataset_cls", Own)
    assert build(tmp_path, "coco_vqa", [[{"answer": "red"}]], "train")[0] == "red"


def test_command_refuses_a_row_before_a_model_is_built(tmp_path):
    config = yaml.safe_load((ROOT / "projects/mafa/train/vqa_ft.yaml").read_text())
    info = {"annotations": {}, "images": {"storage": str(tmp_path)}}
    (tmp_path / "rows.json").write_text(json.dumps([{**ASKED, "answer": "red"}] * 2))
    storage = [str(tmp_path / "rows.json")]
    info["annotations"]["train"] = {"url": storage, "storage": storage}
    config["datasets"] = {"coco_vqa": {**PROCESSORS, "build_info": info}}
    config["run"].update(device="cpu", amp=False, test_splits=[], batch_size_train=2, num_workers=0)
    config["model"].update(pretrained=None, load_pretrained=False, model_type="tiny", image_size=32)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "lavis_mafa", "train", "--cfg-path", "config.yaml"]
    output = finish(spawn(tmp_path, command), status=1)
    assert "rows.json, row 0, row 1: 'answer': expected a list of answers" in output
    assert "Traceback" not in output and "parameters" not in output
