"""Check what a model card says, and that nothing private gets into it."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

pytest.importorskip("safetensors")
import transformers

if not hasattr(transformers, "Blip2ForImageTextRetrieval"):
    pytest.skip("transformers is too old for this export", allow_module_level=True)

from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lavis_mafa import load_model
from lavis_mafa.cli import main
from lavis_mafa.export.model_card import _RunFacts, facts_of, model_card
from lavis_mafa.runners.checkpoint import trained_state

SECRET = "s3cret"
PRIVATE = f"/home/{SECRET}/data"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Write what a run leaves, with private values wherever one can be."""
    folder = tmp_path_factory.mktemp(f"run_{SECRET}")
    model = load_model("blip_mafa", "tiny")
    cfg = OmegaConf.to_container(OmegaConf.load(model.default_config_path("tiny")).model)
    cfg["pretrained"], cfg["prompt"] = f"{PRIVATE}/start.pth", "a `red`\n```\n<b>ball</b>"
    cfg["mafa"] = {
        "negatives": "sampled",
        "soft_labels": {"alpha": 0.25},
        "connections": {"low": 0.5, "high": 0.9, "calibration": f"{SECRET}.json"},
        "con_d": {"arch": "blip_mafa", "checkpoint": f"{SECRET}.pth", "model": {"a": SECRET}},
        SECRET: 1,
    }
    config = {
        "model": cfg,
        "datasets": {"coco_caption": {"build_info": {"images": PRIVATE}}, f"../{SECRET}": {}},
        "run": {
            "output_dir": PRIVATE,
            "dist_url": f"tcp://{SECRET}:1",
            "grit": {"enabled": True, "queue_size": 640, "first_order": f"{SECRET}.npy"},
        },
    }
    data = {"samples": 12345, "images": 2469, "image_rows": SECRET}
    content = {"model": trained_state(model), "config": config}
    content["run"] = {"data": data, "global_step": 777, "epoch": 3}
    torch.save(content, folder / "checkpoint_last.pth")
    check = {"name": SECRET, "pairs": 64, "auc": 0.9731, "problems": [SECRET]}
    check["above"] = [{"threshold": 0.9, "own": 0.8125, "random": 0.0156}]
    lines = [
        {"kind": "config", "config": config},
        {"kind": "con_d_self_check", **check},
        {"kind": "eval", "split": "val", "epoch": 1, "txt_r1": 11.0, "agg_metrics": 20.0},
        {"kind": "eval", "split": "val", "epoch": 2, "txt_r1": 61.5, "note": SECRET, PRIVATE: 2},
        {"kind": "eval", "split": "val", "epoch": "best", "txt_r1": 99.0},
        {"kind": "eval", "split": "val", "epoch": 3, "txt_r1": 99.0},
    ]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = folder / "hf"
    arguments = [str(folder / "checkpoint_last.pth"), str(out), "--to", "hf"]
    assert main(["export", *arguments, "--license", "BSD-3-Clause"]) == 0
    return folder, (out / "README.md").read_text("utf-8")


def test_card_tells_of_the_run(run):
    _, card = run
    for said in (
        *("BlipForImageTextRetrieval", "`blip_mafa`, model type `tiny`", "777 steps"),
        *("`coco_caption`: 12,345 pairs of 2,469 images", "found by a Con-D `blip_mafa`"),
        *("| val | `txt_r1` | 61.5 |", "arXiv:2312.06112", "arXiv:2201.12086"),
        *("arXiv:2208.04060", "## Licence\n\nBSD-3-Clause"),
    ):
        assert said in card, said
    assert "| 99 |" not in card, "figures of another checkpoint"


def test_card_has_front_matter_of_the_hub(run):
    _, card = run
    from huggingface_hub import ModelCard

    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "bsd-3-clause" and front["library_name"] == "transformers"
    assert "blip" in front["tags"]
    assert ModelCard(card).data.pipeline_tag == "feature-extraction"


def test_card_has_nothing_private(run):
    folder, card = run
    assert SECRET not in card and "/home" not in card and str(folder) not in card
    for file in (folder / "hf").iterdir():
        assert SECRET.encode() not in file.read_bytes(), file.name


class Form:
    """What a card needs of a form."""

    from lavis_mafa.io.hub_names import BLIP as names

    family, class_name, generation = "blip", "BlipForConditionalGeneration", {"num_beams": 3}


NOTE = "text='``` <script>'"


def test_licence_that_is_none_is_refused_and_missing_is_said():
    card = model_card(Form, _RunFacts(), NOTE)
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "unknown"
    assert "Not stated" in card and "Con-D" not in card and "## Evaluation" not in card
    assert card.count("```") == 2, "a prompt must not end the block of code"
    with pytest.raises(ValueError, match="expected an identifier"):
        model_card(Form, _RunFacts(), NOTE, "mit\nx: 1")


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.just(PRIVATE) | st.just(f"{SECRET}.pth"),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                "model run datasets mafa grit con_d arch negatives soft_labels type connections "
                "low use_in data samples images auc above pairs threshold own random txt_r1".split()
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(config=anything, run=anything, figures=anything)
def test_any_content_gives_a_card_without_private_values(config, run, figures):
    def mapping(value):
        return value if isinstance(value, dict) else {}

    facts = facts_of({"config": config, "run": run}, "nowhere/checkpoint.pth")
    both = _RunFacts(facts.config, facts.data, facts.step, {"val": mapping(figures)})
    card = model_card(Form, both, NOTE)
    assert SECRET not in card
