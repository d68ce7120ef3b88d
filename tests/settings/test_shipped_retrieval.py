"""The configs of ALBEF's fine-tuning for retrieval (MAFA F)."""

from __future__ import annotations

import pytest
from lavis.common.registry import registry
from omegaconf import OmegaConf
from shipped import EVAL, TRAIN, last, loaded, options_in_comments


@pytest.mark.parametrize("name, k", [("coco", 256), ("flickr", 128)])
def test_retrieval_settings(name, k):
    cfg = loaded(TRAIN / f"retrieval_ft_{name}.yaml")
    model = cfg.model_cfg
    assert (model.arch, model.model_type, model.image_size) == ("albef_mafa", "base", 384)
    assert (model.mafa.soft_labels.type, model.alpha) == ("momentum", 0.0)
    assert (model.mafa.negatives, model.mafa.loss_weights.lm) == ("sampled", 0.0)
    assert model.mafa.con_d is None and not cfg.run_cfg.grit.enabled
    # The queue size of LAVIS's default, so that its albef_retrieval loads the result.
    theirs = registry.get_model_class("albef_retrieval").default_config_path(name)
    assert cfg.model_cfg.queue_size == OmegaConf.load(theirs).model.queue_size == 256 * 256
    shown = [cfg, *(loaded(EVAL / f"retrieval_{kind}_{name}.yaml") for kind in ("ft", "zeroshot"))]
    for one in shown:
        assert (one.run_cfg.task, one.run_cfg.k_test) == ("mafa_retrieval", k)
        assert one.run_cfg.use_dist_eval_sampler is False
        assert list(one.datasets_cfg) == list(cfg.datasets_cfg)


def test_zero_shot_retrieval_settings():
    """Flickr30k by the model fine-tuned on COCO, COCO by the pre-trained model."""
    coco, flickr = (loaded(EVAL / f"retrieval_zeroshot_{name}.yaml") for name in ("coco", "flickr"))
    trained = loaded(TRAIN / "retrieval_ft_coco.yaml")
    assert flickr.model_cfg.finetuned == last(trained, "checkpoint_best.pth")
    assert flickr.model_cfg.arch == trained.model_cfg.arch and flickr.model_cfg.image_size == 384
    pretrained = loaded(TRAIN / "albef_4m.yaml", "run.job_id=run")
    assert coco.model_cfg.finetuned == last(pretrained)
    assert (coco.model_cfg.arch, coco.model_cfg.image_size) == ("albef_mafa", 256)
    own = options_in_comments(EVAL / "retrieval_zeroshot_flickr.yaml")[-1]
    model = loaded(EVAL / "retrieval_zeroshot_flickr.yaml", *own).model_cfg
    assert (model.arch, model.finetuned, model.image_size) == ("albef_mafa", last(pretrained), 256)
