"""Wrong checkpoints are rejected while a model is built, or a run resumed, naming the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lavis.common.registry import registry
from omegaconf import OmegaConf

from lavis_mafa.settings import load_config
from lavis_mafa.training.checkpoint import check_resumption

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "projects/mafa/train"
FAMILIES = {"albef_mafa": "albef_toy", "blip_mafa": "blip_toy", "blip2_mafa": "blip2_toy"}
CON_D = "model.mafa.con_d.checkpoint"
# By key: settings with which the key is read.
KEYS = {
    "model.pretrained": {"model.load_pretrained": True},
    "model.finetuned": {"model.load_finetuned": True},
    CON_D: {"model.mafa.con_d.arch": "albef_mafa", "model.mafa.con_d.model_type": "tiny"},
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
            content = {"model": cls.from_config(cfg).state_dict(), "config": config}
            if change:
                change(content)
            torch.save(content, file)
        return file

    return path


def refusal(key, path, config="albef_toy", **more):
    """Build the model of a config whose ``key`` names a file; return the error, "" if none."""
    changes = {**KEYS.get(key, {}), **{k.replace("__", "."): v for k, v in more.items()}}
    given = [f"{name}={value}" for name, value in {**changes, key: path}.items()]
    cfg = load_config(TRAIN / f"{config}.yaml", given)
    try:
        registry.get_model_class(cfg.model_cfg.arch).from_config(cfg.model_cfg)
    except ValueError as error:
        assert str(path) in str(error)
        return str(error)
    return ""


@pytest.mark.strict_smoke
@pytest.mark.parametrize("key", ALL)
def test_valid_checkpoints_pass(saved, key):
    for arch, config in FAMILIES.items():
        judge = {"model__mafa__con_d__arch": arch} if key == CON_D else {}
        assert refusal(key, saved(arch), config, **judge) == ""


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
def test_damaged_files_are_rejected(saved, tmp_path, what):
    change, message = BROKEN[what]
    path = tmp_path / "broken.pth"
    path.write_bytes(change(saved("albef_mafa").read_bytes()))
    for key in ALL:
        assert message in refusal(key, path)
    with pytest.raises(ValueError, match=message):
        check_resumption(load_config(TRAIN / "albef_toy.yaml", [f"run.resume_ckpt_path={path}"]))


@pytest.mark.parametrize("given", FAMILIES)
@pytest.mark.parametrize("arch", FAMILIES)
def test_checkpoints_of_other_families_are_rejected(saved, arch, given):
    for key in ALL if arch != given else ():
        judge = {"model__mafa__con_d__arch": arch} if key == CON_D else {}
        found = refusal(key, saved(given), FAMILIES[arch], **judge)
        assert f"was saved by {given}, which is of another family" in found


@pytest.mark.parametrize(
    "arch", [pytest.param("blip2_opt_mafa", marks=pytest.mark.downstream), "blip2_t5"]
)
def test_checkpoints_of_another_stage_are_rejected(saved, arch):
    def set_stage_2_arch(content):
        content["config"]["model"]["arch"] = arch

    path = saved("blip2_mafa", arch, set_stage_2_arch)
    for key in ALL:
        judge = {"model__mafa__con_d__arch": "blip2_mafa"} if key == CON_D else {}
        assert "which is of stage 2" in refusal(key, path, "blip2_toy", **judge)


@pytest.mark.parametrize("recorded", ["${nowhere}", "${oc.env:NOWHERE}", [1], {"width": "x"}])
def test_invalid_recorded_config_is_reported_or_ignored(saved, recorded):
    def invalidate(content):
        content["config"]["model"]["vit"] = recorded

    path = saved("albef_mafa", f"nonsense_{type(recorded).__name__}_{len(recorded)}", invalidate)
    assert refusal("model.pretrained", path) == ""
    found = refusal(CON_D, path)
    assert "contains a model config that cannot be read" in found and "model.vit" in found


def test_weights_without_run_state_cannot_be_resumed(saved):
    cfg = load_config(TRAIN / "albef_toy.yaml", [f"run.resume_ckpt_path={saved('albef_mafa')}"])
    with pytest.raises(ValueError, match="no state of a run.*model.pretrained"):
        check_resumption(cfg)


def test_checkpoint_for_an_image_encoder(saved, tmp_path):
    key, config = "model.vit_weights", "blip2_toy"
    assert refusal(key, saved("blip2_mafa"), config) == ""
    path = tmp_path / "other.pth"
    for content in ([torch.ones(2)], {"model": 3}, {"epoch": 3}):
        torch.save(content, path)
        assert refusal(key, path, config)


def test_unused_checkpoints_are_not_read(saved, tmp_path):
    """`pretrained` if `finetuned` is loaded as well; Con-D if nothing is trained."""
    path = tmp_path / "broken.pth"
    path.write_bytes(b"weights" * 99)
    more = {"model__load_finetuned": True, "model__finetuned": saved("albef_mafa")}
    assert refusal("model.pretrained", path, **more) == ""
    assert refusal(CON_D, path, run__evaluate=True) == ""
    assert refusal(CON_D, path, model__mafa__con_d__arch="oracle") == ""
