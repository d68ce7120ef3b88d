"""Configs whose keys are valid one by one but contradict each other, and missing files.

Each would crash after the model is built, often not before the end of an epoch, or train nonsense.
"""

from __future__ import annotations

import copy

import mistakes as making
import pytest
from shipped import SHIPPED, TOY_TASKS

from lavis_mafa.settings.load import complete

MAFA, RULE = "model.mafa", "model.mafa.connections"
ORACLE = {f"{MAFA}.con_d": {"arch": "oracle"}}
JSON = "datasets.image_text_json"
# Shipped config, changes, key that the message names, and part of the message.
CONTRADICTIONS = [
    ("albef_toy", {"run.grit.search_space": 5000}, "run.grit.search_space", "more than run.grit.q"),
    ("albef_toy", {"run.runner": "runner_base"}, "run.grit.enabled", "runner_base cannot group"),
    ("albef_toy", {"run.min_lr": 0.1}, "run.min_lr", "more than run.init_lr"),
    ("albef_toy", {"run.lr_horizon": 3}, "run.max_epoch", "more than run.lr_horizon 3"),
    ("albef_toy", {"run.max_epoch": making.ABSENT}, "run.max_epoch", "missing"),
    ("albef_toy", {"run.seed": 2**32}, "run.seed", "is out of range"),
    ("albef_toy", {"run.amp": True}, "run.amp", "fp16 is not supported on cpu"),
    ("blip2_stage1", {"run.compile": True, "model.use_grad_checkpoint": True}, "run.compile",
     "switch one off"),
    ("albef_toy", {"run.compile": True, "run.cached_batch": 8}, "run.compile", "cached_batch"),
    ("albef_4m", {"model.image_size": 384}, "datasets.vg_caption.vis_processor.train", "differs"),
    ("albef_toy", {"model.max_txt_len": 65}, "model.max_txt_len", "more than the 64 positions"),
    ("albef_toy", {f"{MAFA}.itc_loss": "rince"}, f"{MAFA}.learn_temperature",
     "must be False with itc_loss: rince"),
    ("albef_toy", {f"{MAFA}.itc_loss": "sigmoid", f"{MAFA}.soft_labels.type": "momentum"},
     f"{MAFA}.itc_loss", "cannot use the candidates of the momentum queue"),
    ("albef_toy", {**ORACLE, f"{RULE}.score": "similarity"}, f"{RULE}.score",
     "judges in Con-D's place; remove model.mafa.con_d"),
    ("albef_toy", {f"{RULE}.rule": "margin", f"{MAFA}.margin": {"kind": "share"}},
     f"{MAFA}.margin.kind", "not one of absolute, relative"),
    ("albef_toy", {**ORACLE, f"{RULE}.use_in": ["lm"], f"{MAFA}.loss_weights.lm": 0},
     f"{RULE}.use_in", "no loss with a weight uses connections"),
    ("albef_toy", {"run.runner": "runner_base", "run.max_epoch": making.ABSENT}, "run.max_epoch",
     "missing"),
    ("albef_toy", {"run.runner": "runner_iter", "run.max_epoch": making.ABSENT}, "run.max_iters",
     "missing"),
    ("cond_retrieval_ft", {"run.k_test": making.ABSENT}, "run.k_test", "missing"),
    ("albef_toy", {"run.train_splits": ["train", "val"]}, "run.train_splits[1]", "known: train"),
    ("albef_4m", {"run.valid_splits": ["val"]}, "datasets.coco_caption.vis_processor.eval", "name"),
    ("albef_4m", {"run.train_dataset_ratios": {"vg_caption": 2}}, "run.train_dataset_rat",
     "remove"),
    ("albef_4m", {"datasets": {}}, "datasets", "is empty"),
    ("albef_toy", {"run.job_id": "../elsewhere"}, "run.job_id", "not the name of one folder"),
    ("retrieval_coco", {"run.resume_ckpt_path": "auto"}, "run.resume_ckpt_path", "model.finetuned"),
    ("retrieval_toy", {"model.load_finetuned": False}, "model.finetuned", "nothing is loaded"),
]  # fmt: skip


def config_of(name, changes):
    """Return a shipped config with changes by dotted key; the training config if both exist."""
    paths = [*SHIPPED, *sorted(TOY_TASKS.rglob("*.yaml"))]
    path = [path for path in paths if path.stem == name][-1]  # train is sorted after eval
    config = copy.deepcopy(making.valid_config(path))
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        node = config
        for parent in parents:
            node[parent] = node.get(parent) or {}
            node = node[parent]
        if value is making.ABSENT:
            del node[leaf]
        else:
            node[leaf] = copy.deepcopy(value)
    return config


def problems_at(config, key, machine=False):
    return [line for line in complete(config, machine)[1] if line.startswith(key)]


@pytest.mark.parametrize(
    "name, changes, key, message",
    CONTRADICTIONS,
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_contradictions_are_rejected(name, changes, key, message):
    lines = problems_at(config_of(name, changes), key)
    found = any(message in line for line in lines)
    assert found, complete(config_of(name, changes), machine=False)[1]


# Files of this machine


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("model.pretrained", {"model.load_pretrained": True}),
        ("model.finetuned", {"model.load_finetuned": True}),
        ("run.annotation_file", {}),
    ],
)
def test_missing_files_are_reported(key, more, tmp_path, monkeypatch):
    """The other keys of files are among the generated mistakes."""
    monkeypatch.chdir(tmp_path)
    config = config_of("albef_toy", {**more, key: "nowhere.pth"})
    lines = problems_at(config, f"{key}:", machine=True)
    assert lines and "nowhere.pth" in lines[0]


@pytest.mark.parametrize("below", ["", "/below/it"])
def test_folders_that_are_files_are_rejected(below, tmp_path):
    (tmp_path / "taken").touch()
    key = "run.output_dir"
    config = config_of("albef_toy", {key: f"{tmp_path}/taken{below}"})
    lines = problems_at(config, f"{key}:", machine=True)
    assert lines == [f"{key}: {tmp_path}/taken is a file; name a folder"]
    free = config_of("albef_toy", {key: f"{tmp_path}/free{below}"})
    assert problems_at(free, f"{key}:", machine=True) == [] and not (tmp_path / "free").exists()


def test_images_in_a_file_are_rejected(tmp_path):
    (tmp_path / "images.zip").touch()
    key = f"{JSON}.build_info.images.storage"
    config = config_of("albef_own_data", {key: str(tmp_path / "images.zip")})
    lines = problems_at(config, f"{key}:", machine=True)
    assert "is a file; expected a folder" in lines[0]
