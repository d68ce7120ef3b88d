"""The shipped configs: all load, and contain the hyperparameters of the papers."""

from __future__ import annotations

import re
import shlex

import pytest
from conftest import ROOT
from omegaconf import OmegaConf
from shipped import (
    EVAL,
    FOUR_MILLION,
    SHIPPED,
    STAGE_1,
    TRAIN,
    head_of,
    last,
    loaded,
    options_in_comments,
    step_of,
)

from lavis_mafa.config import load_config


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


# Hyperparameters of the paper


def test_optimizer_settings_of_the_paper(paper):
    run = paper.run_cfg
    assert (run.batch_size_train, run.accum_grad_iters) == (96, 1)
    assert (run.init_lr, run.min_lr, run.weight_decay) == (1e-4, 1e-5, 0.02)
    assert (run.warmup_lr, run.warmup_steps) == (1e-5, 2000)
    assert (run.max_epoch, run.lr_horizon) == (20, 30)
    assert (run.lr_sched, run.task) == ("linear_warmup_cosine_lr", "mafa_pretrain")


def test_mini_batch_settings_of_the_paper(paper):
    grit = paper.run_cfg.grit
    assert grit.enabled is True
    assert (grit.queue_size, grit.search_space, grit.start_epoch) == (48000, 4800, 1)
    assert list(paper.datasets_cfg) == FOUR_MILLION
    for data in paper.datasets_cfg.values():
        train = data.vis_processor.train
        assert (train.name, train.image_size) == ("albef_image_train", 256)
        assert (train.min_scale, data.text_processor.train.name) == (0.2, "albef_caption")


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


RETRIEVAL = [
    *(TRAIN / f"retrieval_ft_{data}.yaml" for data in ("coco", "flickr")),
    *(EVAL / f"retrieval_{kind}_{data}.yaml" for kind in ("ft", "zeroshot")
      for data in ("coco", "flickr")),
]  # fmt: skip


@pytest.mark.parametrize("path", RETRIEVAL, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_retrieval_of_albef_ranks_as_the_authors(path):
    """By the ITM score alone (MAFA F) of captions of 30 tokens; LAVIS's weights by its sum."""
    run = loaded(path).run_cfg
    assert (run.rerank_by, run.retrieval_max_txt_len) == ("itm", 30)
    for options in options_in_comments(path):
        if any("/LAVIS/" in option for option in options):
            run = loaded(path, *options).run_cfg
            assert (run.rerank_by, run.retrieval_max_txt_len) == ("sum", 35)


def test_model_and_step_settings_of_the_paper(paper):
    model = paper.model_cfg
    assert (model.arch, model.model_type, model.load_pretrained) == ("albef_mafa", "base", True)
    assert (model.image_size, model.max_txt_len, model.temp) == (256, 25, 0.07)
    assert (model.mlm_mask_prob, model.embed_dim) == (0.5, 256)
    assert model.ramp_epochs == 1  # of momentum distillation, as in ALBEF's code; LAVIS: 2
    step = step_of(paper)
    assert step.negatives == "hardest" and step.detach_other is True
    assert {k: w for k, w in step.loss_weights.items() if w} == {"itc": 1, "itm": 1, "lm": 1}
    assert (step.soft_labels.type, step.soft_labels.alpha) == ("smoothed", 0.5)
    assert step.soft_labels.start_epoch is None
    rule = step.connections
    assert (rule.low, rule.high) == (0.5, 0.8)
    assert (rule.action, rule.resample, set(rule.use_in)) == ("convert", True, {"itc", "itm", "lm"})


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


@pytest.mark.parametrize(
    "path", [TRAIN / "albef_4m.yaml", TRAIN / "cond_pretrain.yaml", STAGE_1], ids=lambda p: p.stem
)
def test_captions_of_one_image_can_be_treated_as_in_the_authors_code(path):
    """The header names both options, which differ from the authors' code by default."""
    options = ("model.mafa.same_image=negative", "run.grit.same_image=together")
    assert " ".join(options) in head_of(path)
    ours, authors = loaded(path), loaded(path, *options)
    assert (step_of(ours).same_image, ours.run_cfg.grit.same_image) == ("positive", "apart")
    assert step_of(authors).same_image == "negative"
    assert authors.run_cfg.grit.same_image == "together"


def test_each_config_starts_from_the_checkpoint_of_the_previous_one(paper):
    """Con-D: pre-trained, fine-tuned, then used by albef_4m."""
    pretrain, tune = loaded(TRAIN / "cond_pretrain.yaml"), loaded(TRAIN / "cond_retrieval_ft.yaml")
    assert tune.model_cfg.pretrained == last(pretrain)
    assert tune.model_cfg.load_finetuned is False
    con_d = paper.model_cfg.mafa.con_d
    assert con_d.checkpoint == last(tune)
    # The authors' Con-D judges the model's own images and tokens: see configs/filter.yaml there.
    assert (con_d.arch, con_d.model_type) == (paper.model_cfg.arch, paper.model_cfg.model_type)
    assert con_d.own_view is False
    assert con_d.image_size == tune.model_cfg.image_size == paper.model_cfg.image_size == 256
    for data in tune.datasets_cfg.values():
        assert data.vis_processor.train.image_size == data.vis_processor.eval.image_size == 256


def test_con_d_pre_training_equals_mafa_without_con_d(paper):
    """S-ITC, MLM and ITM with GRIT on the same data (MAFA 4.1)."""
    pretrain = loaded(TRAIN / "cond_pretrain.yaml")
    mine, theirs = pretrain.to_dict(), paper.to_dict()
    assert mine["model"]["mafa"].pop("con_d") is None and theirs["model"]["mafa"].pop("con_d")
    assert mine["model"] == theirs["model"] and mine["datasets"] == theirs["datasets"]
    for name in ("output_dir", "job_id"):
        mine["run"].pop(name), theirs["run"].pop(name, None)
    assert mine["run"] == theirs["run"]


def test_evaluation_uses_the_checkpoint_of_training():
    train, evaluate = (
        loaded(TRAIN / "albef_own_data.yaml"),
        loaded(EVAL / "retrieval_own_data.yaml"),
    )
    assert evaluate.model_cfg.finetuned.startswith(train.run_cfg.output_dir + "/")
    assert evaluate.model_cfg.image_size == train.model_cfg.image_size == 256
    assert evaluate.model_cfg.load_finetuned is True


def test_con_d_on_own_data_learns_grouped_hard_negatives_with_the_truth():
    cfg = loaded(TRAIN / "cond_own_data.yaml")
    assert cfg.model_cfg.mafa.con_d.arch == "oracle"
    assert cfg.datasets_cfg.image_text_json.build_info.truth == "same_caption"
    grit, step = cfg.run_cfg.grit, step_of(cfg)
    assert grit.enabled and grit.naive and grit.start_epoch == 0, "grouped from the first epoch on"
    assert step.loss_weights["lm"] == 0 and step.negatives == "hardest"
    assert cfg.model_cfg.pretrained == last(loaded(TRAIN / "albef_own_data.yaml", "run.job_id=run"))
