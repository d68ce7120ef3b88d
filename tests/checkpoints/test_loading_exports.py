"""Check that exported weights load back and give the outputs of the checkpoint they came from."""

from __future__ import annotations

import copy
import json

import pytest
import torch

pytest.importorskip("safetensors")
import transformers

if not hasattr(transformers, "Blip2ForImageTextRetrieval"):
    pytest.skip("transformers is too old for this export", allow_module_level=True)

from conftest import ROOT
from mistakes import valid_config
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_blip2 import random_images, randomise

from lavis_mafa import load_model
from lavis_mafa.checkpoints.checkpoints import read_checkpoint, vocabulary_of
from lavis_mafa.checkpoints.hub_folders import RECORD
from lavis_mafa.cli import main
from lavis_mafa.judges.build import build_discriminator
from lavis_mafa.settings.load import check_con_d, complete
from lavis_mafa.training.checkpoint import trained_state

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a red ball blue box two dogs of left"
CAPTIONS = ["a red ball left of a blue box", "two dogs", "a blue ball"]


def save(model, folder, arch, **changes):
    """Save as the runner does; return the path."""
    cfg = OmegaConf.load(model.default_config_path("tiny")).model
    path = folder / f"{arch}.pth"
    content = {
        "model": trained_state(model),
        "config": {"model": {**OmegaConf.to_container(cfg), **changes}},
        "vocabulary": vocabulary_of(model.tokenizer),
    }
    torch.save(content, path)
    return path


@pytest.fixture(scope="module", params=["blip_mafa", "blip2_mafa"])
def exported(tmp_path_factory, request):
    """Return a model with a vocabulary and a size of its own, its arch and its exported folder."""
    arch, folder = request.param, tmp_path_factory.mktemp("exported")
    (folder / "vocab.txt").write_text("\n".join(WORDS.split()))
    own = {"tokenizer": str(folder / "vocab.txt"), "embed_dim": 32, "image_size": 48}
    torch.manual_seed(1)
    model = randomise(load_model(arch, "tiny", is_eval=True, model=own), 0.1)
    path = save(model, folder, arch, **own)
    options = ["--options", f"tokenizer={own['tokenizer']}"]
    assert main(["export", str(path), str(folder / "hf"), "--to", "hf", *options]) == 0
    (folder / "vocab.txt").unlink()  # the exported folder has its own
    return model, arch, folder / "hf"


def outputs(model):
    """Return ITC features and ITM logits by the family's driver."""
    pixels = torch.nn.functional.interpolate(random_images(3), size=48)
    backbone, number = model.backbone, torch.arange(3)
    with torch.no_grad():
        images, texts = backbone.encode_images(pixels), backbone.encode_texts(CAPTIONS)
        return images.features, texts.features, backbone.match(images, texts, number, number)


def test_exported_folder_loads_with_equal_outputs(exported):
    model, arch, folder = exported
    loaded = load_model(arch, checkpoint=str(folder), is_eval=True)
    for ours, theirs in zip(outputs(model), outputs(loaded), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(model.temp, loaded.temp)
    assert loaded.tokenizer(CAPTIONS).input_ids == model.tokenizer(CAPTIONS).input_ids


def test_exported_folder_names_no_file_of_this_machine(exported):
    _, _, folder = exported
    for file in [*folder.glob("*.json"), *folder.glob("*.md")]:
        assert str(folder.parent) not in file.read_text("utf-8"), file
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert str(folder.parent) not in str(file.metadata())


def test_exported_folder_is_a_discriminator(exported):
    model, arch, folder = exported
    con_d = build_discriminator({"arch": arch, "checkpoint": str(folder)})
    judge = con_d.model.state_dict()
    for name, value in load_model(arch, checkpoint=str(folder)).state_dict().items():
        assert name.startswith(("text_decoder.", "Qformer.cls.")) or torch.equal(judge[name], value)
    for ours, theirs in zip(outputs(model), outputs(con_d.model), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert check_con_d({"arch": arch, "checkpoint": str(folder)})[1] == []
    with pytest.raises(ValueError, match="of another family"):
        build_discriminator({"arch": "albef_mafa", "checkpoint": str(folder)})


def problems_with(pretrained, arch, **model):
    model = {"arch": arch, "model_type": "tiny", "load_pretrained": True, **model}
    model["pretrained"] = str(pretrained)
    toy = copy.deepcopy(valid_config(ROOT / "projects/mafa/train/albef_toy.yaml"))
    toy["run"]["grit"] = {"enabled": False}
    return complete({**toy, "model": model})[1]


def test_exported_folder_starts_a_run(exported):
    _, arch, folder = exported
    own = {"tokenizer": str(folder / "vocab.txt"), "embed_dim": 32}
    assert not [one for one in problems_with(folder, arch, **own) if "model." in one]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "no checkpoint at .*, a folder without config.json"),
        ("config.json", {"model_type": "clip"}, "holds a model of type 'clip'; those of BLIP"),
        ("config.json", [1], "expected a mapping"),
        ("model.safetensors", None, "no model.safetensors; other files of weights .* may run code"),
        ("model.safetensors", b"x" * 99, "or not a safetensors file .*header too large"),
        (RECORD, b"{", "is not JSON"),
    ],
)
def test_other_folders_are_refused(exported, tmp_path, file, content, message):
    _, arch, folder = exported
    for one in folder.iterdir():
        if one.name != file:
            (tmp_path / one.name).symlink_to(one)
    if content is not None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / file).write_bytes(data)
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_checkpoint(str(tmp_path))


def test_index_leads_nowhere_else(exported, tmp_path):
    _, _, folder = exported
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "config.json").symlink_to(folder / "config.json")
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    index = {"weight_map": {"itm_head.bias": "../model.safetensors"}}
    (tmp_path / "inside" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="expected a file in its folder"):
        read_checkpoint(str(tmp_path / "inside"))


def test_folder_in_several_files_loads(exported, tmp_path):
    model, arch, folder = exported
    state = load_file(folder / "model.safetensors")
    names = {key: f"{number % 2}.safetensors" for number, key in enumerate(state)}
    for name in set(names.values()):
        save_file({k: v for k, v in state.items() if names[k] == name}, tmp_path / name)
    for one in folder.iterdir():
        if one.name != "model.safetensors":
            (tmp_path / one.name).symlink_to(one)
    index = {"weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load_model(arch, checkpoint=str(tmp_path), is_eval=True)
    for ours, theirs in zip(outputs(model), outputs(loaded), strict=True):
        assert torch.equal(ours, theirs)


def test_a_folder_of_stage_2_is_refused(exported, tmp_path):
    _, arch, folder = exported
    state = load_file(folder / "model.safetensors")
    save_file(
        {**state, "language_projection.weight": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    with pytest.raises(ValueError, match="holds a BLIP-2 of stage 2, with a language model"):
        read_checkpoint(str(tmp_path))
