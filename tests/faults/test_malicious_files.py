"""A file that would run code when unpickled is rejected wherever files are read, and its code
never runs.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from lavis import tasks
from lavis.common.registry import registry
from omegaconf import OmegaConf

from lavis_mafa.checkpoints.checkpoints import is_intact, read_checkpoint
from lavis_mafa.cli import main
from lavis_mafa.settings import ConfigError, load_config
from lavis_mafa.training import session
from lavis_mafa.training.checkpoint import check_resumption

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "projects/mafa/train"


class Malicious:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def torch_zip(path, bomb):
    torch.save({"model": {"weight": torch.ones(2), "extra": bomb}}, path)


def torch_old(path, bomb):
    torch.save({"model": bomb}, path, _use_new_zipfile_serialization=False)


def plain_pickle(path, bomb):
    path.write_bytes(pickle.dumps({"model": bomb}, protocol=2))


def objects_npy(path, bomb):
    with open(path, "wb") as file:
        np.save(file, np.array([bomb, None], object), allow_pickle=True)


FORMS = [torch_zip, torch_old, plain_pickle, objects_npy]


def runs_code(path):
    """Open a file without any protection; some of the attempts run its code."""
    for load in (
        lambda: torch.load(path, weights_only=False),
        lambda: pickle.loads(path.read_bytes()),
        lambda: [np.load(path, allow_pickle=True)[name] for name in ("errors", "about")],
        lambda: np.load(path, allow_pickle=True),
    ):
        try:
            load()
        except Exception:
            pass


class MaliciousFile:
    """A malicious file, and a mark that exists if its code ran."""

    def __init__(self, folder: Path, form=torch_zip, name="evil.pth") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.mark = folder / name, folder / "it_ran"
        form(self.path, Malicious(self.mark))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs_code(self.path)
        assert self.mark.is_dir(), "the file of this test must be harmful"
        self.mark.rmdir()

    def assert_rejected(self, message, reader: str) -> None:
        assert not self.mark.exists(), f"{reader}: its code ran"
        assert str(self.path) in str(message), f"{reader}: the file is not named in {message}"


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def malicious(request, tmp_path):
    return MaliciousFile(tmp_path / "evil", request.param)


@pytest.fixture
def malicious_zip(tmp_path):
    return MaliciousFile(tmp_path / "evil")


# Reading


@pytest.mark.strict_smoke
@pytest.mark.parametrize("mapped", [False, True])
def test_read_checkpoint_rejects_malicious_files(tmp_path, mapped):
    for form in FORMS:
        world = MaliciousFile(tmp_path / form.__name__, form)
        with pytest.raises(ValueError, match="cannot be loaded") as caught:
            read_checkpoint(str(world.path), mapped)
        world.assert_rejected(caught.value, f"read_checkpoint of {form.__name__}")
        message = str(caught.value)
        assert form is objects_npy or re.search("(posix|nt).mkdir, which is code", message)
        # torch's own message advises to load it unsafely, in colour.
        assert "weights_only" not in message and "\x1b" not in message
        is_intact(world.path)
        assert not world.mark.exists()


# Configs

# By key: config, and the settings with which the key is read.
KEYS = {
    "model.pretrained": ("albef_toy", {"model.load_pretrained": True}),
    "model.finetuned": ("albef_toy", {"model.load_finetuned": True}),
    "model.mafa.con_d.checkpoint": (
        "albef_toy",
        {"model.mafa.con_d.arch": "albef_mafa", "model.mafa.con_d.model_type": "tiny"},
    ),
    "run.resume_ckpt_path": ("albef_toy", {}),
    "model.vit_weights": ("blip2_toy", {}),
}
# Models of LAVIS; for CLIP, `pretrained` is a tag or a file.
LAVIS = [
    ("albef_retrieval", "coco"),
    ("blip_pretrain", "base"),
    ("blip2", "pretrain"),
    ("clip", "ViT-B-32"),
]


def options(given):
    return [f"{key}={value}" for key, value in given.items()]


def assert_config_rejected(world, key, config, more, given=None):
    cfg = load_config(TRAIN / f"{config}.yaml", options({**more, key: given or world.path}))
    with pytest.raises((ValueError, OSError, pickle.UnpicklingError)) as caught:
        check_resumption(cfg)
        registry.get_model_class(cfg.model_cfg.arch).from_config(cfg.model_cfg)
    assert not world.mark.exists(), f"{key}: its code ran"
    safely = isinstance(caught.value, pickle.UnpicklingError)  # LAVIS's own loading
    assert safely or str(world.path.parent) in str(caught.value)


@pytest.mark.strict_smoke
@pytest.mark.parametrize("key", KEYS)
def test_keys_of_a_config_reject_malicious_files(malicious_zip, key):
    assert_config_rejected(malicious_zip, key, *KEYS[key])


@pytest.mark.parametrize("arch, model_type", LAVIS)
def test_lavis_models_reject_malicious_files(
    malicious_zip, arch, model_type, monkeypatch, tmp_path
):
    """LAVIS's loading relies on torch's default, which an environment variable can change."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    config = OmegaConf.load(TRAIN / "albef_toy.yaml")
    config.model = {"arch": arch, "model_type": model_type, "load_finetuned": False}
    config.model.update(load_pretrained=True, pretrained=str(malicious_zip.path))
    config.run.grit.enabled = False
    config.run.update(valid_splits=[], test_splits=[])
    OmegaConf.save(config, tmp_path / "config.yaml")
    cfg = load_config(tmp_path / "config.yaml")
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        session.build_model(cfg, tasks.setup_task(cfg))
    malicious_zip.assert_rejected(caught.value, "model.pretrained")


def test_hugging_face_folders_reject_malicious_files(tmp_path):
    world = MaliciousFile(tmp_path / "folder", name="pytorch_model.bin")
    (tmp_path / "folder/config.json").write_text(json.dumps({"model_type": "bert"}))
    assert_config_rejected(world, "model.bert_weights", "blip2_toy", {}, given=world.path.parent)


def test_config_file_cannot_run_code(tmp_path):
    """YAML can name Python objects."""
    mark = tmp_path / "it_ran"
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: !!python/object/apply:os.mkdir ['{mark}']\nmodel: {{}}\ndatasets: {{}}\n"
    )
    with pytest.raises(ConfigError, match="config.yaml"):
        load_config(path)
    with pytest.raises(ConfigError):
        load_config(TRAIN / "albef_toy.yaml", [f"run.x=!!python/object/apply:os.mkdir ['{mark}']"])
    assert not mark.exists()


# Commands


def output_of_failure(capfd, caplog, action):
    """Run a command that must fail; return its output."""
    with caplog.at_level("INFO"):
        status = action()
    streams = capfd.readouterr()
    output = streams.out + streams.err + caplog.text
    assert status not in (0, None), output
    return output


@pytest.mark.parametrize("command", ["train", "evaluate", "export", "count", "mine"])
def test_commands_reject_malicious_checkpoints(tmp_path, capfd, caplog, monkeypatch, command):
    """Also with the variable that makes torch's default unsafe."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    world = MaliciousFile(tmp_path / "evil")
    config = ["--cfg-path", str(TRAIN / "albef_toy.yaml")]
    evil, out = str(world.path), str(tmp_path / "out")
    finetuned = ["model.load_finetuned=True", f"model.finetuned={evil}", f"run.output_dir={out}"]
    con_d = ["--con-d", "a.arch=albef_mafa", "a.model_type=tiny", f"a.checkpoint={evil}"]
    arguments = {
        "train": [*config, "--options", *finetuned],
        "evaluate": [*config, "--options", *finetuned],
        "export": [evil, out, "--to", "hf", "--arch", "blip2_mafa"],
        "count": [*config, "--output", out, "--checkpoint", evil],
        "mine": [*config, "--output", out, *con_d],
    }
    message = output_of_failure(capfd, caplog, lambda: main([command, *arguments[command]]))
    world.assert_rejected(message, command)


def objects_npz(path, bomb):
    with open(path, "wb") as file:
        array = np.array([bomb, None], object)
        columns = ("image", "text", "from_image", "from_text", "truth", "probability_a")
        scores = ("scores_i2t", "scores_t2i", "images", "captions", "image_of")
        names = (*columns, *scores, "about", "errors")
        np.savez(file, **dict.fromkeys(names, array), allow_pickle=True)


@pytest.mark.parametrize("command", ["label quality", "label page", "report"])
def test_commands_reject_malicious_arrays(tmp_path, capfd, caplog, command):
    world = MaliciousFile(tmp_path / "evil", objects_npz, "judged.npz")
    page = ["--output", str(tmp_path / "labels.html")] if command == "label page" else []
    arguments = [*command.split(), str(world.path), *page]
    message = output_of_failure(capfd, caplog, lambda: main(arguments))
    world.assert_rejected(message, command)


def test_our_code_has_no_unsafe_loading():
    files = [*(ROOT / "lavis_mafa").rglob("*.py"), *(ROOT / "research").rglob("*.py")]
    assert len(files) > 100
    for path in files:
        text = path.read_text(encoding="utf-8")
        for called in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in called, (path, called)
        unsafe = r"^\s*(import|from) (pickle|dill|joblib|shelve|marshal)\b|(?<![.\w])eval\("
        unsafe += r"|yaml\.(unsafe_)?load\(|torch\.(jit|hub)\.load\("
        unsafe += r"|allow_pickle=True|trust_remote_code=True"
        found = [line for line in text.splitlines() if re.search(unsafe, line)]
        assert [line for line in found if "UnpicklingError" not in line] == [], path
