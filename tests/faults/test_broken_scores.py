"""A model that computes NaN is not evaluated, and one that scores all pairs alike is at chance."""

from __future__ import annotations

import pytest
import torch
from lavis.common.registry import registry
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from lavis_mafa.tasks.mafa_retrieval import MafaRetrievalTask


@pytest.fixture
def evaluated(toy, tmp_path, monkeypatch):
    """``evaluated(model, k_test)``: its figures on the toy world's test images."""
    monkeypatch.setitem(registry.mapping["paths"], "output_dir", str(tmp_path))

    def figures(model, k_test):
        task = MafaRetrievalTask(cfg=OmegaConf.create({"k_test": k_test}))
        loader = DataLoader(toy["test"], batch_size=20, collate_fn=toy["test"].collater)
        return task.evaluation(model.eval(), loader)

    return figures


@pytest.mark.parametrize("k_test", [0, 4])
@pytest.mark.parametrize("part", ["one image", "all"])
def test_nan_stops_an_evaluation(tiny, evaluated, tmp_path, k_test, part):
    if part == "all":
        with torch.no_grad():
            tiny.vision_proj.weight[0, 0] = torch.nan
    else:
        # The features of the first image only: the others' scores are as usual.
        before, calls = tiny.backbone.encode_images, []

        def encode(images):
            found = before(images)
            if not calls:
                found.features[0] = torch.nan
            calls.append(1)
            return found

        tiny.backbone.encode_images = encode
    with pytest.raises(
        ValueError, match="retrieval scores are NaN or infinite.*weights or features"
    ):
        evaluated(tiny, k_test)
    assert not (tmp_path / "evaluate.txt").exists()
