"""Wrong checkpoints are rejected by the config, before anything is built, naming key and file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lavis.common.registry import registry
from omegaconf import OmegaConf

from lavis_mafa.checkpoints.checkpoints import read_checkpoint
from lavis_mafa.settings import ConfigError, load_config

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "projects/mafa/train"
FAMILIES = {"albef_mafa": "albef_toy", "blip_mafa": "blip_toy", "blip2_mafa": "blip2_toy"}
CON_D = {"model.mafa.con_d.arch": "albef_mafa", "model.mafa.con_d.model_type": "tiny"}
# By key: settings with which the key is read.
KEYS = {
    "model.pretrained": {"model.load_pretrained": True},
    "model.finetuned": {"model.load_finetuned": True},
    "model.mafa.con_d.checkpoint": CON_D,
    "run.resume_ckpt_path": {},
}
ALL = sorted(KEYS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(arch)``: a checkpoint of the tiny model in the runner's format, without optimizer."""
    folder = tmp_path_factory.mktemp("saved")

    def path(arch, name=None, change=None, **settings):
        file = folder / f"{name or arch}.pth"
        if not file.is_file():
            cls = registry.get_model_class(arch)
            cfg = OmegaConf.load(cls.default_config_path("tiny")).model
            cfg.update(settings)
            torch.manual_seed(0)
            config = {"model": OmegaConf.to_container(cfg), "run": {}, "datasets": {}}
            content = {
                "model": cls.from_config(cfg).state_dict(),
                "config": config,
                "run": {"format": 1, "ranks": [{}]},
            }
            if change:
                change(content)
            torch.save(content, file)
        return file

    return path


@pytest.fixture(autouse=True)
def forbid_building(monkeypatch):
    """A rejected config must not build a model."""

    def fail(*args, **kwargs):
        raise AssertionError("a model was built")

    monkeypatch.setattr("lavis_mafa.training.session.build_model", fail)


def problems(key, path, config="albef_toy", **more):
    """Return the problems of ``key`` when it names a file; [] if the config is valid."""
    changes = {**KEYS.get(key, {}), **{k.replace("__", "."): v for k, v in more.items()}}
    given = [f"{name}={value}" for name, value in {**changes, key: path}.items()]
    try:
        load_config(TRAIN / f"{config}.yaml", given)
    except ConfigError as error:
        lines = error.problems
        assert all(line.startswith(f"{key}: ") for line in lines), lines
        assert all(str(path) in line for line in lines), lines
        return [line.removeprefix(f"{key}: ") for line in lines]
    return []


@pytest.mark.strict_smoke
@pytest.mark.parametrize("key", ALL)
def test_valid_checkpoints_pass(saved, key):
    for arch, config in FAMILIES.items():
        judge = {"model__mafa__con_d__arch": arch} if "con_d" in key else {}
        assert problems(key, saved(arch), config, **judge) == []


def altered(data):
    position = data.index(b"PK\x03\x04", len(data) // 2) - 200
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


BROKEN = {
    "empty": (lambda data: b"", "cannot be loaded: its 0 bytes begin with"),
    "text": (lambda data: b"weights\n" * 99, "cannot be loaded"),
    "cut": (lambda data: data[: len(data) // 2], "bytes are cut short"),
    "zeros": (lambda data: data[:-4096] + bytes(4096), "bytes are cut short"),
    "altered": (altered, "it is not as it was saved: Bad CRC-32"),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("key", ALL)
def test_damaged_files_are_rejected(saved, tmp_path, key, what):
    change, message = BROKEN[what]
    path = tmp_path / "broken.pth"
    path.write_bytes(change(saved("albef_mafa").read_bytes()))
    found = problems(key, path)
    assert len(found) == 1 and message in found[0], found


def weights(path):
    return read_checkpoint(str(path))["model"]


CONTENTS = {
    "a list": (lambda state: [state], "holds a list, expected a dictionary"),
    "a tensor": (lambda state: torch.ones(3), "holds a Tensor, expected a dictionary"),
    "numbers": (lambda state: {"model": {"epoch": 3}}, "holds no state dict"),
    "a name": (lambda state: {"model": "albef"}, "holds no state dict"),
    "settings": (lambda state: {"lr": 1e-3, "epoch": 3}, "holds no state dict"),
    "no weights": (lambda state: {"model": {}}, "contains no weights"),
    "only a queue": (
        lambda state: {"model": {"image_queue": torch.ones(2)}},
        "contains no weights",
    ),
}


@pytest.mark.parametrize("what", CONTENTS)
@pytest.mark.parametrize("key", ALL[:-1])
def test_files_with_other_content_are_rejected(saved, tmp_path, key, what):
    make, message = CONTENTS[what]
    path = tmp_path / "other.pth"
    torch.save(make(weights(saved("albef_mafa"))), path)
    found = problems(key, path)
    assert len(found) == 1 and message in found[0], found


@pytest.mark.parametrize("key", ALL)
@pytest.mark.parametrize("given", FAMILIES)
@pytest.mark.parametrize("arch", FAMILIES)
def test_checkpoints_of_other_families_are_rejected(saved, key, arch, given):
    if arch == given:
        return
    judge = {"model__mafa__con_d__arch": arch} if "con_d" in key else {}
    found = problems(key, saved(given), FAMILIES[arch], **judge)
    assert len(found) == 1 and f"was saved by {given}, which is of another family" in found[0]


@pytest.mark.downstream
@pytest.mark.parametrize("key", ALL)
def test_checkpoints_of_another_stage_are_rejected(saved, key):
    def set_stage_2_arch(content):
        content["config"]["model"]["arch"] = "blip2_opt_mafa"

    path = saved("blip2_mafa", "stage_2", set_stage_2_arch)
    judge = {"model__mafa__con_d__arch": "blip2_mafa"} if "con_d" in key else {}
    found = problems(key, path, "blip2_toy", **judge)
    assert len(found) == 1 and "which is of stage 2" in found[0]


def test_weights_without_run_state_cannot_be_resumed(saved, tmp_path):
    path = tmp_path / "weights.pth"
    for content in (weights(saved("albef_mafa")), {"model": weights(saved("albef_mafa"))}):
        torch.save(content, path)
        for key in ("model.pretrained", "model.finetuned"):
            assert problems(key, path) == []
        found = problems("run.resume_ckpt_path", path)
        assert len(found) == 1 and "no state of a run" in found[0]
        assert "model.pretrained" in found[0]
