"""Runs with a threshold of every sample (GloFND): resumption, other data, exports, other tasks."""

import pytest
import torch
from runs import run_here, same_weights, weights

GLOFND = {
    "model__mafa__con_d": "null",
    "model__mafa__connections__score": "similarity",
    "model__mafa__connections__rule": "global_threshold",
    "model__mafa__connections__action": "drop",
    "model__mafa__connections__top_k": 0,
    "model__mafa__global_threshold__share": 0.2,
    "model__mafa__con_d__arch": None,
    "run__accum_grad_iters": 2,
}
NAMES = ["global_threshold.i2t", "global_threshold.t2i"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_here(folder, **GLOFND)
    return folder


def test_a_stopped_run_resumes_bit_for_bit(uninterrupted, tmp_path):
    run_here(tmp_path, run__max_steps=13, **GLOFND)
    early = weights(tmp_path)
    run_here(tmp_path, run__resume_ckpt_path="auto", **GLOFND)
    whole, cut = weights(uninterrupted), weights(tmp_path)
    assert same_weights(whole, cut)
    for name in NAMES:
        assert len(whole[name]) == 74 and not whole[name].isnan().any()
        assert not torch.equal(early[name], cut[name])


def test_thresholds_are_of_the_run_and_no_weights(uninterrupted, tmp_path, caplog):
    path = uninterrupted / "job" / "checkpoint_last.pth"
    content = torch.load(path, weights_only=True)
    assert content["state_of_run"] == ["global_threshold."]
    # A run on other data starts from the weights, and says nothing of the thresholds.
    start = {"model__load_pretrained": True, "model__pretrained": path, "run__max_steps": 1}
    run_here(tmp_path, **GLOFND, **start, datasets__toy_scenes__build_info__train_size=50)
    assert weights(tmp_path)["global_threshold.i2t"].isnan().sum() == 50 - 8
    assert "global_threshold" not in caplog.text
