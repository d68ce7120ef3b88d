"""Check conversions of ALBEF checkpoints; ``test_own_data.py`` loads them into LAVIS."""

from __future__ import annotations

import pytest
import torch

from lavis_mafa.cli import main
from lavis_mafa.export.lavis_forms import FORMS, _for_nlvr, _in_form, with_momentum
from lavis_mafa.io.checkpoints import read_checkpoint

LAYER = "text_encoder.bert.encoder.layer.{}.output.dense.weight"


@pytest.fixture
def state():
    names = ("visual_encoder.norm.weight", "text_proj.bias", "vision_proj.bias", "itm_head.bias")
    state = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    state.update({LAYER.format(i): torch.full((2,), 10.0 + i) for i in range(4)})
    return {**state, "temp": torch.tensor(0.07)}


def test_momentum_copies_are_added(state):
    result = with_momentum(state)
    added = result.keys() - state.keys()
    assert added == {
        key.replace(part, part + "_m", 1)
        for key in state
        for part in ("visual_encoder", "text_encoder", "text_proj", "vision_proj")
        if key.startswith(part)
    }
    for key in added:
        assert result[key] is state[key.replace("_m.", ".", 1)]


def test_nlvr_doubles_the_fusion_layers(state):
    result = _for_nlvr(state, fusion_layer=2)
    layer = LAYER.replace("bert.", "")
    first = {i: float(result[layer.format(i)][0]) for i in range(6)}
    assert first == {0: 10.0, 1: 11.0, 2: 12.0, 3: 12.0, 4: 13.0, 5: 13.0}
    assert layer.format(6) not in result
    momentum = layer.replace("text_encoder", "text_encoder_m")
    assert all(result[momentum.format(i)] is result[layer.format(i)] for i in range(6))
    assert not any(key.startswith(("itm_head", "text_proj", "temp")) for key in result)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrapped", [True, False])
def test_export_command_writes_each_form(state, tmp_path, capsys, form, wrapped):
    torch.save({"model": state} if wrapped else state, tmp_path / "in.pth")
    arguments = [str(tmp_path / "in.pth"), str(tmp_path / "out.pth"), "--to", form]
    assert main(["export", *arguments, "--fusion-layer", "2"]) == 0
    written = read_checkpoint(str(tmp_path / "out.pth"))["model"]
    expected = _in_form(state, form, 2)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], expected[key]) for key in written)
    assert f"{len(expected)} tensors for {form}" in capsys.readouterr().out


def test_wrong_arguments_are_rejected(tmp_path, capsys):
    (tmp_path / "out.pth").touch()
    out = str(tmp_path / "out.pth")
    for arguments, message in (
        ([], "--to"),
        (["--to", "albef_caption"], "albef_nlvr"),
        (["--to", "albef_vqa", "--dtype", "float16"], "--fusion-layer"),
        (["--to", "albef_vqa", "--options", "image_size=32"], "--fusion-layer"),
        (["--to", "hf", "--fusion-layer", "2"], "--fusion-layer is an option of albef_"),
    ):
        with pytest.raises(SystemExit):
            main(["export", out, out, *arguments])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {"itm_head.bias": torch.zeros(2)}}, "no weights below visual_encoder. and text"),
        ({"config": {"model": {"arch": "blip_mafa"}}}, "saved by blip_mafa, which is of another"),
    ],
)
def test_checkpoint_of_another_family_is_rejected(state, tmp_path, capsys, content, message):
    torch.save({"model": state, **content}, tmp_path / "in.pth")
    arguments = [str(tmp_path / "in.pth"), str(tmp_path / "out.pth"), "--to", "albef_vqa"]
    assert main(["export", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.pth").exists()


def test_existing_output_is_not_overwritten(state, tmp_path, capsys):
    torch.save(state, tmp_path / "in.pth")
    (tmp_path / "out.pth").write_text("mine")
    arguments = [str(tmp_path / "in.pth"), str(tmp_path / "out.pth"), "--to", "albef_vqa"]
    assert main(["export", *arguments]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "out.pth").read_text() == "mine"
