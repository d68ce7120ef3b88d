"""Checkpoints as other training tools save them are read exactly, or refused with the reason."""

from __future__ import annotations

import gzip
import logging
import os

import pytest
import torch
from conftest import tiny_config

from lavis_mafa.checkpoints.checkpoints import STATE_OF_RUN, read_checkpoint, weights_of
from lavis_mafa.families import AlbefMafa


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(7)
    return AlbefMafa.from_config(tiny_config(AlbefMafa)).state_dict()


def with_prefix(weights, prefix):
    return {prefix + key: value for key, value in weights.items()}


FORMS = {
    "plain": lambda w: w,
    "state_dict": lambda w: {"state_dict": w, "epoch": 3},
    "DDP": lambda w: {"model": with_prefix(w, "module.")},
    "DDP, plain": lambda w: with_prefix(w, "module."),
    "compiled": lambda w: {"model": with_prefix(w, "_orig_mod.")},
    "compiled part": lambda w: {k.replace("encoder.", "encoder._orig_mod."): w[k] for k in w},
    "DDP of compiled": lambda w: {"state_dict": with_prefix(w, "module._orig_mod.")},
    "Lightning": lambda w: {"state_dict": with_prefix(w, "model."), "optimizer_states": [{}]},
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


def test_safetensors_of_another_tool(tmp_path, weights):
    from safetensors.torch import save_file

    copies = {key: value.clone() for key, value in with_prefix(weights, "model.").items()}
    save_file(copies, tmp_path / "given.safetensors")
    read = read_checkpoint(str(tmp_path / "given.safetensors"))["model"]
    assert read.keys() == weights.keys()


@pytest.mark.parametrize(
    "content, message",
    [
        (lambda w: {"my_network": w}, "holds no state dict, but a OrderedDict as 'my_network'"),
        (lambda w: with_prefix(w, "one."), "its names begin with 'one."),
        (lambda w: {**w, "epoch": 3}, "holds no state dict, but a int as 'epoch'"),
        (lambda w: {**w, **with_prefix(w, "_orig_mod.")}, "holds '.*' twice"),
        (lambda w: {"state_dict": {}}, "holds no weight of AlbefMafa"),
        (lambda w: {}, "holds no weight of AlbefMafa"),
        (lambda w: {"model": {"image_queue": torch.ones(2)}}, "holds no weight of AlbefMafa"),
        (lambda w: [w], "holds a list, expected a dictionary"),
        (lambda w: torch.ones(3), "holds a Tensor, expected a dictionary"),
        (lambda w: {"model": "albef"}, "holds no state dict"),
    ],
)
def test_unclear_files_are_refused(tmp_path, weights, content, message):
    path = str(tmp_path / "given.pth")
    torch.save(content(weights), path)
    cfg = tiny_config(AlbefMafa, load_pretrained=True, pretrained=path)
    with pytest.raises(ValueError, match=f"given.pth .*{message}"):
        AlbefMafa.from_config(cfg)


def test_weights_that_are_left_over_or_missing_are_named(tmp_path, weights, caplog):
    teacher = with_prefix({key: value * 0 for key, value in weights.items()}, "teacher.")
    part = {key: value for key, value in weights.items() if not key.startswith("itm_head.")}
    path = str(tmp_path / "given.pth")
    torch.save({**part, **teacher}, path)
    AlbefMafa.from_config(tiny_config(AlbefMafa, load_pretrained=True, pretrained=path))
    assert "2 of" in caplog.text and "such as itm_head" in caplog.text
    assert "dropped, because AlbefMafa lacks them: teacher (" in caplog.text


def test_names_of_our_own_runner_are_kept(tmp_path):
    """A user's model may call a part ``model`` or ``module``."""
    state = {"model.layer.weight": torch.ones(2, 2)}
    torch.save({"model": state, "state_of_run": []}, tmp_path / "ours.pth")
    assert read_checkpoint(str(tmp_path / "ours.pth"))["model"].keys() == state.keys()
    torch.save({"model": state}, tmp_path / "other.pth")
    assert list(read_checkpoint(str(tmp_path / "other.pth"))["model"]) == ["layer.weight"]


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs.github.com/spec/v1\n", b"<!DOCTYPE html>", gzip.compress(b"w")],
    ids=("Git LFS", "HTML", "gzip"),
)
def test_files_that_torch_did_not_save_are_refused(tmp_path, content):
    (tmp_path / "given.pth").write_bytes(content)
    with pytest.raises(ValueError, match="given.pth cannot be loaded: .* begin with b'"):
        read_checkpoint(str(tmp_path / "given.pth"))


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_named_pipe_is_refused_at_once(tmp_path, suffix):
    os.mkfifo(tmp_path / f"pipe.{suffix}")
    with pytest.raises(ValueError, match="is a pipe, socket or device, expected a file"):
        read_checkpoint(str(tmp_path / f"pipe.{suffix}"))


def test_a_long_header_of_safetensors_is_refused(tmp_path):
    path = tmp_path / "long.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="not a safetensors file .*header too large"):
        read_checkpoint(str(path))


def test_state_of_the_run_in_a_checkpoint_is_not_a_weight():
    state = {"memory.weight": 1, "rule.sums": 2, "image_queue": 3, "of_model.sums": 4}
    content = {"model": state, STATE_OF_RUN: ["rule."]}
    assert weights_of(content, ["of_model."]) == {"memory.weight": 1}  # a part of a user's model
