"""Settings that do not fit the data cause a warning in the dry run and at the start of training."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from runs import CONFIG, ROOT, options

from lavis_mafa.training.session import check_only

# 74 pairs in mini-batches of 8: 9 steps an epoch, 3 epochs, 27 steps.


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"run__warmup_steps": 27}, "run.warmup_steps: 27 is not below the 27 steps"),
        ({"run__warmup_steps": 26}, None),
        ({"run__warmup_steps": 1000, "run__warmup_share": 0.5}, None),
        (
            {"run__grit__regions": True, "run__grit__queue_size": 72},
            "one queue holds all 72 pairs of a rank",
        ),
        ({"run__grit__regions": True, "run__grit__queue_size": 71}, None),
        (
            {"model__max_txt_len": 4},
            "WARNING: of 8 captions, 100% are cut: the model reads 4 tokens",
        ),
    ],
)
def test_settings_that_do_not_fit(tmp_path, capsys, changes, message):
    check_only(CONFIG, options(tmp_path, **changes))
    text = capsys.readouterr().out
    if message:
        assert message in text and "WARNING" in text, text
    else:
        assert "WARNING" not in text, text


@pytest.fixture(scope="module")
def two_hundred_pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    rows = []
    for number in range(200):
        name, pixels = f"{number}.png", rng.integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
        rows.append({"image": name, "caption": f"a red circle and a blue square {number}"})
    for split, part in {"train": rows, "val": rows[:20], "test": rows[:20]}.items():
        (folder / f"{split}.json").write_text(json.dumps(part))
    return folder


@pytest.mark.parametrize(
    "name, more",
    [
        ("albef_own_data", {"model.model_type": "tiny"}),
        ("cond_own_data", {"model.model_type": "tiny"}),
        ("blip2_own_data", {"model.model_type": "tiny", "model.freeze_vit": "False"}),
        ("albef_small_own_data", {"model.model_type": "tiny"}),
    ],
)
def test_own_data_configs_fit_small_data(two_hundred_pairs, tmp_path, capsys, name, more):
    info = "datasets.image_text_json.build_info"
    given = {
        **more,
        "model.load_pretrained": "False",
        "model.pretrained": "null",
        "model.image_size": 32,
        "run.device": "cpu",
        "run.amp": "False",
        "run.num_workers": 0,
        "run.output_dir": tmp_path,
        f"{info}.images.storage": two_hundred_pairs,
        **{
            f"{info}.annotations.{split}.storage": two_hundred_pairs / f"{split}.json"
            for split in ("train", "val", "test")
        },
    }
    config = str(ROOT / f"projects/mafa/train/{name}.yaml")
    check_only(config, [f"{key}={value}" for key, value in given.items()])
    assert "WARNING" not in capsys.readouterr().out
