"""Configs of downstream tasks that contradict themselves, and files in them that run code."""

from __future__ import annotations

import json

import mistakes as making
import pytest
from shipped import TOY_TASKS
from test_contradictory_configs import MAFA, TOY, config_of, problems_at
from test_malicious_files import MaliciousFile, malicious_zip  # noqa: F401

from lavis_mafa.config import ConfigError, load_config
from lavis_mafa.config.load import complete

CONTRADICTIONS = [
    ("vqa_ft_toy", {"run.grit.enabled": True}, "run.grit.enabled", "provides no features"),
    ("albef_toy", {"run.task": "mafa_vqa"}, "run.task", "albef_mafa lacks"),
    ("vqa_ft_toy", {"datasets": {"toy_scenes": {}}}, TOY, "holds captions"),
    ("albef_toy", {"run.task": "mafa_classification"}, "run.task", "evaluates by predict()"),
    ("blip2_toy", {"run.task": "mafa_grounding"}, "run.task", "use albef_mafa or blip_mafa"),
    ("grounding_toy", {"run.block_num": 0}, "run.block_num", "2 to 3"),
    ("grounding_ft", {"run.block_num": 12}, "run.block_num", "6 to 11"),
    ("vqa_ft_toy", {"datasets": {"toy_ve": {}}}, "datasets.toy_ve", "needs questions"),
    ("ve_ft_toy", {"datasets": {"toy_nlvr": {}}}, "datasets.toy_nlvr", "samples have two images"),
    ("nlvr_toy", {"datasets": {"toy_ve": {}}}, "datasets.toy_ve", "samples have one image"),
    ("ve_ft_toy", {"model.num_classes": 2}, "model.num_classes", "3 classes"),
    ("nlvr_toy", {"model.num_classes": 1}, "model.num_classes", "2 classes"),
    ("vqa_ft_toy", {"run.inference_method": "generate"}, "run.inference_method", "use rank"),
    ("vqa_toy", {"run.inference_method": "rank"}, "run.inference_method", "use generate"),
    ("vqa_toy", {"run.inference_method": making.ABSENT}, "run.inference_method", "use generate"),
    ("vqa_toy", {"run.prompt": "Question: Answer:"}, "run.prompt", "exactly one {}"),
    ("vqa_toy", {"run.task": "image_text_pretrain"}, "run.task", "evaluates nothing"),
    ("blip2_stage2_toy", {"run.task": "mafa_pretrain"}, "run.task", "compares no pairs"),
    ("blip2_stage2_toy", {f"{MAFA}.con_d.arch": "oracle"}, MAFA, "does not train by the step"),
    ("blip2_stage2_toy", {"model.opt_model": None}, "model.opt_model", "is empty"),
    ("caption_toy", {"run.min_len": 99}, "run.min_len", "more than run.max_len; use at most 24"),
    ("caption_toy", {"run.metrics": []}, "run.metrics", "name a metric"),
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


def test_splits_that_a_task_does_not_evaluate_are_reported():
    config = config_of("nlvr_pretrain_toy", {"run.valid_splits": ["val"]})
    _, problems, notes = complete(config, machine=False)
    assert problems == []
    assert any(n.startswith("run.valid_splits:") and "evaluates noth" in n for n in notes), notes


@pytest.mark.parametrize("name", ["vqa_ft_toy", "nlvr_toy"])
def test_checkpoints_that_run_code_are_rejected(malicious_zip, name):  # noqa: F811
    options = ["model.load_pretrained=True", f"model.pretrained={malicious_zip.path}"]
    with pytest.raises(ConfigError) as caught:
        load_config(TOY_TASKS / f"train/{name}.yaml", options)
    lines = [line for line in caught.value.problems if line.startswith("model.pretrained: ")]
    malicious_zip.assert_rejected(lines[0], "model.pretrained")


def test_language_models_that_run_code_are_rejected(tmp_path):
    world = MaliciousFile(tmp_path / "folder", name="pytorch_model.bin")
    (tmp_path / "folder/config.json").write_text(json.dumps({"model_type": "bert"}))
    path = TOY_TASKS / "train/blip2_stage2_toy.yaml"
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"model.opt_model={tmp_path / 'folder'}"])
    lines = [line for line in caught.value.problems if line.startswith("model.opt_model: ")]
    world.assert_rejected(lines, "model.opt_model")
