"""The shipped configs have the settings of the papers and follow each other's checkpoints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from lavis.common.registry import registry
from omegaconf import OmegaConf
from shipped import (
    EVAL,
    FOUR_MILLION,
    STAGE_1,
    TRAIN,
    config_path,
    head_of,
    last,
    loaded,
    options_in_comments,
    step_of,
)

from lavis_mafa.families.mafa_model import checkpoint_of
from lavis_mafa.settings import ConfigError, load_config

PAPER = {
    name: values
    for names, values in yaml.safe_load(
        Path(__file__).with_name("paper_settings.yaml").read_text(encoding="utf-8")
    ).items()
    for name in names.split(", ")
}
BEST = "checkpoint_best.pth"


@pytest.mark.parametrize("name", PAPER)
def test_settings_of_the_papers(name):
    config = loaded(config_path(name)).to_dict()
    found = {key: OmegaConf.select(OmegaConf.create(config), key) for key in PAPER[name]}
    assert {k: list(v) if isinstance(v, list) else v for k, v in found.items()} == PAPER[name]


FOUR_MILLION_CONFIGS = ("albef_4m", "blip_4m", "blip_4m_clean", "nlvr_pretrain")


@pytest.mark.parametrize(
    "path",
    [STAGE_1, *(TRAIN / f"{name}.yaml" for name in FOUR_MILLION_CONFIGS)],
    ids=lambda path: path.stem,
)
def test_pre_training_uses_the_four_million_images(path):
    assert list(loaded(path).datasets_cfg) == FOUR_MILLION


@pytest.mark.parametrize("family", ["albef", "blip"])
def test_fourteen_million_images_are_four_and_twelve(family):
    found = loaded(TRAIN / f"{family}_14m.yaml").datasets_cfg
    assert list(found) == [*FOUR_MILLION, "conceptual_caption_12m"]
    smaller = loaded(TRAIN / f"{family}_4m.yaml").datasets_cfg
    assert {name: found[name] for name in FOUR_MILLION} == smaller


@pytest.mark.parametrize(
    "name, total",
    [
        ("../blip2_stage1", 384),
        ("blip2_cond_pretrain", 384),
        ("blip_4m", 1200),
        ("albef_14m", 512),
        ("blip_14m", 1200),
        ("blip_4m_clean", 1200),
        ("blip2_stage2_opt", 512),
        ("blip2_stage2_t5", 512),
        ("blip2_caption_ft", 128),
        ("blip2_retrieval_ft", 112),
        ("blip2_retrieval_ft_flickr", 112),
        ("retrieval_ft_coco", 256),
        ("retrieval_ft_flickr", 256),
        ("vqa_ft", 128),
        ("ve_ft", 256),
        ("nlvr_pretrain", 256),
        ("nlvr_ft", 64),
    ],
)
def test_total_batches(name, total):
    """Pairs per optimizer step on the GPUs that the header names; MAFA F, G.7 and G.8."""
    path = (TRAIN / f"{name}.yaml").resolve()
    run = loaded(path).run_cfg
    found = [
        re.search(rf"--{name}=(\d+)", head_of(path))
        for name in ("nodes", "nproc_per_node", "gpus-per-node")
    ]
    number = run.batch_size_train * run.accum_grad_iters
    for gpus in filter(None, found):
        number *= int(gpus[1])
    assert number == total


def without(config, *keys):
    for section, name in (key.split(".") for key in keys):
        config[section].pop(name, None)
    return config


def test_con_d_is_trained_as_the_model_without_con_d():
    """S-ITC, MLM and ITM with GRIT on the same data (MAFA 4.1); of BLIP-2 its own stage 1 (G.7)."""
    folders = ("run.output_dir", "run.job_id")
    mine, theirs = (loaded(TRAIN / f"{n}.yaml").to_dict() for n in ("cond_pretrain", "albef_4m"))
    assert mine["model"]["mafa"].pop("con_d") is None and theirs["model"]["mafa"].pop("con_d")
    assert without(mine, *folders) == without(theirs, *folders)
    paths = (TRAIN / "blip2_cond_pretrain.yaml", STAGE_1)
    mine, theirs = (
        without(loaded(path).to_dict(), "model.mafa", "run.grit", *folders) for path in paths
    )
    assert mine == theirs
    for name in ("opt", "t5"):  # stage 2 uses the same pairs
        stage_2 = loaded(TRAIN / f"blip2_stage2_{name}.yaml")
        assert stage_2.to_dict()["datasets"] == theirs["datasets"]


# Config, the config whose checkpoint it starts from, and which checkpoint.
STARTS = [
    ("train/cond_retrieval_ft", "train/cond_pretrain", None),
    ("train/cond_own_data", "train/albef_own_data", None),
    *((f"train/blip2_retrieval_ft{data}", "train/blip2_cond_pretrain", None)
      for data in ("", "_flickr")),
    *((f"train/blip2_stage2_{name}", "blip2_stage1", None) for name in ("opt", "t5")),
    ("train/blip2_caption_ft", "train/blip2_stage2_opt", None),
    ("train/blip2_stage2_toy", "train/blip2_toy", None),
    *((f"eval/{name}", "train/blip2_stage2_toy", None) for name in ("caption_toy", "vqa_toy")),
    *((f"train/{name}", "train/albef_4m", None)
      for name in ("retrieval_ft_coco", "retrieval_ft_flickr", "vqa_ft", "ve_ft", "nlvr_pretrain")),
    *((f"train/{name}", "train/albef_toy", None)
      for name in ("retrieval_ft_toy", "vqa_ft_toy", "ve_ft_toy", "nlvr_pretrain_toy")),
    ("train/nlvr_ft", "train/nlvr_pretrain", None),
    ("train/nlvr_toy", "train/nlvr_pretrain_toy", None),
    *((f"eval/{name}", f"train/{name}", BEST) for name in ("retrieval_ft_coco",
      "retrieval_ft_flickr", "ve_ft", "retrieval_ft_toy", "vqa_ft_toy", "ve_ft_toy")),
    ("eval/vqa_ft", "train/vqa_ft", None),
    ("eval/retrieval_zeroshot_flickr", "train/retrieval_ft_coco", BEST),
    ("eval/retrieval_zeroshot_coco", "train/albef_4m", None),
]  # fmt: skip


@pytest.mark.parametrize("name, before, kind", STARTS)
def test_each_config_starts_from_the_checkpoint_of_the_previous_one(name, before, kind):
    cfg, path = loaded(config_path(name)), config_path(before)
    named = OmegaConf.load(path).run.get("job_id")
    producer = loaded(path) if named else loaded(path, "run.job_id=run")
    assert checkpoint_of(cfg.model_cfg) == last(producer, kind or "checkpoint_last.pth")
    if before.removeprefix("train/") == name.removeprefix("eval/"):
        assert cfg.model_cfg.arch == producer.model_cfg.arch
        assert cfg.model_cfg.image_size == producer.model_cfg.image_size
        assert cfg.run_cfg.task == producer.run_cfg.task


def test_con_d_is_the_fine_tuned_model_before_it():
    con_d = loaded(TRAIN / "albef_4m.yaml").model_cfg.mafa.con_d
    assert con_d.checkpoint == last(loaded(TRAIN / "cond_retrieval_ft.yaml"))
    own = last(loaded(TRAIN / "blip2_retrieval_ft.yaml"))
    assert f"model.mafa.con_d.checkpoint={own}" in head_of(STAGE_1)


PUBLISHED = {
    **dict.fromkeys(
        ("vqav2_zeroshot", "okvqa_zeroshot", "gqa_zeroshot", "caption_coco_zeroshot"),
        ("BLIP2/blip2_pretrained_opt2.7b.pth", "blip2_stage2_opt"),
    ),
    **dict.fromkeys(
        ("caption_coco", "caption_nocaps"), ("BLIP2/blip2_caption_opt2.7b.pth", "blip2_caption_ft")
    ),
    **dict.fromkeys(
        ("retrieval_coco", "retrieval_flickr"),
        ("BLIP2/blip2_finetune_coco.pth", "blip2_retrieval_ft"),
    ),
    "nlvr": ("ALBEF/albef_nlvr_lavis.pt", "nlvr_ft"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_weights_by_default_and_own_weights_by_option(name):
    file, training = PUBLISHED[name]
    path = EVAL / f"{name}.yaml"
    assert checkpoint_of(loaded(path).model_cfg).endswith(f"/{file}")
    trained = loaded(TRAIN / f"{training}.yaml")
    # The best checkpoint if a split is validated.
    kind = BEST if trained.run_cfg.valid_splits else "checkpoint_last.pth"
    own = f"model.finetuned={last(trained, kind)}"
    options = [options for options in options_in_comments(path) if own in options]
    assert len(options) == 1
    assert checkpoint_of(loaded(path, *options[0]).model_cfg) == own.partition("=")[2]


def test_other_systems_of_the_paper():
    """The comments of albef_4m.yaml contain the options of GRIT-VLP, ALBEF-base, ECM-E and TCL."""
    path = TRAIN / "albef_4m.yaml"
    cfgs = {}
    for line in path.read_text().splitlines():
        named = re.match(r"#\s+([\w-]+):\s+--options (.*)", line)
        if named:
            cfgs[named[1]] = load_config(path, shlex.split(named[2]), machine=False)
    assert cfgs.keys() == {"GRIT-VLP", "ALBEF-base", "ECM-E", "TCL"}
    steps = {name: step_of(cfg) for name, cfg in cfgs.items()}
    assert cfgs["GRIT-VLP"].model_cfg.mafa.con_d is cfgs["ALBEF-base"].model_cfg.mafa.con_d is None
    grit = cfgs["GRIT-VLP"].run_cfg.grit
    assert grit.enabled and grit.search_space == 960
    assert steps["GRIT-VLP"].soft_labels.type == "consistency"
    assert steps["GRIT-VLP"].soft_labels.weight == 0.2
    assert steps["GRIT-VLP"].soft_labels.active(0, grouped=False)
    assert not cfgs["ALBEF-base"].run_cfg.grit.enabled
    assert steps["ALBEF-base"].soft_labels.type == "one_hot"
    assert steps["ALBEF-base"].negatives == "sampled"
    assert cfgs["ECM-E"].model_cfg.mafa.con_d.arch == "albef_mafa"
    assert steps["ECM-E"].connections.action == "drop"
    weights = steps["TCL"].loss_weights
    assert weights["itc"] == weights["imc"] == weights["lmi"] == pytest.approx(1 / 3)
    assert steps["TCL"].soft_labels.type == "momentum" and steps["TCL"].negatives == "sampled"


def test_settings_of_other_weights_are_options_of_the_headers():
    """LAVIS's VQA and retrieval weights, T5's prompts, and distillation in fine-tuning."""
    cfg = loaded(TRAIN / "vqa_ft.yaml", *options_in_comments(TRAIN / "vqa_ft.yaml")[-1])
    assert (cfg.model_cfg.label_smoothing, cfg.model_cfg.answer_sep_tokens) == (0.1, 1)
    assert cfg.datasets_cfg.vg_vqa_mafa.build_info.answer_weight == 0.2
    for name in ("vqa_ft", "ve_ft"):
        options = [o for o in options_in_comments(TRAIN / f"{name}.yaml") if "use_distill" in o[0]]
        assert loaded(TRAIN / f"{name}.yaml", *options[0]).model_cfg.use_distill is True
    for name in ("vqav2_zeroshot", "okvqa_zeroshot", "gqa_zeroshot"):
        (t5,) = [o for o in options_in_comments(EVAL / f"{name}.yaml") if "t5" in o[0]]
        cfg = loaded(EVAL / f"{name}.yaml", *t5)
        assert cfg.run_cfg.prompt == "Question: {} Short answer:"
        assert (cfg.model_cfg.arch, cfg.model_cfg.image_size) == ("blip2_t5_mafa", 224)
        assert cfg.model_cfg.apply_lemmatizer is (name == "okvqa_zeroshot")
    for name in ("retrieval_ft_coco", "retrieval_ft_flickr", "vqa_ft", "ve_ft"):
        published = options_in_comments(EVAL / f"{name}.yaml")[-1]
        cfg = loaded(EVAL / f"{name}.yaml", *published)
        assert "/LAVIS/models/ALBEF/albef_" in checkpoint_of(cfg.model_cfg)
        if name.startswith("retrieval"):
            assert (cfg.run_cfg.rerank_by, cfg.run_cfg.retrieval_max_txt_len) == ("sum", 35)
        if name == "vqa_ft":
            assert cfg.model_cfg.answer_sep_tokens == 1


def test_queue_and_annotations_equal_the_published_weights():
    """LAVIS's albef_retrieval loads the result; VQA adds the validation split and Visual Genome."""
    for name in ("coco", "flickr"):
        theirs = registry.get_model_class("albef_retrieval").default_config_path(name)
        cfg = loaded(TRAIN / f"retrieval_ft_{name}.yaml")
        assert cfg.model_cfg.queue_size == OmegaConf.load(theirs).model.queue_size
    data = loaded(TRAIN / "vqa_ft.yaml").datasets_cfg
    assert list(data) == ["coco_vqa", "vg_vqa_mafa"]
    used = data.coco_vqa.build_info.annotations.train.storage
    assert [file.rsplit("/")[-1] for file in used] == ["vqa_train.json", "vqa_val.json"]
    gqa = loaded(EVAL / "gqa_zeroshot.yaml").datasets_cfg.gqa.build_info.annotations
    assert "testdev" in gqa.val.storage[0]
    nlvr = loaded(EVAL / "nlvr.yaml").datasets_cfg.nlvr_mafa.build_info.annotations
    assert nlvr.test.url != nlvr.val.url


@pytest.mark.parametrize("name", ["vqav2_zeroshot", "gqa_zeroshot"])
@pytest.mark.parametrize("prompt", ["Question: Answer:", "{} or {}?", "Q {q} {}", "Q {0}", "{ {}"])
def test_prompts_without_a_placeholder_are_rejected(name, prompt):
    with pytest.raises(ConfigError, match="run.prompt: .*needs exactly one {}"):
        loaded(EVAL / f"{name}.yaml", f"run.prompt='{prompt}'")
    assert loaded(EVAL / f"{name}.yaml", "run.prompt=''").run_cfg.prompt == ""


@pytest.mark.parametrize("name", ["nlvr_pretrain", "nlvr_ft"])
@pytest.mark.parametrize(
    "option", ["model.mafa.negatives=hardest", "model.queue_size=8", "run.grit.enabled=True"]
)
def test_keys_that_models_of_nlvr_ignore_are_rejected(name, option):
    key = "model.mafa" if "mafa" in option else option.partition("=")[0]
    with pytest.raises(ConfigError, match=f"\n{key}: "):
        loaded(TRAIN / f"{name}.yaml", option)
