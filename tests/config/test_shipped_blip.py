"""The configs and scripts of BLIP and BLIP-2: hyperparameters of the papers, and consistency."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from conftest import ROOT
from shipped import (
    EVAL,
    FOUR_MILLION,
    SCRIPTS,
    SHIPPED,
    STAGE_1,
    TOY_TASKS,
    TRAIN,
    head_of,
    last,
    loaded,
    options_in_comments,
    step_of,
)

from lavis_mafa.config import ConfigError
from lavis_mafa.models.mafa_model import checkpoint_of


def total_batch(path):
    """Return the pairs per optimizer step on the GPUs named in the header of the config."""
    head, run = head_of(path), loaded(path).run_cfg
    gpus = [re.search(rf"--{name}=(\d+)", head) for name in ("nodes", "nproc_per_node")]
    gpus.append(re.search(r"--gpus-per-node=(\d+)", head))
    number = run.batch_size_train * run.accum_grad_iters
    for found in filter(None, gpus):
        number *= int(found[1])
    assert f"{number:,}" in head
    return number


@pytest.mark.parametrize(
    "name, total",
    [
        ("../blip2_stage1", 384),
        ("blip2_cond_pretrain", 384),
        ("blip2_stage2_opt", 512),
        ("blip2_stage2_t5", 512),
        ("blip2_retrieval_ft", 112),
        ("blip2_retrieval_ft_flickr", 112),
        ("blip2_caption_ft", 128),
        ("blip_4m", 1200),
    ],
)
@pytest.mark.downstream
def test_total_batches(name, total):
    """G.7 and G.8; the batch size of BLIP is LAVIS's."""
    assert total_batch((TRAIN / f"{name}.yaml").resolve()) == total


def test_blip2_stage_1_has_the_hyperparameters_of_the_paper():
    cfg = loaded(STAGE_1)
    step, run = step_of(cfg), cfg.run_cfg
    assert (step.soft_labels.type, step.soft_labels.alpha) == ("smoothed", 0.2)
    assert step.negatives == "hardest" and cfg.model_cfg.negative_all_rank
    rule = step.connections
    assert (rule.low, rule.high, rule.resample) == (0.5, 0.8, False)
    assert set(rule.use_in) == {"itc", "itm"}
    assert cfg.model_cfg.mafa.con_d.arch == "blip2_mafa"
    assert run.grit.enabled and run.grit.search_space == 3840 == 10 * total_batch(STAGE_1)
    assert (cfg.model_cfg.num_query_token, cfg.model_cfg.vit_model) == (32, "eva_clip_g")
    assert list(cfg.datasets_cfg) == FOUR_MILLION
    assert (run.init_lr, run.min_lr, run.warmup_lr, run.warmup_steps) == (1e-4, 1e-5, 1e-6, 5000)
    assert (run.weight_decay, run.max_epoch) == (0.05, 10)


def test_con_d_of_blip2_differs_only_in_mafa():
    """G.7: BLIP-2's own stage 1, everything else as in MAFA's."""
    cfg, theirs = loaded(TRAIN / "blip2_cond_pretrain.yaml"), loaded(STAGE_1)
    step = step_of(cfg)
    assert cfg.model_cfg.mafa.con_d is None and not cfg.run_cfg.grit.enabled
    assert (step.negatives, step.soft_labels.type) == ("sampled", "one_hot")
    assert step.soft_labels.label_smoothing == 0.1
    mine, other = cfg.to_dict(), theirs.to_dict()
    for plain in (mine, other):
        plain["model"].pop("mafa")
        for name in ("output_dir", "job_id", "grit"):
            plain["run"].pop(name)
    assert mine == other


@pytest.mark.downstream
def test_blip2_configs_use_each_others_checkpoints():
    pretrain = loaded(TRAIN / "blip2_cond_pretrain.yaml")
    stage_1 = loaded(STAGE_1, "run.job_id=run")
    for name in ("blip2_retrieval_ft", "blip2_retrieval_ft_flickr"):
        tuned = loaded(TRAIN / f"{name}.yaml").model_cfg
        assert tuned.pretrained == last(pretrain)
        assert f"model.pretrained={last(stage_1)}" in head_of(TRAIN / f"{name}.yaml")
    con_d = last(loaded(TRAIN / "blip2_retrieval_ft.yaml"))
    assert f"model.mafa.con_d.checkpoint={con_d}" in head_of(STAGE_1)
    for name in ("blip2_stage2_opt", "blip2_stage2_t5"):
        assert loaded(TRAIN / f"{name}.yaml").model_cfg.pretrained == last(stage_1)
    stage_2 = loaded(TRAIN / "blip2_stage2_opt.yaml")
    assert loaded(TRAIN / "blip2_caption_ft.yaml").model_cfg.pretrained == last(stage_2)
    toy = loaded(TOY_TASKS / "train/blip2_stage2_toy.yaml")
    assert toy.model_cfg.pretrained == last(loaded(TRAIN / "blip2_toy.yaml", "run.job_id=run"))
    for name in ("caption_toy", "vqa_toy"):
        model = loaded(TOY_TASKS / f"eval/{name}.yaml").model_cfg
        assert (model.finetuned, model.vit_weights) == (last(toy), toy.model_cfg.pretrained)
        assert model.load_finetuned


@pytest.mark.parametrize("name", ["blip2_retrieval_ft", "blip2_retrieval_ft_flickr"])
def test_blip2_retrieval_fine_tuning(name):
    cfg = loaded(TRAIN / f"{name}.yaml")
    model, run, step = cfg.model_cfg, cfg.run_cfg, step_of(cfg)
    assert (model.arch, model.load_pretrained, model.load_finetuned) == ("blip2_mafa", True, False)
    assert (model.image_size, model.freeze_vit, model.vit_precision) == (364, False, "fp32")
    assert (step.same_image, step.negatives) == ("positive", "sampled")
    assert (step.soft_labels.type, step.soft_labels.label_smoothing) == ("one_hot", 0.1)
    assert {k: w for k, w in step.loss_weights.items() if w} == {
        "itc": 1,
        "itm": 1,
        "lm": 1,
    } and model.mafa.con_d is None
    assert (run.task, run.grit.enabled, run.k_test) == ("mafa_retrieval", False, 128)
    assert (run.init_lr, run.min_lr, run.warmup_lr, run.warmup_steps) == (1e-5, 0, 1e-8, 1000)
    assert (run.weight_decay, run.max_epoch) == (0.05, 5)
    assert not run.use_dist_eval_sampler


@pytest.mark.parametrize("name, arch", [("opt", "blip2_opt_mafa"), ("t5", "blip2_t5_mafa")])
@pytest.mark.downstream
def test_blip2_stage_2(name, arch):
    """G.7: the same pairs, without GRIT and MAFA."""
    cfg = loaded(TRAIN / f"blip2_stage2_{name}.yaml")
    run = cfg.run_cfg
    assert (cfg.model_cfg.arch, cfg.model_cfg.freeze_vit) == (arch, True)
    assert cfg.model_cfg.load_pretrained and not cfg.model_cfg.load_finetuned
    assert (run.task, run.grit.enabled) == ("image_text_pretrain", False)
    assert (run.init_lr, run.min_lr, run.warmup_lr, run.warmup_steps) == (1e-4, 1e-5, 1e-6, 2000)
    assert (run.weight_decay, run.max_epoch, run.amp, run.amp_dtype) == (0.05, 10, True, "fp16")
    stage_1 = loaded(STAGE_1).to_dict()["datasets"]
    assert cfg.to_dict()["datasets"] == stage_1


@pytest.mark.downstream
def test_blip2_caption_fine_tuning():
    """G.8: five epochs, Q-Former and image encoder are trained."""
    cfg = loaded(TRAIN / "blip2_caption_ft.yaml")
    model, run = cfg.model_cfg, cfg.run_cfg
    assert (model.arch, model.opt_model) == ("blip2_opt_mafa", "facebook/opt-2.7b")
    assert (model.prompt, model.freeze_vit, model.image_size) == ("a photo of", False, 364)
    assert (model.load_pretrained, model.load_finetuned) == (True, False)
    text = cfg.datasets_cfg.coco_caption.text_processor.train
    assert (text.name, text.prompt) == ("blip_caption", "a photo of ")
    assert (run.task, run.max_epoch, run.num_beams) == ("mafa_captioning", 5, 5)
    assert (run.init_lr, run.warmup_lr, run.warmup_steps) == (1e-5, 1e-8, 1000)


def test_mafa_on_blip():
    cfg = loaded(TRAIN / "blip_4m.yaml")
    model, run, step = cfg.model_cfg, cfg.run_cfg, step_of(cfg)
    assert (model.arch, model.model_type, model.image_size) == ("blip_mafa", "base", 224)
    assert (step.soft_labels.type, step.soft_labels.alpha) == ("smoothed", 0.5)
    assert step.connections.resample and set(step.connections.use_in) == {"itc", "itm", "lm"}
    con_d = model.mafa.con_d
    assert (con_d.arch, con_d.model_type, con_d.checkpoint) == ("blip_retrieval", "coco", None)
    assert list(cfg.datasets_cfg) == FOUR_MILLION
    assert (run.init_lr, run.weight_decay, run.max_epoch) == (3e-4, 0.05, 20)


# Evaluation


@pytest.mark.parametrize(
    "name, task, split",
    [
        ("vqav2_zeroshot", "mafa_vqa", "val"),
        ("okvqa_zeroshot", "mafa_vqa", "test"),
        ("gqa_zeroshot", "mafa_gqa", "val"),
    ],
)
@pytest.mark.downstream
def test_zero_shot_vqa_settings(name, task, split):
    """G.7: prompt, beams, length penalty."""
    run = loaded(EVAL / f"{name}.yaml").run_cfg
    assert (run.task, list(run.test_splits)) == (task, [split])
    assert run.prompt == "Question: {} Answer:" and run.inference_method == "generate"
    assert (run.num_beams, run.length_penalty, run.max_len, run.min_len) == (5, -1, 10, 1)


@pytest.mark.parametrize("name", ["vqav2_zeroshot", "gqa_zeroshot"])
@pytest.mark.parametrize("prompt", ["Question: Answer:", "{} or {}?", "Q {q} {}", "Q {0}", "{ {}"])
@pytest.mark.downstream
def test_prompts_without_a_placeholder_are_rejected(name, prompt):
    with pytest.raises(ConfigError, match="run.prompt: .*needs exactly one {}"):
        loaded(EVAL / f"{name}.yaml", f"run.prompt='{prompt}'")
    assert loaded(EVAL / f"{name}.yaml", "run.prompt=''").run_cfg.prompt == ""


@pytest.mark.parametrize("name", ["vqav2_zeroshot", "okvqa_zeroshot", "gqa_zeroshot"])
@pytest.mark.downstream
def test_t5_has_its_own_prompt(name):
    t5_options = [
        options for options in options_in_comments(EVAL / f"{name}.yaml") if "t5" in options[0]
    ]
    assert len(t5_options) == 1
    cfg = loaded(EVAL / f"{name}.yaml", *t5_options[0])
    assert cfg.run_cfg.prompt == "Question: {} Short answer:"
    assert (cfg.model_cfg.arch, cfg.model_cfg.image_size) == ("blip2_t5_mafa", 224)
    assert cfg.model_cfg.apply_lemmatizer is (name == "okvqa_zeroshot")


@pytest.mark.downstream
def test_gqa_is_evaluated_on_test_dev():
    annotations = loaded(EVAL / "gqa_zeroshot.yaml").datasets_cfg.gqa.build_info.annotations
    assert "testdev" in annotations.val.storage[0]


@pytest.mark.parametrize(
    "name, size, split",
    [
        ("caption_coco_zeroshot", 224, "test"),
        ("caption_coco", 364, "test"),
        ("caption_nocaps", 364, "val"),
    ],
)
@pytest.mark.downstream
def test_captioning_settings(name, size, split):
    cfg = loaded(EVAL / f"{name}.yaml")
    run = cfg.run_cfg
    assert cfg.model_cfg.prompt == "a photo of" and cfg.model_cfg.image_size == size
    assert (run.task, list(run.test_splits)) == ("mafa_captioning", [split])
    assert (run.num_beams, run.max_len, run.min_len) == (5, 30, 8)
    assert ("annotation_file" in run) is (name == "caption_nocaps")


@pytest.mark.parametrize("name", ["retrieval_coco", "retrieval_flickr"])
def test_retrieval_with_blip2(name):
    cfg = loaded(EVAL / f"{name}.yaml")
    assert (cfg.model_cfg.arch, cfg.model_cfg.image_size) == ("blip2_mafa", 364)
    assert (cfg.run_cfg.task, cfg.run_cfg.k_test) == ("mafa_retrieval", 128)
    assert not cfg.run_cfg.use_dist_eval_sampler


PUBLISHED = {
    "vqav2_zeroshot": ("blip2_pretrained_opt2.7b.pth", "blip2_stage2_opt"),
    "okvqa_zeroshot": ("blip2_pretrained_opt2.7b.pth", "blip2_stage2_opt"),
    "gqa_zeroshot": ("blip2_pretrained_opt2.7b.pth", "blip2_stage2_opt"),
    "caption_coco_zeroshot": ("blip2_pretrained_opt2.7b.pth", "blip2_stage2_opt"),
    "caption_coco": ("blip2_caption_opt2.7b.pth", "blip2_caption_ft"),
    "caption_nocaps": ("blip2_caption_opt2.7b.pth", "blip2_caption_ft"),
    "retrieval_coco": ("blip2_finetune_coco.pth", "blip2_retrieval_ft"),
    "retrieval_flickr": ("blip2_finetune_coco.pth", "blip2_retrieval_ft"),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.downstream
def test_published_weights_by_default_and_own_weights_by_option(name):
    file, training = PUBLISHED[name]
    path = EVAL / f"{name}.yaml"
    assert checkpoint_of(loaded(path).model_cfg).endswith(f"/BLIP2/{file}")
    trained = loaded(TRAIN / f"{training}.yaml")
    # The best checkpoint if a split is validated.
    kind = "checkpoint_best.pth" if trained.run_cfg.valid_splits else "checkpoint_last.pth"
    own = f"model.finetuned={last(trained, kind)}"
    options = [options for options in options_in_comments(path) if own in options]
    assert len(options) == 1
    assert checkpoint_of(loaded(path, *options[0]).model_cfg) == own.partition("=")[2]


# Scripts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_valid_bash(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


EVAL_SCRIPT = str(ROOT / "run_scripts/mafa/eval.sh")
EVALUATIONS = [path for path in SHIPPED if path.parent == EVAL]


@pytest.mark.downstream
def test_evaluation_script_lists_the_evaluations():
    listed = subprocess.run([EVAL_SCRIPT, "--list"], check=True, capture_output=True, text=True)
    assert sorted(listed.stdout.split()) == sorted(path.stem for path in EVALUATIONS)
    unknown = subprocess.run([EVAL_SCRIPT, "nothing"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "'nothing'" in unknown.stderr


@pytest.mark.parametrize("path", EVALUATIONS, ids=lambda path: path.stem)
def test_command_of_the_evaluation_script(path, tmp_path):
    """From any folder, with all options passed on unchanged."""
    stub = tmp_path / "python"
    stub.write_text('#!/usr/bin/env bash\n[ "$1" = -c ] && echo 3 || printf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "GPUS"}
    options = ["--dry-run", "--options", "run.seed=7", 'run.prompt="a {} b"']
    process = subprocess.run(
        [EVAL_SCRIPT, path.stem, *options],
        cwd=tmp_path,
        env={**environment, "PYTHON": str(stub)},
        check=True,
        capture_output=True,
        text=True,
    )
    launcher, rest = process.stdout.splitlines()[:4], process.stdout.splitlines()[4:]
    processes = 1 if loaded(path).run_cfg.device == "cpu" else 3
    assert launcher[:3] == ["-m", "torch.distributed.run", "--standalone"]
    assert launcher[3] == f"--nproc_per_node={processes}"
    assert rest == [str(ROOT / "evaluate.py"), "--cfg-path", str(path), *options]
