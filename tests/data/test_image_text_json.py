"""The builder `image_text_json` and its data sets, on real files, compared with LAVIS's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import PHOTOGRAPHS
from lavis.common.config import Config
from lavis.common.registry import registry
from lavis.datasets.datasets.retrieval_datasets import RetrievalDataset, RetrievalEvalDataset
from lavis.processors.blip_processors import BlipCaptionProcessor
from omegaconf import OmegaConf
from PIL import Image
from torchvision.transforms.functional import to_tensor
from two_forks import answers_of_two

from lavis_mafa.data import pair_conversion
from lavis_mafa.data.image_text_json import ImageTextJsonBuilder
from lavis_mafa.data.pairs import EvalPairs, TrainPairs

needs_flickr = pytest.mark.skipif(
    not (PHOTOGRAPHS / "train.json").is_file(),
    reason=f"the photographs of {PHOTOGRAPHS} are not here",
)


def small(image: Image.Image) -> torch.Tensor:
    return to_tensor(image.resize((16, 16)))


def upper_case(caption: str) -> str:
    return caption.upper()


@pytest.fixture
def work_folder(tmp_path: Path, monkeypatch) -> Path:
    """A working directory with three images, a train file, a val file and a private cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAVIS_MAFA_CACHE", os.fspath(tmp_path / "cache"))
    (tmp_path / "pictures").mkdir()
    for i, colour in enumerate(("red", "lime", "blue")):
        Image.new("RGB", (20, 20), colour).save(tmp_path / f"pictures/{i}.png")
    train = [("0.png", "red"), ("1.png", "green"), ("0.png", "also red"), ("2.png", "blue")]
    lines = [json.dumps({"image": image, "caption": caption}) for image, caption in train]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    val = [("2.png", "blue"), ("0.png", "red"), ("2.png", "sea"), ("2.png", "sky")]
    (tmp_path / "val.csv").write_text("".join(f"{a},{b}\n" for a, b in [("image", "text"), *val]))
    return tmp_path


def config(**build_info) -> dict:
    info = {
        "annotations": {"train": {"storage": "train.jsonl"}, "val": {"storage": ["val.csv"]}},
        "images": {"storage": "pictures"},
    }
    return {"build_info": {**info, **build_info}}


def build(**build_info) -> dict:
    return ImageTextJsonBuilder(config(**build_info)).build_datasets()


def test_eval_merges_rows_of_the_same_image(work_folder: Path) -> None:
    dataset = EvalPairs(small, upper_case, "pictures", ["val.csv"])
    assert dataset.image == ["2.png", "0.png"]
    assert dataset.text == ["BLUE", "SEA", "SKY", "RED"]
    assert dataset.img2txt == {0: [0, 1, 2], 1: [3]}
    assert dataset.txt2img == {0: 0, 1: 0, 2: 0, 3: 1}
    assert len(dataset) == 2 and dataset[1]["index"] == 1
    assert dataset.picture(1).getpixel((0, 0)) == (255, 0, 0)


def test_eval_warns_of_captions_without_text(work_folder: Path, caplog) -> None:
    (work_folder / "dots.csv").write_text("image,text\n0.png,...\n1.png,b\n")
    assert EvalPairs(small, BlipCaptionProcessor(), "pictures", ["dots.csv"]).text == ["", "b"]
    assert (
        "dots.csv: 1 captions without readable text after the text processor are scored"
        in caplog.text
    )


def test_eval_rejects_an_image_id_used_by_two_files(work_folder: Path) -> None:
    (work_folder / "ids.csv").write_text("image,text,image_id\n0.png,a,1\n1.png,b,1\n")
    assert len(TrainPairs(small, upper_case, "pictures", ["ids.csv"])) == 2
    with pytest.raises(ValueError, match=r"ids\.csv.*first '1\.png' and '0\.png'.*remove image_id"):
        EvalPairs(small, upper_case, "pictures", ["ids.csv"])


def test_builder_through_lavis_config_and_its_overrides(work_folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(registry.mapping["state"], "configuration", None)
    datasets = config(cache_dir="here", caption_key="caption", annotations={"train": {}})
    datasets["build_info"]["annotations"]["train"] = {"storage": "train.jsonl", "url": "http://no"}
    datasets["vis_processor"] = {"train": {"name": "blip_image_eval", "image_size": 32}}
    model = {"arch": "blip_retrieval", "model_type": "coco"}
    yaml = {"model": model, "run": {"size": 24}, "datasets": {"image_text_json": datasets}}
    OmegaConf.save(OmegaConf.create(yaml), work_folder / "run.yaml")
    key = "datasets.image_text_json."
    options = [f"{key}vis_processor.eval.image_size=${{run.size}}"]
    options += [f"{key}build_info.annotations.test.storage=val.csv"]
    options += [f"{key}build_info.caption_key=null"]
    cfg = Config(SimpleNamespace(cfg_path=work_folder / "run.yaml", options=options))
    builder = registry.get_builder_class("image_text_json")(cfg.datasets_cfg["image_text_json"])
    datasets = builder.build_datasets()
    assert set(datasets) == {"train", "test"}
    assert datasets["train"][0]["image"].shape == (3, 32, 32)
    assert datasets["test"][0]["image"].shape == (3, 24, 24)
    assert len(list((work_folder / "here/image_text").iterdir())) == 2


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"annotations": {"train": {"storage": "gone.csv"}}}, FileNotFoundError, r"gone\.csv.*put"),
        ({"images": {"storage": "gone"}}, FileNotFoundError, r"root .*gone.*images\.storage"),
        ({"images": {"storage": None}}, ValueError, r"images\.storage"),
        ({"annotations": {}}, ValueError, "expected train, val, test.*got none"),
        ({"annotations": {"valid": {"storage": "val.csv"}}}, ValueError, "unknown valid"),
        ({"annotations": {"val": {"url": "http://no"}}}, ValueError, r"val\.storage: expected"),
    ],
)
def test_builder_errors(changes: dict, error: type, message: str, work_folder: Path) -> None:
    with pytest.raises(error, match=message):
        build(**changes)


def build_on_rank(rank: int, storage: str, results) -> None:
    store = f"file://{os.getcwd()}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    conversions, write = [], pair_conversion._write_table

    def counted(*args, **options) -> None:
        conversions.append(args)
        write(*args, **options)

    pair_conversion._write_table = counted
    try:
        datasets = build(annotations={"train": {"storage": storage}})
        results.put((rank, len(conversions), len(datasets["train"])))
    except Exception as error:
        results.put((rank, type(error).__name__, str(error)))
    dist.destroy_process_group()


def test_rank_0_converts_while_other_ranks_wait(work_folder: Path) -> None:
    assert answers_of_two(build_on_rank, "train.jsonl") == [(0, 1, 4), (1, 0, 4)]


def test_no_rank_waits_forever_if_rank_0_fails(work_folder: Path) -> None:
    (_, error_0, message_0), (_, error_1, message_1) = answers_of_two(build_on_rank, "gone.csv")
    assert (error_0, error_1) == ("FileNotFoundError", "MainProcessError")
    assert "gone.csv" in message_0 and message_0 in message_1


@needs_flickr
def test_real_photographs_equal_lavis(tmp_path: Path) -> None:
    annotations = {
        split: {"storage": f"{PHOTOGRAPHS}/{split}.json"} for split in ("train", "val", "test")
    }
    datasets = build(
        annotations=annotations, images={"storage": os.fspath(PHOTOGRAPHS)}, cache_dir=str(tmp_path)
    )
    train, val = datasets["train"], datasets["val"]
    lavis = RetrievalDataset(small, train.text_processor, PHOTOGRAPHS, [PHOTOGRAPHS / "train.json"])
    train.vis_processor = small
    assert len(train) == len(lavis) == 2775
    for index in range(0, 2775, 111):
        expected, sample = lavis[index], train[index]
        assert torch.equal(sample["image"], expected["image"])
        assert sample["text_input"] == expected["text_input"]
        assert sample["image_id"] == expected["image_id"]
    assert train.image_ids.tolist() == [lavis.img_ids[row["image_id"]] for row in lavis.annotation]

    lavis = RetrievalEvalDataset(
        val.vis_processor, val.text_processor, PHOTOGRAPHS, [PHOTOGRAPHS / "val.json"]
    )
    for name in ("text", "image", "txt2img", "img2txt"):
        assert getattr(val, name) == getattr(lavis, name), name
    assert torch.equal(val[74]["image"], lavis[74]["image"]) and val[74]["index"] == 74
    assert len(datasets["test"].text) == 375
