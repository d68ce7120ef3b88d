"""Runs whose hard negatives are picked by a frozen encoder, without ITC (GRIT-VLP, Table 1)."""

from __future__ import annotations

import pytest
import torch
from conftest import mini_batch
from runs import dry_run, resume_bit_for_bit, run_here

from lavis_mafa import load_model


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    torch.manual_seed(23)
    path = tmp_path_factory.mktemp("encoder") / "itc.pth"
    torch.save({"model": load_model("albef_mafa", "tiny").state_dict()}, path)
    chosen = {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": path}
    given = {f"model__mafa__negatives_encoder__{key}": value for key, value in chosen.items()}
    return {
        **given,
        "model__mafa__loss_weights__itc": 0.0,
        "model__mafa__soft_labels__type": "one_hot",
        "model__mafa__con_d__arch": None,
    }


def test_run_with_a_frozen_encoder_resumes_bit_for_bit(tmp_path, changes):
    """With GRIT, whose order follows the frozen encoder."""
    _, whole, _ = resume_bit_for_bit(tmp_path, 13, **changes)
    assert whole.keys() == load_model("albef_mafa", "tiny").state_dict().keys()


def test_dry_run_says_what_the_frozen_encoder_costs(tmp_path, changes, capsys):
    output = dry_run(tmp_path, capsys, **changes)
    assert "; negatives_encoder: " in output
    assert "Con-D: " not in output and "'loss_itm'" in output and "'loss_itc'" not in output


def test_a_separate_pass_collects_the_features_of_the_frozen_encoder(tmp_path, changes):
    """`run.grit.naive`: those that the step would have collected."""
    runner = run_here(tmp_path, **changes, run__grit__naive=True, run__max_steps=1)
    samples, encoder = mini_batch(runner.train_set, range(6)), runner._model.negatives_encoder
    expected = encoder.compare(samples)
    vectors = runner._vectors_of(runner._model, samples)
    assert torch.equal(vectors[0], expected.image_vectors)
    assert torch.equal(vectors[1], expected.text_vectors)
