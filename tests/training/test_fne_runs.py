"""FNE by the real command: it learns, resumes bit for bit, and trains on own data."""

from __future__ import annotations

import json

import pytest
import torch
from runs import ROOT, records, run_here, weights
from runs import TOY as TOY_KEYS
from test_lavis_builders import write_config

from lavis_mafa.training.lavis_runner import _LinearWarmupDropsLRScheduler

TOY = str(ROOT / "projects/mafa/train/fne_toy.yaml")
# Keys of the small run that FNE does not have.
KEYS_WITHOUT_FNE = {
    f"run__grit__{name}": None for name in ("queue_size", "search_space", "start_epoch")
} | {"model__mafa__con_d__arch": None, "run__k_test": None}
# A plain epoch of 9 steps, then two with a memory that fills up quickly.
SMALL = {
    **KEYS_WITHOUT_FNE,
    "model__plain_epochs": 1,
    "model__memory_size": 20,
    "model__posterior__minimum": 5,
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_here(folder, config=TOY, **SMALL)
    return folder


def test_checkpoint_holds_memory_picker_and_moving_copies(uninterrupted):
    state = weights(uninterrupted)
    assert bool((state["memory.indices"] >= 0).all()) and len(state["memory.images"]) == 20
    assert int(state["picker.positive.count"]) > 0 and int(state["picker.epoch"]) == 2
    copies = [name for name in state if name.startswith("visual_encoder_m.")]
    assert copies and any(
        not torch.equal(state[name], state[name.replace("_m.", ".", 1)]) for name in copies
    )


@pytest.mark.slow
def test_fne_learns_to_retrieve(tmp_path):
    """R@10 is well above chance, which is 10 % among 100 images."""
    run_here(
        tmp_path,
        config=TOY,
        **KEYS_WITHOUT_FNE,
        datasets__toy_scenes__build_info__train_size=1600,
        datasets__toy_scenes__build_info__test_size=100,
        run__test_splits='["test"]',
        run__max_epoch=4,
        run__batch_size_train=32,
        run__warmup_steps=50,
        run__log_freq=50,
    )
    evaluation = records(tmp_path, "eval")[-1]
    assert evaluation["split"] == "test"
    assert (
        min(evaluation["txt_r10"], evaluation["img_r10"]) > 25 and evaluation["valid_txt_r10"] > 35
    )


def test_fne_trains_on_own_pairs_and_lavis_flickr30k(tmp_path, photographs):
    """Real files with several captions per image."""
    train = json.loads((photographs / "train.json").read_text())[:100]
    test = json.loads((photographs / "test.json").read_text())[:12]
    for name in ("flickr30k", "image_text_json"):
        folder = tmp_path / name
        folder.mkdir()
        config = write_config(
            folder,
            photographs,
            {name: train},
            test=test,
            model={"arch": "fne_retrieval", "model_type": "tiny"},
            run={"task": "mafa_retrieval"},
        )
        if name == "image_text_json":
            (folder / "test.json").write_text(json.dumps(test))
            key = f"datasets__{name}__build_info__annotations__test__storage"
            options = {key: folder / "test.json"}
        else:
            options = {}
        run_here(
            folder,
            config=config,
            **{**SMALL, **TOY_KEYS, **options},
            run__max_epoch=2,
            run__test_splits='["test"]',
        )
        steps, evaluation = records(folder, "step"), records(folder, "eval")[-1]
        assert len(steps) == 24 and evaluation["split"] == "test"
        assert 0 <= evaluation["txt_r1"] <= evaluation["txt_r5"] <= evaluation["txt_r10"] <= 100
        assert bool((weights(folder)["memory.indices"] >= 0).all())


def test_learning_rate_drops_after_epochs_5_and_15():
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = _LinearWarmupDropsLRScheduler(optimizer, 25, 0.0, 2e-5, decay_rate=None)
    rates = []
    for epoch in range(25):
        schedule.step(epoch, 7)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([2e-5] * 5 + [2e-6] * 10 + [2e-7] * 10)
