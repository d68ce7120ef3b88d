"""Measuring trained models on the toy world."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from lavis_mafa import load_model
from research import toy_measures as measuring

SMALL = (
    "datasets.toy_scenes.build_info.train_size=16",
    "datasets.toy_scenes.build_info.test_size=6",
)


@dataclass
class Run:
    folder: Path
    options: tuple[str, ...]
    config: str = str(ROOT / "projects/mafa/train/albef_toy.yaml")

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint_last.pth"


@pytest.mark.parametrize("by", ["sum", "itm"])
def test_measuring_reranks_as_the_config_of_the_run_says(tmp_path, monkeypatch, by):
    """With ITM alone, the similarities of ITC must not enter the scores of the candidates."""
    torch.manual_seed(0)
    run = Run(tmp_path, (*SMALL, f"run.rerank_by={by}"))
    recorded = {"model": {"arch": "albef_mafa", "model_type": "tiny"}}
    weights = load_model("albef_mafa", "tiny").state_dict()
    torch.save({"model": weights, "config": recorded}, run.checkpoint)
    test = measuring.toy_world({"train_size": 16, "test_size": 6}, "dense")["test"]
    one = measuring.Examined.of(run, measuring._loader(test))
    images, texts = (np.arange(6).repeat(len(test.text)), np.tile(np.arange(len(test.text)), 6))
    with torch.inference_mode():
        pairs = torch.from_numpy(images), torch.from_numpy(texts)
        logits = measuring.ManyPairs(one.backbone).match(one.images, one.texts, *pairs)
    seen, rerank = [], measuring.rerank

    def recording(*args, **keywords):
        seen.extend(found := rerank(*args, **keywords))
        return found

    monkeypatch.setattr(measuring, "rerank", recording)
    figures = one.retrieval(test, test.truth_matrix(), len(test.text))
    logits = logits.reshape(6, -1, 2).numpy()
    expected = logits[..., 1] + (one.similarity if by == "sum" else 0.0)
    by_odds = logits[..., 1] - logits[..., 0] + one.similarity / float(one.backbone.temperature)
    for found, scores, prefix in zip(seen, (by_odds, expected), ("odds_", ""), strict=True):
        np.testing.assert_allclose(found[0], scores, rtol=0, atol=1e-4)
        first = [test.txt2img[text] for text in scores.argmax(1)]
        assert figures[f"{prefix}txt_r1"] == pytest.approx(100 * np.mean(first == np.arange(6)))
