"""``train --toy``: any config with a tiny model and toy data, on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from shipped import SHIPPED, STAGE_1, TRAIN

from lavis_mafa.cli import main
from lavis_mafa.settings import ConfigError, load_config
from lavis_mafa.settings.toy_run import write_toy_config

sys.path.append(str(Path(__file__).resolve().parents[1] / "training"))
from runs import finish, launcher, spawn  # noqa: E402

CONFIGS = [path for path in SHIPPED if path.parent == TRAIN or path == STAGE_1]
TRAIN_PY = str(Path(__file__).resolve().parents[2] / "train.py")


def is_of_lavis(path):
    """Return whether a config trains LAVIS's own ALBEF, which has one size and downloads parts."""
    return OmegaConf.load(path).model.arch == "albef_retrieval"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "path", [one for one in CONFIGS if not is_of_lavis(one)], ids=lambda one: one.stem
)
def test_config_has_a_toy_form(path, capsys, caplog):
    assert main(["train", "--cfg-path", str(path), "--toy", "--dry-run"]) == 0, caplog.text[-3000:]
    assert "one mini-batch:" in capsys.readouterr().out


def refused(path, capsys):
    """Return the message by which a toy run is refused."""
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--cfg-path", str(path), "--toy"])
    message = capsys.readouterr().err.splitlines()[-1]
    assert path.name in message
    return message


@pytest.mark.parametrize("path", filter(is_of_lavis, CONFIGS), ids=lambda one: one.stem)
def test_model_without_a_tiny_type_is_refused(path, capsys):
    message = refused(path, capsys)
    assert "albef_retrieval has no tiny type: it would train at its full size and" in message


TEXT = """
model: {arch: albef_mafa, model_type: base}
datasets: {coco_caption: }
run: {task: mafa_pretrain, output_dir: out}
"""
WRONG = {
    "- model": "model",
    TEXT.replace("{coco_caption: }", "{}"): "datasets: is empty",
    TEXT.replace("albef_mafa", "albef_mfa"): "did you mean albef_mafa?",
    TEXT.replace("base", "base, mafa: text"): "model.mafa: 'text' is not",
    TEXT.replace("out}", "out, grit: {start_epoch: null}}"): "run.grit.start_epoch: ",
    "model: é": "codec",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_config_is_refused_for_what_is_wrong(text, tmp_path):
    (tmp_path / "wrong.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=WRONG[text]):
        load_config(write_toy_config("wrong.yaml"), [], machine=False)


@pytest.mark.parametrize("empty", ["", "{vis_processor: {eval: null}}"])
def test_empty_parts_of_data_sets_are_no_error(tmp_path, empty):
    pairs = TEXT.replace("caption: ", f"caption: {empty}")
    vqa = pairs.replace("caption", "vqa").replace("albef", "albef_vqa").replace("pretrain", "vqa")
    for text in (pairs, vqa):
        (tmp_path / "config.yaml").write_text(text)
        assert OmegaConf.load(write_toy_config("config.yaml")).model.model_type == "tiny"


def test_data_without_a_toy_form_are_refused(tmp_path, capsys):
    config = OmegaConf.load(TRAIN / "vqa_ft.yaml")
    config.datasets = {"coco_vqa": config.datasets.coco_vqa, "gqa": {}}
    OmegaConf.save(config, tmp_path / "gqa.yaml")
    assert "there are no toy data in place of gqa" in refused(tmp_path / "gqa.yaml", capsys)


def test_rows_of_a_task_keep_what_the_config_says_of_them():
    toy = OmegaConf.load(write_toy_config(str(TRAIN / "vqa_ft.yaml"))).datasets
    assert list(toy) == ["coco_vqa", "vg_vqa_mafa"]
    assert toy.vg_vqa_mafa.build_info.answer_weight == 0.5
    rows = json.loads(Path(toy.coco_vqa.build_info.annotations.train.storage).read_text())
    assert {row["answer"][0] for row in rows} == {"yes", "no", "black", "white", "grey", "brown"}


def test_all_else_is_as_in_the_config():
    given, toy = OmegaConf.load(STAGE_1), OmegaConf.load(write_toy_config(str(STAGE_1)))
    assert list(toy.datasets) == ["toy_scenes"]
    assert toy.datasets.toy_scenes.vis_processor.train == {
        "name": "blip2_image_train",
        "image_size": 32,
    }
    assert toy.model.mafa.con_d == {"arch": "oracle"}
    for key in ("soft_labels", "connections", "negatives"):
        assert toy.model.mafa[key] == given.model.mafa[key]
    for key in ("lr_sched", "init_lr", "weight_decay", "seed", "accum_grad_iters"):
        assert toy.run[key] == given.run[key]


def test_stage_1_trains_whole_on_two_ranks(tmp_path):
    command = [*launcher(2), TRAIN_PY, "--cfg-path", "blip2_stage1", "--toy"]
    options = ["run.output_dir=toy", "run.job_id=job"]
    options.append("datasets.toy_scenes.build_info.train_size=384")
    output = finish(spawn(tmp_path, [*command, "--options", *options]))
    lines = (tmp_path / "toy/job/log.jsonl").read_text().splitlines()
    kinds = [one for one in map(json.loads, lines) if one["kind"] == "epoch"]
    assert [one["epoch"] for one in kinds] == [0, 1], output[-2000:]
    assert (tmp_path / "toy/job/checkpoint_last.pth").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "path", [one for one in CONFIGS if not is_of_lavis(one)], ids=lambda one: one.stem
)
def test_config_trains_whole_in_its_toy_form(path, tmp_path):
    options = ["run.output_dir=toy", "run.job_id=job"]
    assert main(["train", "--cfg-path", str(path), "--toy", "--options", *options]) == 0
    lines = map(json.loads, (tmp_path / "toy/job/log.jsonl").read_text().splitlines())
    assert [one["epoch"] for one in lines if one["kind"] == "epoch"] == [0, 1]
    assert (tmp_path / "toy/job/checkpoint_last.pth").is_file()
