"""Shared by the tests of fine-tuning: small runs of the real commands."""

from __future__ import annotations

import json

import pytest
import torch
from omegaconf import OmegaConf
from runs import ROOT, TOY, records, run_here, weights

from lavis_mafa.families import AlbefMafa
from lavis_mafa.training.session import run

TRAIN, EVAL = ROOT / "projects/mafa/train", ROOT / "projects/mafa/eval"
# Keys of the small pre-training run that do not apply here.
PRETRAINING_KEYS = (
    "run.grit.queue_size",
    "run.grit.search_space",
    "run.grit.start_epoch",
    "model.mafa.con_d.arch",
    "run.k_test",
)
QUESTIONS = "datasets.toy_vqa.build_info.questions_per_image"
TOY_TASKS = ROOT / "tests/downstream/configs"
TOYS = TOY_TASKS.parent / "toys.py"
SIZES = {"train_size": 60, "val_size": 8, "test_size": 12}


def config_of(name, folder):
    """Return a shipped config, or a toy config of a downstream task."""
    path = folder / f"{name}.yaml"
    return path if path.is_file() else TOY_TASKS / folder.name / path.name


def settings(name, checkpoint, data, **more):
    """Return the config file and the options of a small run."""
    info = {f"datasets.{data}.build_info.{key}": value for key, value in SIZES.items()}
    no_pretraining_data = {key.replace("__", "."): None for key in TOY}
    options = {
        **dict.fromkeys(PRETRAINING_KEYS),
        **(no_pretraining_data if data != "toy_scenes" else {}),
        **info,
        **({QUESTIONS: 2} if data == "toy_vqa" else {}),
        **({"run.plugins": f"[{TOYS}]"} if data in ("toy_vqa", "toy_ve") else {}),
        "model.pretrained": checkpoint,
        "run.warmup_steps": 5,
        "run.max_epoch": 2,
        "run.batch_size_train": 8,
        "run.valid_splits": '["val"]',
        "run.test_splits": '["test"]',
        **more,
    }
    return {"config": str(config_of(name, TRAIN))}, options


def train_small(folder, name, checkpoint, data, **more):
    config, options = settings(name, checkpoint, data, **more)
    return run_here(folder, **config, **{k.replace(".", "__"): v for k, v in options.items()})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny ALBEF in the format of a pre-training checkpoint."""
    torch.manual_seed(0)
    cfg = OmegaConf.load(AlbefMafa.default_config_path("tiny")).model
    path = tmp_path_factory.mktemp("pretrained") / "checkpoint_last.pth"
    content = {"model": {"arch": "albef_mafa", "model_type": "tiny"}}
    torch.save({"model": AlbefMafa.from_config(cfg).state_dict(), "config": content}, path)
    return path


def assert_trains_and_evaluates(name, data, metric, checkpoint, tmp_path):
    """Train and evaluate by two commands, whose figures are equal."""
    train_small(tmp_path, name, checkpoint, data)
    trained = records(tmp_path, "eval")
    assert [record["split"] for record in trained] == ["val", "val", "test"]
    assert 0 <= trained[-1][metric] <= 100
    losses = [record["loss"] for record in records(tmp_path, "epoch")]
    assert losses[1] < losses[0]
    assert not any("_m." in key for key in weights(tmp_path)) or data == "toy_scenes"
    evaluated = tmp_path / "told"
    run(
        str(config_of(name, EVAL)),
        [
            *(f"datasets.{data}.build_info.{key}={value}" for key, value in SIZES.items()),
            *([f"{QUESTIONS}=2"] if data == "toy_vqa" else []),
            *([f"run.plugins=[{TOYS}]"] if data != "toy_scenes" else []),
            *(["datasets.toy_scenes.type=dense"] if data == "toy_scenes" else []),
            f"model.finetuned={tmp_path}/job/checkpoint_best.pth",
            "run.job_id=job",
            f"run.output_dir={evaluated}",
            "run.loggers=[]",
            "run.evaluate=True",
        ],
    )
    separate = records(evaluated, "eval")[-1]
    for key, value in trained[-1].items():
        if key not in ("time", "epoch", "kind", "split"):
            assert separate[key] == pytest.approx(value), key


def write_json_files(folder, **contents):
    """Write one JSON file per argument; return the paths by name."""
    paths = {name: folder / f"{name}.json" for name in contents}
    for name, content in contents.items():
        paths[name].write_text(json.dumps(content))
    return paths


def train_on_files(name, checkpoint, folder, **more):
    """Train with a shipped config, a tiny model and the CPU."""
    options = {
        "model.model_type": "tiny",
        "model.image_size": 32,
        "model.pretrained": checkpoint,
        "run.device": "cpu",
        "run.amp": False,
        "run.num_workers": 0,
        "run.max_epoch": 1,
        "run.batch_size_train": 4,
        "run.loggers": "[]",
        "run.job_id": "job",
        "run.output_dir": folder,
        **more,
    }
    run(str(TRAIN / f"{name}.yaml"), [f"{key}={value}" for key, value in options.items()])


def annotation_options(data, split, *paths):
    files = [str(path) for path in paths]
    key = f"datasets.{data}.build_info.annotations.{split}"
    return {f"{key}.url": json.dumps(files), f"{key}.storage": json.dumps(files)}
