"""docs/from_lavis.md and docs/from_sentence_transformers.md: their blocks and keys are real."""

from __future__ import annotations

import re
from pathlib import Path

import commands as docs
import lavis
import pytest
from conftest import ROOT
from omegaconf import OmegaConf
from shipped import required_options

from lavis_mafa.config import ConfigError, load_config

FROM_LAVIS = (ROOT / "docs/from_lavis.md").read_text(encoding="utf-8")
FROM_SENTENCE_TRANSFORMERS = ROOT / "docs/from_sentence_transformers.md"
PROJECTS = Path(lavis.__file__).parent / "projects"
# LAVIS's config, its model and ours.
LAVIS_CONFIGS = {
    "albef/train/pretrain.yaml": ("albef_pretrain", "albef_mafa"),
    "blip/train/pretrain_14m.yaml": ("blip_pretrain", "blip_mafa"),
    "blip2/train/pretrain_stage1.yaml": ("blip2", "blip2_mafa"),
}
# Sections that the pages name without what comes before them.
SHORT = ("connections", "con_d", "soft_labels", "loss_weights", "posterior", "margin")


def lavis_blocks():
    """Return the block of every config of LAVIS that the page names."""
    found = re.findall(r"For `lavis/projects/([^`]+)`.*?```yaml\n(.*?)```", FROM_LAVIS, re.DOTALL)
    return dict(found)


def test_page_has_a_block_for_every_family():
    assert lavis_blocks().keys() == LAVIS_CONFIGS.keys()


@pytest.mark.parametrize("name", LAVIS_CONFIGS)
def test_block_turns_a_config_of_lavis_into_ours(name, tmp_path):
    theirs = OmegaConf.load(PROJECTS / name)
    before, after = LAVIS_CONFIGS[name]
    assert theirs.model.arch == before
    file = tmp_path / "config.yaml"
    OmegaConf.save(OmegaConf.merge(theirs, OmegaConf.create(lavis_blocks()[name])), file)
    cfg = load_config(str(file), machine=False)
    assert (cfg.model_cfg.arch, cfg.run_cfg.task) == (after, "mafa_pretrain")
    for key in ("init_lr", "batch_size_train", "max_epoch"):  # the rest is LAVIS's
        assert cfg.run_cfg[key] == theirs.run[key]
    # Settings under which tests/models/test_against_lavis.py finds equal losses.
    assert (cfg.model_cfg.mafa.negatives, cfg.model_cfg.mafa.same_image) == ("sampled", "negative")
    assert cfg.run_cfg.grit.enabled is False


@pytest.mark.parametrize("name", LAVIS_CONFIGS)
def test_config_of_lavis_is_accepted_as_it_is(name):
    assert load_config(str(PROJECTS / name), machine=False).model_cfg.arch == LAVIS_CONFIGS[name][0]


@pytest.mark.parametrize(
    "block", docs.blocks(FROM_SENTENCE_TRANSFORMERS.read_text(encoding="utf-8"), "yaml")
)
def test_blocks_for_sentence_transformers_are_accepted(block, tmp_path):
    shipped = ROOT / "projects/mafa/train/albef_own_data.yaml"
    file = tmp_path / "albef_own_data.yaml"
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(shipped), OmegaConf.create(block)), file)
    try:
        load_config(str(file), required_options(shipped, []), machine=False)
    except ConfigError as error:  # an optional package may be missing, nothing else
        assert "pip install" in str(error)
        assert len(error.problems) == 1


def config_keys():
    """Return all keys of docs/config.md, with their sections."""
    keys, section = set(), ""
    for line in (ROOT / "docs/config.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## `([\w.]+)`", line):
            section = heading[1]
        elif section and (row := re.match(r"- `([\w.]+)` \(", line)):
            keys |= {f"{section}.{row[1]}", section}
        elif line.startswith("## "):
            section = ""
    return keys


@pytest.mark.parametrize("page", ["from_lavis.md", "from_sentence_transformers.md"])
def test_keys_of_the_pages_exist(page):
    text = docs.without_blocks((ROOT / "docs" / page).read_text(encoding="utf-8"))
    spans = [re.split(r"[=:]", span)[0] for span in docs.SPAN.findall(text)]
    named = {s for s in spans if re.fullmatch(rf"(model|run|grit|{'|'.join(SHORT)})(\.\w+)+", s)}
    full = {f"model.mafa.{s}" if s.startswith(SHORT) else s for s in named}
    full = {f"run.{s}" if s.startswith("grit.") else s for s in full}
    assert len(full) > 10
    assert sorted(full - config_keys()) == []
