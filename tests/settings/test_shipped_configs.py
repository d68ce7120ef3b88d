"""The shipped configs, and those of LAVIS's projects, load and process as their papers say."""

from __future__ import annotations

from pathlib import Path

import lavis
import pytest
from omegaconf import OmegaConf
from shipped import SHIPPED, loaded, options_in_comments

from lavis_mafa.settings import ConfigError, load_config

# Known errors of LAVIS's own configs: no split val; no such model type; an empty file.
LAVIS_WRONG = {
    "albef/train/okvqa_ft",
    "blip/coco_cap_ft_iter",
    "blip2/eval/caption_coco_flant5xl_eval",
}
COMMENTS = [(path, options) for path in SHIPPED for options in options_in_comments(path)]


@pytest.mark.parametrize("path, options", COMMENTS, ids=lambda one: getattr(one, "stem", None))
def test_options_in_comments_are_valid(path, options):
    assert options
    cfg = loaded(path, *options)
    for option in options:
        key, _, value = option.partition("=")
        found = OmegaConf.select(cfg.config, key)
        assert str(found) == value.strip('"').replace("null", "None"), option


def authors_configs():
    """Return the configs of ALBEF and FNE at full size, but not those of own data."""
    for path in SHIPPED:
        cfg = OmegaConf.load(path)
        small = cfg.model.model_type in ("tiny", "small")
        own = any(name.startswith("image_text_") for name in cfg.datasets)
        if cfg.model.arch.startswith(("albef", "fne")) and not small and not own:
            yield path


@pytest.mark.parametrize(
    "path", authors_configs(), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_configs_of_albef_and_fne_process_as_the_authors(path):
    cfg = loaded(path)
    # LAVIS's published weights were fine-tuned on texts of LAVIS's processor.
    published = "/LAVIS/" in str(cfg.model_cfg.finetuned) and cfg.model_cfg.load_finetuned
    words = "blip" if published else "albef"
    for data in OmegaConf.load(path).datasets.values():
        kind = "question" if cfg.run_cfg.task == "mafa_vqa" else "caption"
        expected = {
            "vis_processor": {"train": "albef_image_train", "eval": "blip_image_eval"},
            "text_processor": dict.fromkeys(("train", "eval"), f"{words}_{kind}"),
        }
        for processor, names in expected.items():
            for phase, given in data[processor].items():
                assert given.name == names[phase], (processor, phase)
    other = {"albef": "blip", "blip": "albef"}[words]
    for options in options_in_comments(path):  # weights of the other kind come with its processor
        weights = str(loaded(path, *options).model_cfg.finetuned)
        if "finetuned=" in " ".join(options) and published != ("/LAVIS/" in weights):
            (data,) = loaded(path, *options).datasets_cfg.values()
            assert data.text_processor.eval.name.startswith(f"{other}_")


@pytest.mark.slow
def test_configs_of_lavis_projects_pass():
    root = Path(lavis.__file__).parent / "projects"
    files = sorted(root.rglob("*.yaml"))
    if not files:
        pytest.skip("LAVIS came without its projects")
    rejected = set()
    for file in files:
        try:
            load_config(file, machine=False)
        except ConfigError:
            rejected.add(str(file.relative_to(root).with_suffix("")))
    assert rejected <= LAVIS_WRONG
