"""Check the training-step benchmarks at tiny sizes: both sides do the same work."""

from __future__ import annotations

import pytest
import torch

from research.benchmarks import step_models, steps
from research.benchmarks.harness import Sizes

QUICK = Sizes("quick", repeats=1)


def test_first_quarter_of_the_pairs_matches():
    pairs = torch.arange(16)
    verdicts = step_models.first_quarter(pairs, pairs, torch.rand(16))
    assert verdicts.sum() == 4 and verdicts.dtype == torch.float32
    second_half = step_models.verdicts_by_pair(pairs[8:], pairs[:8], torch.rand(8))
    assert torch.equal(
        step_models.verdicts_by_pair(pairs, pairs.roll(8), torch.rand(16))[8:], second_half
    )
    assert 0 < second_half.sum() < 8


def test_albef_rows_and_targets(tmp_path):
    rows = list(steps.albef_rows(QUICK, tmp_path))
    grit_targets, targets = ["<= 1.10", "", "<= 1.15", "", "", ""], ["<= 0.72", "<= 0.25"]
    assert [row.target for row in rows] == grit_targets + targets
    assert all("; 0 of 16 anchors" in rows[index].note for index in (0, 1, 3))
    for row in (rows[2], rows[4]):
        assert any(f"; {found} of 16 anchors" in row.note for found in (3, 4, 5, 6))


def test_rows_against_lavis_and_targets(tmp_path):
    with step_models.lavis_can_run():
        rows = [*steps.lavis_albef_rows(QUICK, tmp_path), *steps.blip2_rows(QUICK, tmp_path)]
    assert [row.target for row in rows] == ["<= 0.85", "<= 0.85", "<= 1.05"]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("family", [step_models.LavisAlbef, step_models.LavisBlip2])
def test_lavis_side_uses_no_module_of_the_package(tmp_path, family):
    config = {step_models.LavisAlbef: step_models.albef_config}.get(
        family, step_models.blip2_config
    )
    model = family(config(QUICK, tmp_path))
    assert not {type(m) for m in model.modules() if "lavis_mafa" in type(m).__module__}


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_full_blip2_sizes_are_equal_on_both_sides(tmp_path, monkeypatch, name):
    """Compare weight shapes of ViT-L and ViT-g, built without memory for their weights."""
    linspace = torch.linspace  # LAVIS reads its values
    monkeypatch.setattr(torch, "linspace", lambda *a, **k: linspace(*a, **{**k, "device": "cpu"}))
    cfg = step_models.blip2_config(Sizes(name), tmp_path, vit_precision="fp32")
    with torch.device("meta"):
        theirs = step_models.LavisBlip2(cfg).state_dict()
        ours = steps.Blip2Mafa.from_config(cfg).state_dict()
    assert {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in ours.items()}
    assert sum(v.numel() for v in theirs.values()) > 400e6


def test_different_losses_are_rejected(tmp_path):
    cfg = step_models.albef_config(QUICK, tmp_path)
    samples = step_models.mini_batch(8, cfg, "cpu")
    model = steps.AlbefMafa.from_config(cfg)

    def forward(settings):
        return lambda: steps.run_step(model.backbone, samples, settings)

    steps.require_equal_losses("itself", model, forward(steps.MAFA), model, forward(steps.MAFA))
    with pytest.raises(AssertionError, match="not the same work as another"):
        steps.require_equal_losses(
            "another", model, forward(steps.MAFA), model, forward(steps.GRIT_VLP)
        )
    assert model.training


def test_vocabulary_has_the_size_of_berts(tmp_path):
    cfg = step_models.albef_config(Sizes("cpu"), tmp_path)
    tokenizer = step_models.build_tokenizer(cfg.tokenizer)
    assert len(tokenizer) == 30522
    captions = step_models.mini_batch(4, cfg, "cpu")["text_input"]
    for caption in captions:
        assert 5 <= len(caption.split()) <= 33
        ids = tokenizer(caption).input_ids
        assert len(ids) == len(caption.split()) + 2 and tokenizer.unk_token_id not in ids
