"""Checkpoints written by earlier versions (see kept/README.md) load, and their runs resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lavis_mafa
from lavis_mafa.checkpoints.checkpoints import RUN_STATE_KEYS
from lavis_mafa.training.checkpoint import FORMAT
from lavis_mafa.training.session import run

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).parent / "kept"
STEPS, BATCH, SIZE = 9, 8, 74

# The common options by which all of them were created, except run.max_steps.
SMALL = {
    "datasets.toy_scenes.type": "dense",
    "datasets.toy_scenes.build_info.train_size": SIZE,
    "datasets.toy_scenes.build_info.val_size": 6,
    "datasets.toy_scenes.build_info.test_size": 10,
    "run.max_epoch": 3,
    "run.batch_size_train": BATCH,
    "run.warmup_steps": 5,
    "run.valid_splits": "[]",
    "run.test_splits": "[]",
    "run.loggers": "[]",
    "run.log_freq": 1,
    "model.vit.width": 8,
    "model.vit.depth": 1,
    "model.vit.heads": 2,
}
GRIT = {
    "run.grit.queue_size": 32,
    "run.grit.search_space": 16,
    "run.grit.start_epoch": 1,
    "run.k_test": 4,
    "model.embed_dim": 4,
    "model.med_config_path": "kept_bert.json",
}
ORACLE = {**GRIT, "model.mafa.con_d.arch": "oracle"}
MOMENTUM = {**GRIT, "model.mafa.soft_labels.type": "momentum", "model.queue_size": 16}
FNE = {
    "model.bert_config": "kept_bert.json",
    "model.memory_size": 16,
    "model.plain_epochs": 1,
    "model.posterior.minimum": 8,
}
# By file: arch, config, and individual options.
FILES = {
    "format2_3ea7dd5_albef.pth": ("albef_mafa", "albef_toy", {**ORACLE, "run.seed": 7}),
    "format2_3ea7dd5_blip_momentum.pth": ("blip_mafa", "blip_toy", {**MOMENTUM, "run.seed": 4}),
    "format2_3ea7dd5_fne.pth": ("fne_retrieval", "fne_toy", {**FNE, "run.seed": 5}),
}
NAMES = sorted(FILES)


@pytest.fixture(autouse=True)
def _run_in_the_folder_of_kept_files(monkeypatch):
    monkeypatch.chdir(KEPT)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def read(name):
    return torch.load(KEPT / name, weights_only=True)


def train(folder, name, **more):
    _, config, own_options = FILES[name]
    changes = {key.replace("__", "."): value for key, value in more.items()}
    run_options = {**SMALL, **own_options, "run.output_dir": folder, "run.job_id": "job", **changes}
    path = str(ROOT / f"projects/mafa/train/{config}.yaml")
    return run(path, [f"{key}={value}" for key, value in run_options.items()])


@pytest.mark.strict_smoke
@pytest.mark.parametrize("name", NAMES)
def test_kept_checkpoints_load_by_name(name):
    """The file and the model have equal weights."""
    arch, _, options = FILES[name]
    key = "bert_config" if arch == "fne_retrieval" else "med_config_path"
    given = {key: options[f"model.{key}"]}
    model = lavis_mafa.load_model(arch, checkpoint=str(KEPT / name), model=given)
    content = read(name)
    of_run = (*RUN_STATE_KEYS, *content["state_of_run"])
    saved = {k: v for k, v in content["model"].items() if not k.startswith(of_run)}
    own = {k: v for k, v in model.state_dict().items() if not k.startswith(of_run)}
    # Some versions of transformers also save position ids.
    ignored = ("_m.", ".position_ids")
    learnt = {key for key in saved if not any(part in key for part in ignored)}
    assert learnt == {key for key in own if not any(part in key for part in ignored)}
    assert all(torch.equal(own[key], saved[key]) for key in learnt)


@pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1])
def test_other_format_is_rejected(tmp_path, number):
    name = NAMES[0]
    content = read(name)
    content["run"]["format"] = number
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=f"other.pth.* format {number}"):
        train(tmp_path, name, run__resume_ckpt_path=tmp_path / "other.pth")
