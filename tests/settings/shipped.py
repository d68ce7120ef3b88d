"""Shared by the tests of shipped configs: the files, and how they are loaded."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from conftest import ROOT, WITHOUT_DOWNSTREAM
from lavis.common.registry import registry
from omegaconf import OmegaConf

from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.settings import load_config


def _of_downstream(path):
    """Return whether a config names a model, task or data set that is not registered."""
    cfg = OmegaConf.load(path)
    model, task = registry.get_model_class(cfg.model.arch), registry.get_task_class(cfg.run.task)
    return None in (model, task, *map(registry.get_builder_class, cfg.datasets))


PROJECTS = ROOT / "projects"
TRAIN, EVAL = PROJECTS / "mafa/train", PROJECTS / "mafa/eval"
STAGE_1 = PROJECTS / "mafa/blip2_stage1.yaml"
STUDIES = PROJECTS / "mafa/studies"  # study files are tested with their reader
SHIPPED = sorted(path for path in PROJECTS.rglob("*.y*ml") if STUDIES not in path.parents)
if WITHOUT_DOWNSTREAM:
    SHIPPED = [path for path in SHIPPED if not _of_downstream(path)]
# The toy configs of downstream tasks, whose data sets are a plugin; run from the root.
TOY_TASKS = ROOT / "tests/downstream/configs"
SCRIPTS = sorted((ROOT / "run_scripts").rglob("*.sh"))
ANNOTATIONS = "datasets.image_text_json.build_info.annotations.{}.storage={}.json"
FOUR_MILLION = ["coco_caption", "vg_caption", "sbu_caption", "conceptual_caption_3m"]


def required_options(path, options=()):
    """Return the options without which a config for own data or an own language model is
    incomplete.
    """
    if "own_data" in path.stem:
        splits = ("train", "val", "test") if path.parent.name == "train" else ("test",)
        files = [ANNOTATIONS.format(split, split) for split in splits]
        return [*files, "datasets.image_text_json.build_info.images.storage=images"]
    if "shards" in path.stem:
        key = "datasets.image_text_shards.build_info.annotations.{0}.storage={0}/*.tar"
        return [key.format(split) for split in ("train", "val", "test")]
    images = "datasets.image_text_json.build_info.images.storage="
    if path.stem == "blip2_stage2_mined" and not any(o.startswith(images) for o in options):
        return [f"{images}images"]
    model = OmegaConf.load(path).model
    given = any(option.startswith(("model.opt_model=", "model.t5_model=")) for option in options)
    if model.arch == "blip2_opt_mafa" and model.model_type == "tiny" and not given:
        return ["model.opt_model=some/opt"]
    return []


def config_path(name):
    """Return the path of a config by its name below projects/mafa, or of a toy task."""
    shipped = PROJECTS / f"mafa/{name}.yaml"
    return shipped if shipped.exists() else TOY_TASKS / f"{name}.yaml"


@functools.cache
def loaded(path, *options):
    if WITHOUT_DOWNSTREAM and _of_downstream(path):
        pytest.skip("lavis_mafa.downstream is not there")
    return load_config(path, [*required_options(path, options), *options], machine=False)


def step_of(cfg):
    return StepSettings.from_config(OmegaConf.to_container(cfg.model_cfg.mafa))


def last(cfg, name="checkpoint_last.pth"):
    return str(Path(cfg.run_cfg.output_dir) / cfg.run_cfg.job_id / name)


def head_of(path):
    """Return the comments at the beginning of a config."""
    return re.match(r"(#.*\n)*", path.read_text())[0]


def options_in_comments(path):
    """Return the options after every ``--options`` in the header comments of a config."""
    comments = [line[1:] for line in path.read_text().splitlines() if line.startswith("#")]
    lines = "\n".join(comments).replace("\\\n", " ").splitlines()
    option_texts = [line.split("--options", 1)[1] for line in lines if "--options" in line]
    found = [re.findall(r"'([\w.]+=[^']*)'|([\w.]+=\S+)", line) for line in option_texts]
    return [[quoted or plain.rstrip(").,") for quoted, plain in line] for line in found]
