"""A run on one's own pairs with `build_info.truth`: the oracle, false negatives, and evaluation."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from runs import INFO, OWN, TINY, TOY, records, run_here


@pytest.fixture
def own(tmp_path):
    """A folder with 32 pictures of 4 colours; a caption names the colour."""
    rng = np.random.default_rng(0)
    for number in range(32):
        pixels = rng.integers(0, 60, (36, 36, 3)).astype(np.uint8)
        pixels[..., : 1 + number % 4] += np.uint8(150)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    rows = [{"image": f"{n}.png", "caption": f"colour {n % 4} ."} for n in range(32)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    (tmp_path / "test.json").write_text(json.dumps(rows[:8]))
    return tmp_path


def settings_of(own, **more):
    files = {f"{INFO}__annotations__{s}__storage": own / f"{s}.json" for s in ("train", "test")}
    return {
        **TOY,
        **files,
        f"{INFO}__images__storage": own,
        f"{INFO}__truth": "same_caption",
        **TINY,
        "run__batch_size_train": 16,
        "run__batch_size_eval": 8,
        "run__max_epoch": 1,
        "run__grit__enabled": False,
        "model__mafa__soft_labels__type": "one_hot",
        "run__test_splits": '["test"]',
        "run__k_test": 0,
        **more,
    }


def test_the_oracle_removes_the_false_negatives_and_evaluation_counts_all_valid_pairs(own):
    run_here(own / "out", OWN, **settings_of(own))
    (epoch,) = records(own / "out", "epoch")
    # 16 pairs of 4 captions: a random negative is valid with about one in five.
    assert epoch["false_negative_rate_i2t"] > 0 and epoch["false_negative_rate_in_itm_i2t"] == 0
    assert epoch["con_d_precision_i2t"] == epoch["con_d_recall_i2t"] == 1
    (figures,) = records(own / "out", "eval")
    assert figures["valid_txt_r1"] >= figures["txt_r1"] and 0 <= figures["txt_map_r"] <= 100


def test_the_oracle_without_truth_says_how_to_give_it(own):
    with pytest.raises(ValueError, match=r"set build_info\.truth of image_text_json"):
        run_here(own / "out", OWN, **settings_of(own, **{f"{INFO}__truth": "null"}))
