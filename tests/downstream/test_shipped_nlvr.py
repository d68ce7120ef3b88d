"""The configs of text assignment and NLVR2 (MAFA F): hyperparameters and their order."""

from __future__ import annotations

import pytest
from shipped import EVAL, FOUR_MILLION, TOY_TASKS, TRAIN, head_of, last, loaded, options_in_comments

from lavis_mafa.config import ConfigError
from lavis_mafa.models.mafa_model import checkpoint_of


def test_text_assignment_settings_of_the_paper():
    cfg = loaded(TRAIN / "nlvr_pretrain.yaml")
    model, run = cfg.model_cfg, cfg.run_cfg
    assert (run.task, run.max_epoch, run.grit.enabled) == ("mafa_text_assignment", 1, False)
    assert 4 * run.batch_size_train * run.accum_grad_iters == 256
    assert "--nproc_per_node=4" in head_of(TRAIN / "nlvr_pretrain.yaml")
    assert (run.init_lr, run.weight_decay) == (2e-5, 0.02)
    assert (model.image_size, model.ta_negatives) == (256, "similar")
    assert list(cfg.datasets_cfg) == FOUR_MILLION
    assert cfg.to_dict()["datasets"] == loaded(TRAIN / "albef_4m.yaml").to_dict()["datasets"]


def test_fine_tuning_settings_of_the_paper():
    cfg = loaded(TRAIN / "nlvr_ft.yaml")
    model, run = cfg.model_cfg, cfg.run_cfg
    assert (run.task, run.max_epoch) == ("mafa_classification", 10)
    assert 4 * run.batch_size_train * run.accum_grad_iters == 64
    assert "--nproc_per_node=4" in head_of(TRAIN / "nlvr_ft.yaml")
    assert (run.init_lr, run.weight_decay) == (2e-5, 0.02)
    assert (run.warmup_lr, run.warmup_steps) == (1e-5, 100)  # ALBEF's code
    assert (model.image_size, model.use_distill, model.num_classes) == (384, False, 2)
    assert list(run.test_splits) == ["val", "test"]
    assert cfg.datasets_cfg.nlvr_mafa.build_info.exchange_images is False
    processors = cfg.datasets_cfg.nlvr_mafa.vis_processor
    assert processors.train.image_size == processors.eval.image_size == 384


@pytest.mark.parametrize(
    "before, assign, tune",
    [("albef_4m", "nlvr_pretrain", "nlvr_ft"), ("albef_toy", "nlvr_pretrain_toy", "nlvr_toy")],
)
def test_each_config_starts_from_the_previous_checkpoint(before, assign, tune):
    begin = last(loaded(TRAIN / f"{before}.yaml", "run.job_id=run"))
    folder = TOY_TASKS / "train" if tune.endswith("toy") else TRAIN
    second, third = (loaded(folder / f"{name}.yaml") for name in (assign, tune))
    assert checkpoint_of(second.model_cfg) == begin
    assert checkpoint_of(third.model_cfg) == last(second)
    # The variant without text assignment.
    assert [f"model.pretrained={begin}"] in options_in_comments(folder / f"{tune}.yaml")


def test_evaluation_of_published_and_own_weights():
    path = EVAL / "nlvr.yaml"
    cfg = loaded(path)
    assert checkpoint_of(cfg.model_cfg).endswith("/ALBEF/albef_nlvr_lavis.pt")
    assert list(cfg.run_cfg.test_splits) == ["val", "test"] and cfg.run_cfg.use_dist_eval_sampler
    annotations = cfg.datasets_cfg.nlvr_mafa.build_info.annotations
    assert annotations.test.url != annotations.val.url
    own = last(loaded(TRAIN / "nlvr_ft.yaml"), "checkpoint_best.pth")
    images = "datasets.nlvr_mafa.build_info.images.storage=IMAGES"
    texts = "datasets.nlvr_mafa.text_processor.eval.name=albef_caption"  # as in training
    assert options_in_comments(path) == [[images], [f"model.finetuned={own}", texts]]


@pytest.mark.parametrize("name", ["nlvr_pretrain", "nlvr_ft"])
def test_keys_that_these_models_ignore_are_rejected(name):
    for option, key in (
        ("model.mafa.negatives=hardest", "model.mafa"),
        ("model.queue_size=8", "model.queue_size"),
        ("run.grit.enabled=True", "run.grit.enabled"),
    ):
        with pytest.raises(ConfigError, match=f"\n{key}: "):
            loaded(TRAIN / f"{name}.yaml", option)
