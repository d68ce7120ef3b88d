"""Configs of downstream tasks that contradict themselves, and files in them that run code."""

from __future__ import annotations

import pytest
import toy_tasks  # noqa: F401
from lavis.common.registry import registry
from shipped import TOY_TASKS
from test_contradictory_configs import config_of, problems_at
from test_malicious_files import MaliciousFile, malicious_zip  # noqa: F401

from lavis_mafa import load_model
from lavis_mafa.downstream.tiny_language_models import tiny_opt
from lavis_mafa.settings import load_config
from lavis_mafa.settings.load import complete

CONTRADICTIONS = [
    ("vqa_ft_toy", {"run.grit.enabled": True}, "run.grit.enabled", "cannot group the pairs"),
    ("albef_toy", {"run.task": "mafa_vqa"}, "run.task", "albef_mafa lacks"),
    ("albef_toy", {"run.task": "mafa_classification"}, "run.task", "evaluates by predict()"),
    ("caption_nocaps", {"run.test_splits": ["train"]}, "run.test_splits[0]", "no dataset has"),
    ("caption_nocaps", {"datasets.nocaps.vis_processor": None}, "datasets.nocaps.vis_proc", ""),
]


@pytest.mark.parametrize(
    "name, changes, key, message",
    CONTRADICTIONS,
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_contradictions_are_rejected(name, changes, key, message):
    lines = problems_at(config_of(name, changes), key)
    found = any(message in line for line in lines)
    assert found, complete(config_of(name, changes), machine=False)[1]


@pytest.mark.parametrize("name", ["vqa_ft_toy", "nlvr_toy"])
def test_checkpoints_that_run_code_are_rejected(malicious_zip, name):  # noqa: F811
    options = ["model.load_pretrained=True", f"model.pretrained={malicious_zip.path}"]
    cfg = load_config(TOY_TASKS / f"train/{name}.yaml", options)
    with pytest.raises(ValueError) as caught:
        registry.get_model_class(cfg.model_cfg.arch).from_config(cfg.model_cfg)
    malicious_zip.assert_rejected(caught.value, "model.pretrained")


def test_language_models_that_run_code_are_rejected(tmp_path):
    """Weights of a language model are never unpickled."""
    folder = tiny_opt(tmp_path / "folder")
    for weights in [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        weights.unlink()
    world = MaliciousFile(folder, name="pytorch_model.bin")
    with pytest.raises(OSError, match=r"(?s)model\.opt_model: .* cannot be loaded"):
        load_model("blip2_opt_mafa", "tiny", model={"opt_model": str(folder)})
    assert not world.mark.exists(), "its code ran"
