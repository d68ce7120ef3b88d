"""The configs of ALBEF's downstream tasks: hyperparameters of the papers, and consistency."""

from __future__ import annotations

import re

import pytest
from shipped import EVAL, TOY_TASKS, TRAIN, head_of, last, loaded, options_in_comments

from lavis_mafa.models.mafa_model import checkpoint_of

FULL = ("retrieval_ft_coco", "retrieval_ft_flickr", "vqa_ft", "ve_ft")
TOYS = ("vqa_ft_toy", "ve_ft_toy")


@pytest.mark.parametrize(
    "name, total, epochs, rate",
    [
        ("retrieval_ft_coco", 256, 5, 1e-5),  # MAFA F
        ("retrieval_ft_flickr", 256, 10, 1e-5),
        ("vqa_ft", 128, 8, 2e-5),
        ("ve_ft", 256, 5, 2e-5),  # from ALBEF: MAFA does not report it
    ],
)
def test_hyperparameters_of_the_papers(name, total, epochs, rate):
    cfg, head = loaded(TRAIN / f"{name}.yaml"), head_of(TRAIN / f"{name}.yaml")
    run, model = cfg.run_cfg, cfg.model_cfg
    gpus = int(re.search(r"--nproc_per_node=(\d+)", head)[1])
    assert run.batch_size_train * run.accum_grad_iters * gpus == total
    assert f"Total batch {total}." in head
    assert (run.max_epoch, run.init_lr, run.weight_decay) == (epochs, rate, 0.02)
    assert run.lr_sched == "linear_warmup_cosine_lr" and not run.grit.enabled
    # F: 384 px, no distillation in any task.
    assert model.image_size == 384
    for data in cfg.datasets_cfg.values():
        assert data.vis_processor.train.image_size == 384
        assert data.vis_processor.get("eval", data.vis_processor.train).image_size == 384
    if model.arch == "albef_mafa":
        assert model.alpha == 0.0
        return
    assert model.use_distill is False
    distilled = [o for o in options_in_comments(TRAIN / f"{name}.yaml") if "use_distill" in o[0]]
    assert loaded(TRAIN / f"{name}.yaml", *distilled[0]).model_cfg.use_distill is True


def test_vqa_ranks_a_list_of_answers():
    for path in (TRAIN / "vqa_ft.yaml", EVAL / "vqa_ft.yaml", *TOY_TASKS.rglob("vqa_ft_toy.yaml")):
        run = loaded(path).run_cfg
        assert (run.task, run.inference_method) == ("mafa_vqa", "rank")
        assert run.num_ans_candidates == 128
    data = loaded(TRAIN / "vqa_ft.yaml").datasets_cfg
    # Training and validation split, and Visual Genome.
    assert list(data) == ["coco_vqa", "vg_vqa_mafa"]
    used = data.coco_vqa.build_info.annotations.train.storage
    assert [file.rsplit("/")[-1] for file in used] == ["vqa_train.json", "vqa_val.json"]
    assert data.vg_vqa_mafa.vis_processor.get("eval") is None


def test_vqa_settings_of_albef():
    """Loss, weights of answers and warm-up of ALBEF's code; LAVIS's by an option of the header."""
    train, evaluate = loaded(TRAIN / "vqa_ft.yaml"), loaded(EVAL / "vqa_ft.yaml")
    model, run = train.model_cfg, train.run_cfg
    assert (model.label_smoothing, model.answer_sep_tokens) == (0.0, 2)
    assert evaluate.model_cfg.answer_sep_tokens == 2
    assert train.datasets_cfg.vg_vqa_mafa.build_info.answer_weight == 0.5
    assert (run.warmup_lr, run.warmup_steps, run.init_lr) == (1e-5, 400, 2e-5)
    assert train.datasets_cfg.coco_vqa.text_processor.train.get("max_words", 30) == 30
    assert evaluate.datasets_cfg.coco_vqa.text_processor.eval.max_words == 50
    lavis = options_in_comments(TRAIN / "vqa_ft.yaml")[-1]
    cfg = loaded(TRAIN / "vqa_ft.yaml", *lavis)
    assert (cfg.model_cfg.label_smoothing, cfg.model_cfg.answer_sep_tokens) == (0.1, 1)
    assert cfg.datasets_cfg.vg_vqa_mafa.build_info.answer_weight == 0.2
    published = options_in_comments(EVAL / "vqa_ft.yaml")[-1]
    assert loaded(EVAL / "vqa_ft.yaml", *published).model_cfg.answer_sep_tokens == 1


def test_entailment_settings():
    for path in (TRAIN, EVAL):
        cfg = loaded(path / "ve_ft.yaml")
        assert (cfg.run_cfg.task, list(cfg.datasets_cfg)) == ("mafa_classification", ["snli_ve"])
        assert (cfg.model_cfg.arch, cfg.model_cfg.num_classes) == ("albef_ve_mafa", 3)
    run = loaded(TRAIN / "ve_ft.yaml").run_cfg
    assert (run.warmup_lr, run.warmup_steps) == (1e-5, 100)  # ALBEF's code


@pytest.mark.parametrize("name", [*FULL, *TOYS])
def test_evaluation_training_and_pre_training_are_chained(name):
    folders = (TOY_TASKS / "train", TOY_TASKS / "eval") if name in TOYS else (TRAIN, EVAL)
    train, evaluate = (loaded(folder / f"{name}.yaml") for folder in folders)
    start = "albef_toy" if name in TOYS else "albef_4m"
    assert checkpoint_of(train.model_cfg) == last(loaded(TRAIN / f"{start}.yaml", "run.job_id=run"))
    kind = "checkpoint_best.pth" if train.run_cfg.valid_splits else "checkpoint_last.pth"
    assert checkpoint_of(evaluate.model_cfg) == last(train, kind)
    for key in ("arch", "model_type", "image_size"):
        assert evaluate.model_cfg[key] == train.model_cfg[key]
    assert evaluate.run_cfg.task == train.run_cfg.task
    if name in TOYS:
        without = ("model.load_pretrained=False", "model.pretrained=null")
        cfg = loaded(folders[0] / f"{name}.yaml", *without)
        assert checkpoint_of(cfg.model_cfg) is None
    else:
        published = options_in_comments(EVAL / f"{name}.yaml")[-1]
        cfg = loaded(EVAL / f"{name}.yaml", *published)
        assert "/LAVIS/models/ALBEF/albef_" in checkpoint_of(cfg.model_cfg)
