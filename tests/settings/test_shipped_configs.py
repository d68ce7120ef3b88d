"""The shipped configs: all load, and contain the hyperparameters of the papers."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT
from omegaconf import OmegaConf
from shipped import (
    EVAL,
    SHIPPED,
    STAGE_1,
    TRAIN,
    head_of,
    loaded,
    options_in_comments,
)


@pytest.fixture(scope="module")
def paper():
    return loaded(TRAIN / "albef_4m.yaml")


@pytest.mark.downstream
def test_shipped_files():
    assert {path.stem for path in TRAIN.iterdir()} == {
        *("albef_4m", "albef_own_data", "albef_shards", "albef_toy", "blip_4m", "blip_toy"),
        "albef_small_own_data",
        *("blip2_own_data", "blip2_toy", "blip2_cond_pretrain", "blip2_retrieval_ft"),
        *("blip2_retrieval_ft_flickr", "blip2_caption_ft"),
        *("blip2_stage2_opt", "blip2_stage2_t5"),
        "blip2_stage2_mined",
        *("cond_pretrain", "cond_retrieval_ft", "cond_own_data", "ecm_own_data"),
        "photographs_own_data",
        *("fne_coco", "fne_flickr", "fne_toy"),
        *("retrieval_ft_coco", "retrieval_ft_flickr", "retrieval_ft_toy", "retrieval_ft_own_data"),
        *("vqa_ft", "ve_ft"),
        *("nlvr_pretrain", "nlvr_ft"),
        "grounding_ft",
    }
    assert {path.stem for path in EVAL.iterdir()} == {
        *("caption_coco", "caption_coco_zeroshot", "caption_nocaps"),
        *("vqav2_zeroshot", "okvqa_zeroshot", "gqa_zeroshot"),
        *("retrieval_coco", "retrieval_flickr", "retrieval_own_data", "retrieval_toy"),
        *("retrieval_ft_coco", "retrieval_ft_flickr", "retrieval_ft_toy"),
        *("retrieval_zeroshot_coco", "retrieval_zeroshot_flickr"),
        *("vqa_ft", "ve_ft"),
        *("nlvr", "grounding_refcoco"),
    }
    assert [path for path in SHIPPED if path.parent not in (TRAIN, EVAL)] == [STAGE_1]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_loads(path):
    cfg = loaded(path)
    assert cfg.run_cfg.runner == "runner_mafa"
    assert cfg.run_cfg.evaluate is (path.parent == EVAL)
    assert cfg.run_cfg.output_dir.startswith("output/")
    # The loaded config equals the file.
    file_content = OmegaConf.load(path)
    assert cfg.run_cfg.batch_size_eval == file_content.run.batch_size_eval
    assert cfg.model_cfg.arch == file_content.model.arch
    assert list(cfg.datasets_cfg) == list(file_content.datasets)


COMMENTS = [(path, options) for path in SHIPPED for options in options_in_comments(path)]


@pytest.mark.parametrize("path, options", COMMENTS, ids=lambda one: getattr(one, "stem", None))
def test_options_in_comments_are_valid(path, options):
    assert options
    cfg = loaded(path, *options)
    for option in options:
        key, _, value = option.partition("=")
        found = OmegaConf.select(cfg.config, key)
        assert str(found) == value.strip('"').replace("null", "None"), option


def test_every_config_documents_its_variants():
    without = {path.stem for path in SHIPPED} - {path.stem for path, _ in COMMENTS}
    assert without == {"cond_pretrain", "cond_retrieval_ft", "blip2_cond_pretrain"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_command_in_the_comments_names_this_config(path):
    named = re.findall(r"--cfg-path (\S+)", head_of(path))
    assert all((ROOT / name).is_file() for name in named)
    if path.stem not in ("albef_toy", "blip_toy", "blip2_toy"):
        assert str(path.relative_to(ROOT)) in named


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
