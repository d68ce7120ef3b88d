"""Checkpoints as other training tools save them: read exactly, or refused with the reason."""

from __future__ import annotations

import gzip
import logging
import os

import pytest
import torch
from conftest import tiny_config

from lavis_mafa.io import checkpoint_forms
from lavis_mafa.io.checkpoints import STATE_OF_RUN, read_checkpoint, weights_of
from lavis_mafa.models import AlbefMafa

OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1.0}]}


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(7)
    return AlbefMafa.from_config(tiny_config(AlbefMafa)).state_dict()


@pytest.fixture(autouse=True)
def nothing_logged_before():
    checkpoint_forms._log.cache_clear()


def with_prefix(weights, prefix):
    return {prefix + key: value for key, value in weights.items()}


def averaged(weights):
    return {key: value * 0 for key, value in weights.items()}


def wrapped_inside(weights, wrapper):
    return {
        key.replace("visual_encoder.blocks.", f"visual_encoder.{wrapper}.blocks."): value
        for key, value in weights.items()
    }


FORMS = {
    "plain": lambda w: w,
    "state_dict": lambda w: {"state_dict": w, "epoch": 3},
    "in model": lambda w: {"model": {"state_dict": w}, "epoch": 3},
    "DDP": lambda w: {"model": with_prefix(w, "module.")},
    "DDP, plain": lambda w: with_prefix(w, "module."),
    "compiled": lambda w: {"model": with_prefix(w, "_orig_mod.")},
    "DDP of compiled": lambda w: {"state_dict": with_prefix(w, "module._orig_mod.")},
    "compiled part": lambda w: {"model": wrapped_inside(w, "_orig_mod")},
    "FSDP": lambda w: wrapped_inside(w, "_fsdp_wrapped_module"),
    "Lightning": lambda w: {
        "state_dict": {**with_prefix(w, "model."), "loss.scale": torch.ones(1)},
        "optimizer_states": [OPTIMIZER],
        "pytorch-lightning_version": "2.4.0",
    },
    "Lightning, compiled": lambda w: {"state_dict": with_prefix(w, "model._orig_mod.")},
    "Lightning with a teacher": lambda w: {
        "state_dict": {**with_prefix(w, "model."), **with_prefix(averaged(w), "teacher.")}
    },
    "DeepSpeed": lambda w: {"module": w, "optimizer": OPTIMIZER, "ds_version": "0.14"},
    "timm with EMA": lambda w: {"arch": "x", "state_dict": w, "state_dict_ema": averaged(w)},
    "model and EMA": lambda w: {"model": w, "optimizer": OPTIMIZER, "model_ema": averaged(w)},
    "EMA alone": lambda w: {"ema": with_prefix(w, "module."), "decay": 0.99},
    "EMA's object": lambda w: {"ema": {"decay": 0.99, "shadow": w}},
    "own key": lambda w: {"my_network": w, "rng": {"torch": torch.zeros(4)}},
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_every_form_are_loaded_exactly(tmp_path, weights, caplog, form):
    path = str(tmp_path / "given.pth")
    torch.save(FORMS[form](weights), path)
    with caplog.at_level(logging.INFO):
        model = AlbefMafa.from_config(tiny_config(AlbefMafa, load_pretrained=True, pretrained=path))
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key]), key
    assert "keep their initial values" not in caplog.text
    assert (f"{path}: " in caplog.text) == (form not in ("plain",))


def test_what_is_not_read_is_counted_and_named(tmp_path, weights, caplog):
    torch.save(FORMS["model and EMA"](weights), tmp_path / "ema.pth")
    torch.save(FORMS["Lightning"](weights), tmp_path / "lightning.pth")
    with caplog.at_level(logging.WARNING):
        for name in ("ema.pth", "ema.pth", "lightning.pth"):
            read_checkpoint(str(tmp_path / name))
    ema, lightning = caplog.messages
    assert "1 entries are not read, such as model_ema" in ema
    assert "1 entries are not read, such as loss.scale" in lightning


def test_safetensors_of_another_tool(tmp_path, weights):
    from safetensors.torch import save_file

    copies = {key: value.clone() for key, value in with_prefix(weights, "model.").items()}
    save_file(copies, tmp_path / "given.safetensors")
    read = read_checkpoint(str(tmp_path / "given.safetensors"))["model"]
    assert read.keys() == weights.keys()


@pytest.mark.parametrize(
    "content, message",
    [
        (lambda w: {"first": w, "second": w}, "several keys: first, second"),
        (
            lambda w: {**with_prefix(w, "one."), **with_prefix(w, "two.")},
            "several models: one, two",
        ),
        (lambda w: {"my_" + key: value for key, value in w.items()}, "its names begin with 'my_"),
        (lambda w: {**w, "epoch": 3}, "holds no state dict, but a int as 'epoch'"),
        (lambda w: {"state_dict": {}}, "holds no state dict, but a dict as 'state_dict'"),
        (
            lambda w: {**with_prefix(w, "model."), **with_prefix(averaged(w), "model._orig_mod.")},
            "holds 'model.temp' twice",
        ),
    ],
)
def test_unclear_files_are_refused(tmp_path, weights, content, message):
    path = str(tmp_path / "given.pth")
    torch.save(content(weights), path)
    cfg = tiny_config(AlbefMafa, load_pretrained=True, pretrained=path)
    with pytest.raises(ValueError, match=f"given.pth .*{message}"):
        AlbefMafa.from_config(cfg)


def test_names_of_our_own_runner_are_kept(tmp_path):
    """A user's model may call a part ``model`` or ``module``."""
    state = {"model.layer.weight": torch.ones(2, 2)}
    torch.save({"model": state, "state_of_run": []}, tmp_path / "ours.pth")
    assert read_checkpoint(str(tmp_path / "ours.pth"))["model"].keys() == state.keys()
    torch.save({"model": state}, tmp_path / "other.pth")
    assert list(read_checkpoint(str(tmp_path / "other.pth"))["model"]) == ["layer.weight"]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Run `git lfs pull`"),
        (b"<!DOCTYPE html><html>Sign in</html>", "begins with b'<!DOCTYPE html><html"),
        (gzip.compress(b"weights"), "expected a file of torch.save"),
        ((20).to_bytes(8, "little") + b'{"a": {}}           ', "end in .safetensors"),
    ],
    ids=("Git LFS", "HTML", "gzip", "safetensors"),
)
def test_files_that_torch_did_not_save_are_named(tmp_path, content, message):
    (tmp_path / "given.pth").write_bytes(content)
    with pytest.raises(ValueError, match=f"given.pth cannot be loaded: .*{message}"):
        read_checkpoint(str(tmp_path / "given.pth"))


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_named_pipe_is_refused_at_once(tmp_path, suffix):
    os.mkfifo(tmp_path / f"pipe.{suffix}")
    with pytest.raises(ValueError, match="is a pipe, socket or device, expected a file"):
        read_checkpoint(str(tmp_path / f"pipe.{suffix}"))


def test_a_repeated_number_is_no_weight(tmp_path):
    """200 bytes that stand for terabytes."""
    huge = {"text_encoder.embeddings.weight": torch.zeros(1).expand(10**6, 10**6)}
    torch.save({"model": huge}, tmp_path / "huge.pth")
    with pytest.raises(ValueError, match="huge.pth .* has numbers in the file once that it repeat"):
        read_checkpoint(str(tmp_path / "huge.pth"))


def test_a_long_header_of_safetensors_is_refused(tmp_path):
    path = tmp_path / "long.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="not a safetensors file .*header too large"):
        read_checkpoint(str(path))


def test_state_of_the_run_that_a_checkpoint_lists_is_no_weight():
    state = {"a.weight": 1, "rule.sums": 2, "image_queue": 3, "of_model.sums": 4}
    content = {"model": state, STATE_OF_RUN: ["rule."]}
    assert weights_of(content, ["of_model."]) == {"a.weight": 1}
