"""Files that may come from someone else: sizes, pictures and names in them do no harm."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import zipfile

import numpy as np
import pytest
import torch
from conftest import ROOT
from judged_cases import page_data
from PIL import Image
from small_world import call

from lavis_mafa import load_model
from lavis_mafa.data import TrainingSet
from lavis_mafa.data.pairs import TrainPairs
from lavis_mafa.io.files import read_npz
from lavis_mafa.io.project_files import CONFIGS
from lavis_mafa.settings import load_config
from lavis_mafa.tools.judged_pairs import UNKNOWN, Judged
from lavis_mafa.tools.model_and_data import (
    _build_judge,
    _discriminators_of,
    _ModelAndData,
    _options_of,
)

CONFIG = str(ROOT / "projects/mafa/train/albef_own_data.yaml")


# Sizes


def save_member(path, shape, dtype="<f8", content=b""):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("image.npy", header.getvalue() + content)
    return path


@pytest.mark.parametrize("member", [((2**40,), "<f8", b"12345678"), ((1,), "|O", b"12345678")])
def test_arrays_of_objects_or_with_a_wrong_header_are_refused(tmp_path, member):
    path = save_member(tmp_path / "judged.npz", *member)
    with pytest.raises(ValueError, match="is not a file of arrays"):
        read_npz(path)
    with pytest.raises(ValueError, match=r"judged.npz is not a file of judged pairs"):
        Judged.load(path)


def test_arrays_are_read_as_they_were_saved(tmp_path):
    arrays = {
        "numbers": np.arange(6).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "text": np.array("é"),
        "none": np.zeros((0, 4), np.float32),
    }
    np.savez(tmp_path / "some.npz", **arrays)
    found = read_npz(tmp_path / "some.npz")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    assert read_npz(tmp_path / "some.npz", "text").keys() == {"text"}
    with pytest.raises(ValueError, match=r"some.npz has no array 'image'"):
        read_npz(tmp_path / "some.npz", "image")


def judged_pairs(**changes):
    whole, flags = np.arange(4), np.ones(4, bool)
    columns = {
        "image": whole,
        "text": whole + 1,
        "from_image": flags,
        "from_text": flags,
        "truth": np.full(4, UNKNOWN, np.int8),
        "about": {},
        "probability": {"con_d": np.array([0.1, 0.9, np.nan, 1.0], np.float32)},
    }
    return Judged(**{**columns, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": np.array([0, 1, 2, -1])}, "image has values outside"),
        ({"text": np.array([0, 1, 2, 2**40])}, "text has values outside"),
        ({"image": np.arange(4.0)}, "'image' has the type float64"),
        ({"about": {"low": None}}, "float"),
        ({"about": {"low": 0.9, "high": 0.2}}, "expected 0 <= low <= high"),
    ],
)
def test_judged_pairs_out_of_range_are_refused(tmp_path, changes, message):
    good = Judged.load(judged_pairs().save(tmp_path / "good.npz"))
    assert len(good) == 4
    path = judged_pairs(**changes).save(tmp_path / "judged.npz")
    with pytest.raises(ValueError, match=f"judged.npz is not a file of judged pairs: .*{message}"):
        Judged.load(path)


# Pictures


@pytest.fixture
def outside(tmp_path):
    """An image folder with a link, a picture beside it, and a function that shows a path."""
    for folder in ("images", "linked/inner", "private"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "a.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "linked" / "b.png")
    (tmp_path / "images" / "link").symlink_to(tmp_path / "linked" / "inner")

    def data(*names):
        rows = [{"image": name, "caption": f"caption of {k}"} for k, name in enumerate(names)]
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        return TrainingSet(
            TrainPairs(
                np.asarray, str, tmp_path / "images", [tmp_path / "rows.json"], cache_dir=tmp_path
            )
        )

    return tmp_path, data


def test_pages_show_only_pictures_below_the_image_folder(outside):
    folder, data = outside
    inside = ["a.png", "./a.png", "link/a.png", "x/../a.png", str(folder / "images" / "a.png")]
    beyond = ["../private/a.png", str(folder / "private" / "a.png"), "link/../b.png"]
    found = data(*inside, *beyond)
    for number in range(len(inside)):
        if inside[number] != "x/../a.png":  # there is no folder x
            assert found.show(number)[1] == f"caption of {number}"
    for number in range(len(inside), len(found)):
        assert os.path.exists(found.source(number).path)
        with pytest.raises(PermissionError, match="outside of the image folder"):
            found.show(number)


def test_pages_of_foreign_annotations_have_no_private_picture(outside, caplog):
    folder, _ = outside
    Image.new("RGB", (8, 8), (1, 2, 3)).save(folder / "private" / "a.png")
    rows = [{"image": name, "caption": "c"} for name in ("a.png", "../private/a.png", "a.png")]
    (folder / "train.json").write_text(json.dumps(rows))
    info = "datasets.image_text_json.build_info"
    options = [
        *(f"{info}.annotations.{s}.storage={folder / 'train.json'}" for s in ("train", "val")),
        f"{info}.annotations.test.storage={folder / 'train.json'}",
        f"{info}.images.storage={folder / 'images'}",
        f"{info}.cache_dir={folder}",
        "run.batch_size_train=2",
        "run.grit.enabled=False",
    ]
    path = judged_pairs(
        image=np.array([1, 0]),
        text=np.array([0, 1]),
        from_image=np.ones(2, bool),
        from_text=np.ones(2, bool),
        truth=np.full(2, UNKNOWN, np.int8),
        probability={"con_d": np.array([0.9, 0.8], np.float32)},
        about={"cfg_path": CONFIG, "options": options},
    ).save(folder / "judged.npz")
    call("label", "page", path, "--output", folder / "labels.html", "--trust", folder)
    assert "outside of the image folder" in caplog.text
    assert f"the page shows images of {folder / 'images'}, which {path} names" in caplog.text
    page = page_data(folder / "labels.html")
    assert [pair["cells"][0] for pair in page["pairs"]] == ["0_1"] and len(page["images"]) == 1


# Con-D


def test_tokenizer_of_the_own_config_is_accepted_for_con_d(tmp_path):
    words = shutil.copy(CONFIGS / "models" / "tiny_vocab.txt", tmp_path / "vocab.txt")
    recorded = {"arch": "albef_mafa", "model_type": "tiny", "tokenizer": str(words)}
    state = load_model("albef_mafa", "tiny").state_dict()
    torch.save({"model": state, "config": {"model": recorded}}, tmp_path / "own.pth")
    con_d = ["own.arch=albef_mafa", "own.model_type=tiny", f"own.checkpoint={tmp_path / 'own.pth'}"]
    args = argparse.Namespace(cfg_path=CONFIG, checkpoint=None, con_d=con_d, output=tmp_path)
    info = "datasets.image_text_json.build_info"
    data = [f"{info}.annotations.train.storage=rows.json", f"{info}.images.storage=images"]
    args.options = ["model.model_type=tiny", f"model.tokenizer={words}", *data]
    found = _discriminators_of(args)
    assert found["own"]["checkpoint"] == str(tmp_path / "own.pth")
    known = load_config(CONFIG, _options_of(args), machine=False).model_cfg
    assert _build_judge(found["own"], known).model.training is False
    args.options[1] = "model.tokenizer=tiny_vocab.txt"
    known = load_config(CONFIG, _options_of(args), machine=False).model_cfg
    with pytest.raises(ValueError, match="If you trust it, set tokenizer yourself"):
        _build_judge(_discriminators_of(args)["own"], known)


# Messages


def test_fingerprint_of_a_table_reads_no_path(outside, monkeypatch):
    _, data = outside
    sets = [data(*names) for names in (["a.png"] * 2, ["a.png", "link/a.png"])]
    prints = [_ModelAndData(None, None, one, torch.device("cpu")) for one in sets]
    monkeypatch.setattr(TrainingSet, "source", None)
    monkeypatch.setattr(_ModelAndData, "batches", lambda *_: iter(()))
    first, second = (one._fingerprint() for one in prints)
    assert first != second == prints[1]._fingerprint()
