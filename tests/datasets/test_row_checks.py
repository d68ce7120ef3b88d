"""What LAVIS's builders make of annotation files as people write them."""

from __future__ import annotations

import json
import sys

import pytest
import yaml
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from lavis.datasets.datasets.coco_vqa_datasets import COCOVQADataset
from omegaconf import OmegaConf
from PIL import Image
from runs import PROCESSORS, ROOT, finish, spawn

from lavis_mafa.datasets.lavis_pairs import read_sample
from lavis_mafa.datasets.row_checks import checked_rows, require_answer_files

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
            json.dump(content, file)
    config["build_info"] = {
        "annotations": {split: {"url": paths, "storage": paths}},
        config["data_type"]: {"storage": str(folder)},
    }
    for kind, processor in (("vis", "blip_image_eval"), ("text", "blip_caption")):
        name = {"name": processor, **({"image_size": 8} if kind == "vis" else {})}
        config[f"{kind}_processor"] = {"train": name, "eval": name}
    with checked_rows(allowed):
        return builder(OmegaConf.create(config)).build_datasets()[split]


PAIR = {"image": IMAGE, "image_id": 7, "caption": "a dog"}
ASKED = {"image": IMAGE, "question": "what?", "question_id": 1}
NLVR = {"images": [IMAGE, IMAGE], "sentence": "a dog", "label": "True"}
VE = {"image": "1", "sentence": "a dog", "label": "neutral"}
CHOICES = {**ASKED, "choices": ["a", "b"], "correct_choice_idx": 0}
# By builder and split: the row, and what is read of it (key and value).
READ = {
    ("coco_retrieval", "val"): [
        ({**PAIR, "caption": "a dog"}, {"caption": ["a dog"]}),
        ({**PAIR, "caption": ["a dog", 7, "b"]}, {"caption": ["a dog", "7", "b"]}),
    ],
    ("flickr30k", "test"): [({**PAIR, "caption": "a dog"}, {"caption": ["a dog"]})],
    ("coco_retrieval", "train"): [
        ({**PAIR, "caption": ["a dog"]}, {"caption": "a dog", "image_id": 7}),
        ({"image": IMAGE, "caption": "a dog"}, {"caption": "a dog", "image_id": IMAGE}),
        ({**PAIR, "image_id": "07"}, {"image_id": "07"}),
    ],
    ("sbu_caption", "train"): [({"image": IMAGE, "caption": 2.0}, {"caption": "2"})],
    ("coco_caption", "val"): [
        ({**PAIR, "caption": ["a dog", None, " "]}, {"caption": ["a dog"]}),
        ({**PAIR, "caption": None}, {"caption": None}),
    ],
    ("coco_vqa", "train"): [
        ({**ASKED, "answer": "red"}, {"answer": ["red"]}),
        ({**ASKED, "answer": ["red", 3, ""]}, {"answer": ["red", "3", ""]}),
        ({**ASKED, "answer": [{"answer": "red", "answer_id": 1}]}, {"answer": ["red"]}),
        ({**ASKED, "answer": 3, "question_id": "q-1"}, {"answer": ["3"], "question_id": "q-1"}),
    ],
    ("ok_vqa", "train"): [({**ASKED, "answer": "red"}, {"answer": ["red"]})],
    ("vg_vqa", "train"): [({**ASKED, "answer": ["red"]}, {"answer": "red"})],
    ("vg_vqa_mafa", "train"): [({**ASKED, "answer": 3}, {"answer": "3"})],
    ("gqa", "train"): [({**ASKED, "answer": {"answer": "red"}}, {"answer": "red"})],
    ("aok_vqa", "train"): [({**ASKED, "direct_answers": "red"}, {"direct_answers": ["red"]})],
    ("nlvr", "train"): [({**NLVR, "label": True}, {"label": "True"})],
    ("nlvr_mafa", "val"): [({**NLVR, "label": "false"}, {"label": "False"})],
    ("snli_ve", "val"): [
        ({**VE, "image": 1, "label": "Neutral"}, {"image": "1", "label": "neutral"})
    ],
}


@pytest.mark.parametrize(
    ("name", "split", "row", "expected"),
    [(*key, *case) for key, cases in READ.items() for case in cases],
)
def test_values_with_one_meaning_are_read(tmp_path, name, split, row, expected):
    data = build(tmp_path, name, [[row]], split)
    assert {key: data.annotation[0][key] for key in expected} == expected
    assert data[0] is not None


@pytest.mark.parametrize(
    ("name", "split", "row", "message"),
    [
        ("coco_retrieval", "val", {**PAIR, "caption": []}, "'caption': expected a text or a list"),
        ("coco_retrieval", "val", {**PAIR, "caption": ["a dog", ""]}, "'caption': expected a text"),
        ("coco_retrieval", "val", {**PAIR, "caption": None}, "'caption' is missing or null"),
        ("flickr30k", "test", {"caption": ["a dog"]}, "'image' is missing or null"),
        ("flickr30k", "test", {**PAIR, "caption": {"raw": "a"}}, "'caption': expected a text"),
        ("coco_retrieval", "train", {**PAIR, "image": None}, "'image' is missing or null"),
        ("coco_retrieval", "train", {**PAIR, "image_id": [1]}, "'image_id': expected a whole"),
        (
            "coco_caption",
            "val",
            {**PAIR, "caption": [True]},
            "'caption': expected a text, got True",
        ),
        (
            "coco_vqa",
            "train",
            {**ASKED, "answer": []},
            "(question 1): 'answer': expected an answer",
        ),
        ("coco_vqa", "train", {**ASKED, "answer": ["red", None]}, "'answer': expected a text"),
        ("coco_vqa", "train", {**ASKED, "answer": [{"text": "red"}]}, "'answer': expected a text"),
        ("coco_vqa", "train", ASKED, "'answer' is missing or null; it has image"),
        ("gqa", "train", {**ASKED, "answer": ["red", "blue"]}, "'answer': expected one answer"),
        (
            "aok_vqa",
            "train",
            {**ASKED, "direct_answers": [""]},
            "'direct_answers': expected an answer",
        ),
        ("nlvr", "val", {**NLVR, "label": 1}, "'label': expected one of False, True, got 1"),
        ("nlvr", "val", {**NLVR, "images": IMAGE}, "'images': expected two images, got '1.png'"),
        ("snli_ve", "train", {**VE, "label": "-"}, "expected one of contradiction, neutral, ent"),
        ("sbu_caption", "train", "a dog", "expected an object, got 'a dog'"),
    ],
)
def test_other_values_are_refused_by_file_and_row(tmp_path, name, split, row, message):
    with pytest.raises(ValueError) as error:
        build(tmp_path, name, [[row]], split)
    assert f"{tmp_path / '0.json'} cannot be used" in str(error.value)
    assert "0.json, row 0" in str(error.value) and message in str(error.value)


def test_rows_of_one_image_are_read_as_one(tmp_path, caplog):
    rows = [PAIR, {**PAIR, "image": "./1.png", "caption": ["b", "c"]}, {**PAIR, "image": "1.jpg"}]
    data = build(tmp_path, "coco_retrieval", [rows])
    assert data.text == ["a dog", "b", "c", "a dog"] and data.image == [IMAGE, "1.jpg"]
    assert data.img2txt == {0: [0, 1, 2], 1: [3]}
    assert "1 rows of" in caplog.text and "read as further captions of these" in caplog.text


def test_row_of_the_second_file_is_named(tmp_path):
    bad = {**PAIR, "caption": []}
    with pytest.raises(
        ValueError, match=r"0\.json, .*1\.json cannot be used:\s+\S+1\.json, row 1: "
    ):
        build(tmp_path, "coco_retrieval", [[PAIR], [PAIR, bad]])
    other = {**PAIR, "image": "1.jpg"}
    assert len(build(tmp_path, "coco_retrieval", [[PAIR], [other]])) == 2


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([[]], r"0\.json has no rows"),
        ([{"annotations": [PAIR]}], r"0\.json: expected a list of rows, got \{'annotations'"),
        (["text"], r"0\.json: expected a list, got 'text'"),
    ],
)
def test_files_without_rows_are_refused(tmp_path, contents, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, "coco_retrieval", contents)


def test_file_that_is_not_json_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"0\.json is not JSON"), checked_rows():
        (tmp_path / "0.json").write_text("[{]")
        registry.get_builder_class("coco_retrieval").eval_dataset_cls(
            None, None, str(tmp_path), [str(tmp_path / "0.json")]
        )


def test_unusable_training_pairs_are_counted_up_to_the_permitted_share(tmp_path, caplog):
    rows = [PAIR] * 7 + [{**PAIR, "caption": ["a", "b"]}, {**PAIR, "caption": None}, "no row"]
    data = build(tmp_path, "coco_retrieval", [rows], "train", allowed=0.2)
    assert len(data) == 11 and [row["caption"] for row in data.annotation[7:9]] == ["a", "b"]
    assert "2 of 11 rows of" in caplog.text and "row 8: 'caption' is missing" in caplog.text
    for index, message in ((9, "row 8: 'caption' is missing"), (10, "row 9: expected an object")):
        with pytest.raises(ValueError, match=message):
            read_sample(data, index)
    with pytest.raises(ValueError, match="cannot be used"):
        build(tmp_path, "coco_retrieval", [rows], "train", allowed=0.1)


def test_unusable_training_questions_are_counted(tmp_path, caplog):
    rows = [*[{**ASKED, "answer": "red"} for _ in range(9)], {**ASKED, "answer": []}]
    data = build(tmp_path, "coco_vqa", [rows], "train", allowed=0.1)
    assert "1 of 10 rows of" in caplog.text and read_sample(data, 8)["answers"] == ["red"]
    with pytest.raises(ValueError, match=r"row 9 \(question 1\): 'answer': expected an answer"):
        read_sample(data, 9)


def test_left_out_references_are_counted(tmp_path, caplog):
    build(tmp_path, "coco_caption", [[{**PAIR, "caption": ["a dog", None, " "]}]])
    assert "2 captions of" in caplog.text and "are null or blank: left out" in caplog.text


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("coco_vqa", [ASKED, ASKED], r"row 1 \(question 1\): 1 is the id of 'question 0' as well"),
        ("gqa", [ASKED, {**ASKED, "question_id": "01"}], "'01' and '1', which occurs before, are"),
        ("nocaps", [{"image": f"{i}.png", "img_id": i} for i in ("07", "7")], "'7' and '07'"),
        ("coco_caption", [{"image": f"{i}/x_1.jpg"} for i in "ab"], "'1' is the id of 'a/x_1.jpg'"),
    ],
)
def test_rows_that_share_an_id_are_refused(tmp_path, name, rows, message):
    files = [rows, ["red"]] if name == "coco_vqa" else [rows]
    with pytest.raises(ValueError, match=message):
        build(tmp_path, name, files)


def test_candidate_answers_are_texts(tmp_path):
    assert build(tmp_path, "coco_vqa", [[ASKED], ["red", 3]]).answer_list == ["red", "3"]
    for second, got in (([ASKED], r"\{'image'"), ([], r"\[\]"), ({"red": 0}, r"\{'red'")):
        with pytest.raises(ValueError, match=rf"1\.json is no list of candidate answers: .*{got}"):
            build(tmp_path, "coco_vqa", [[ASKED], second])


@pytest.mark.parametrize(("name", "number"), [("coco_vqa", 1), ("ok_vqa", 3), ("gqa", 3)])
def test_number_of_files_with_questions_is_checked(name, number):
    files = {"val": {"storage": ["a.json"] * number}, "train": {"storage": "a.json"}}
    with pytest.raises(
        ValueError, match=rf"{name}\.build_info\.annotations\.val\.storage names {number}"
    ):
        require_answer_files(name, registry.get_builder_class(name), files)
    require_answer_files("flickr30k", registry.get_builder_class("flickr30k"), files)


def test_data_set_of_a_user_may_read_its_rows_itself(tmp_path):
    class Own(COCOVQADataset):
        def __getitem__(self, index):
            return [self.annotation[index]["answer"], self.annotation[index]["text"]]

    class AsLavis(COCOVQADataset):
        def __getitem__(self, index):
            return super().__getitem__(index)["answers"]

    row = {"answer": "red", "text": "a dog"}
    (tmp_path / "own.json").write_text(json.dumps([row]))
    with checked_rows():
        assert Own(None, None, "", [str(tmp_path / "own.json")])[0] == ["red", "a dog"]
        with pytest.raises(ValueError, match="row 0: 'image' is missing"):
            AsLavis(None, None, "", [str(tmp_path / "own.json")])


def test_command_refuses_a_row_before_a_model_is_built(tmp_path):
    config = yaml.safe_load((ROOT / "projects/mafa/train/vqa_ft.yaml").read_text())
    info = {"annotations": {}, "images": {"storage": str(tmp_path)}}
    (tmp_path / "rows.json").write_text(json.dumps([{**ASKED, "answer": []}] * 2))
    storage = [str(tmp_path / "rows.json")]
    info["annotations"]["train"] = {"url": storage, "storage": storage}
    config["datasets"] = {"coco_vqa": {**PROCESSORS, "build_info": info}}
    config["run"].update(device="cpu", amp=False, test_splits=[], batch_size_train=2, num_workers=0)
    config["model"].update(pretrained=None, load_pretrained=False, model_type="tiny", image_size=32)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "lavis_mafa", "train", "--cfg-path", "config.yaml"]
    output = finish(spawn(tmp_path, command), status=1)
    assert "rows.json, row 1 (question 1): 'answer': expected an answer or a list" in output
    assert "Traceback" not in output and "parameters" not in output
