"""What the tests of shipped configs share: the files, and how they are loaded."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path

import pytest
from conftest import ROOT
from omegaconf import OmegaConf

from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.config import defaults, load, load_config

PROJECTS = ROOT / "projects"
TRAIN, EVAL = PROJECTS / "mafa/train", PROJECTS / "mafa/eval"
STAGE_1 = PROJECTS / "mafa/blip2_stage1.yaml"
STUDIES = PROJECTS / "mafa/studies"  # files of another kind, tested with what reads them
SHIPPED = sorted(path for path in PROJECTS.rglob("*.y*ml") if STUDIES not in path.parents)
SCRIPTS = sorted((ROOT / "run_scripts").rglob("*.sh"))
ANNOTATIONS = "datasets.image_text_json.build_info.annotations.{}.storage={}.json"
FOUR_MILLION = ["coco_caption", "vg_caption", "sbu_caption", "conceptual_caption_3m"]


def needed(path, options=()):
    """The options that a config for one's own data or language model cannot do without."""
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


@functools.cache
def loaded(path, *options):
    return load_config(path, [*needed(path, options), *options], machine=False)


def step_of(cfg):
    return StepSettings.from_config(OmegaConf.to_container(cfg.model_cfg.mafa))


def last(cfg, name="checkpoint_last.pth"):
    return str(Path(cfg.run_cfg.output_dir) / cfg.run_cfg.job_id / name)


def head_of(path):
    """The comments that a config begins with."""
    return re.match(r"(#.*\n)*", path.read_text())[0]


def told_options(path):
    """What follows every ``--options`` in the comments at the head of a config."""
    comments = [line[1:] for line in path.read_text().splitlines() if line.startswith("#")]
    lines = "\n".join(comments).replace("\\\n", " ").splitlines()
    told = [line.split("--options", 1)[1] for line in lines if "--options" in line]
    found = [re.findall(r"'([\w.]+=[^']*)'|([\w.]+=\S+)", line) for line in told]
    return [[quoted or plain.rstrip(").,") for quoted, plain in line] for line in found]


@pytest.fixture(autouse=True, scope="module")
def parse_default_yamls_once():
    """Most of the time goes into reading the same few YAMLs."""
    read = functools.cache(defaults.default_yaml)
    with pytest.MonkeyPatch.context() as patch:
        for module in (defaults, load):
            patch.setattr(module, "default_yaml", lambda *which: copy.deepcopy(read(*which)))
        yield
