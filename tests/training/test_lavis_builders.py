"""LAVIS's own data sets, models and tasks, unchanged, in our runner."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml
from runs import PROCESSORS, TOY, put_small_lavis, records, run_here, weights

from lavis_mafa.training import RunnerMafa

WITH_FILE_LISTS = ("sbu_caption",)  # LAVIS's default is a list of files for these builders
# Builders with val and test splits.
WITH_EVALUATION = ("coco_caption", "coco_retrieval", "flickr30k")
UNUSED_TOY_KEYS = {**TOY, "model__mafa__con_d__arch": None}
# The photographs and captions that each builder reads; they overlap.
PHOTOS_AND_CAPTIONS = {
    "coco_caption": (range(0, 4), range(5)),
    "vg_caption": (range(1, 11), range(1)),
    "sbu_caption": (range(5, 17), range(2)),
}


@pytest.fixture(scope="module")
def captions_by_path(photographs):
    """The captions of every photograph, by its path."""
    captions: dict[str, list[str]] = {}
    for row in json.loads((photographs / "train.json").read_text()):
        captions.setdefault(row["image"], []).append(row["caption"])
    return captions


def rows_of(name, captions_by_path):
    photos, caption_numbers = PHOTOS_AND_CAPTIONS[name]
    names = sorted(captions_by_path)
    return [
        {
            "image": names[photo],
            "caption": captions_by_path[names[photo]][caption_number],
            "image_id": f"{photo}",
        }
        for photo in photos
        for caption_number in caption_numbers
    ]


def write_config(folder, images, data, model=None, run=None, test=()):
    """Write a config and annotation files ``{builder: rows}`` for LAVIS's builders; return its
    path.
    """
    datasets = {}
    for name, rows in data.items():
        splits = {"train": rows, **({"val": test, "test": test} if name in WITH_EVALUATION else {})}
        annotations = {}
        for split, content in splits.items():
            path = folder / f"{name}_{split}.json"
            path.write_text(json.dumps(list(content)))
            storage = [str(path)] if name in WITH_FILE_LISTS else str(path)
            annotations[split] = {"url": storage, "storage": storage}
        datasets[name] = {
            **PROCESSORS,
            "build_info": {"annotations": annotations, "images": {"storage": str(images)}},
        }
    config = {
        "model": model or {"arch": "albef_mafa", "model_type": "tiny"},
        "datasets": datasets,
        "run": {
            "task": "mafa_pretrain",
            "runner": "runner_mafa",
            "lr_sched": "linear_warmup_cosine_lr",
            "init_lr": 1e-3,
            "min_lr": 1e-4,
            "weight_decay": 0.02,
            "batch_size_eval": 8,
            "num_workers": 0,
            "seed": 42,
            "device": "cpu",
            "train_splits": ["train"],
            **(run or {}),
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return str(folder / "config.yaml")


@pytest.fixture
def recorded_steps(monkeypatch):
    """Epoch, samples and output of every training step."""
    steps = []
    record_step = RunnerMafa._record_step

    def record_call(self, output, losses, samples, bar):
        steps.append((samples["epoch"], samples, output))
        record_step(self, output, losses, samples, bar)

    monkeypatch.setattr(RunnerMafa, "_record_step", record_call)
    return steps


def train(folder, photographs, captions_by_path, names, test=(), **changes):
    data = {name: rows_of(name, captions_by_path) for name in names}
    config = write_config(folder, photographs, data, test=test)
    runner = run_here(folder / "out", config=config, **UNUSED_TOY_KEYS, run__max_epoch=2, **changes)
    return runner, [row for rows in data.values() for row in rows]


def test_photograph_in_several_builders_is_one_image(
    tmp_path, photographs, captions_by_path, recorded_steps
):
    names = ("coco_caption", "vg_caption", "sbu_caption")
    runner, rows = train(tmp_path, photographs, captions_by_path, names)
    ids = runner.train_set.image_ids.tolist()
    number = {}
    for image_id, row in zip(ids, rows, strict=True):
        assert number.setdefault(row["image"], image_id) == image_id
    assert len(set(number.values())) == len(number) == 17 < len(rows)

    across = 0
    starts = {
        name: sum(len(rows_of(n, captions_by_path)) for n in names[:k])
        for k, name in enumerate(names)
    }
    for _, samples, output in recorded_steps:
        index = samples["index"].tolist()
        same = torch.tensor([[rows[a]["image"] == rows[b]["image"] for b in index] for a in index])
        for found in (output.i2t, output.t2i):
            assert torch.equal(found.positives, same)
            picked = found.hard >= 0
            assert not same[picked, found.hard[picked]].any()
        part = torch.tensor([sum(i >= start for start in starts.values()) for i in index])
        across += int((same & (part[:, None] != part[None, :])).sum())
    assert across, "no mini-batch held a photograph of two builders: nothing was tested"


@pytest.fixture
def small_lavis_captioner(tmp_path, monkeypatch):
    """LAVIS's BLIP captioner with few weights: its own classes, a vocabulary in a folder."""
    monkeypatch.chdir(tmp_path)
    med = put_small_lavis(tmp_path, monkeypatch, more_words=2)  # [DEC] and [ENC]
    torch.save({"model": {}}, tmp_path / "nothing.pth")
    return {
        "arch": "blip_caption",
        "model_type": "base_coco",
        "med_config_path": med,
        "image_size": 32,
        "load_finetuned": True,
        "finetuned": str(tmp_path / "nothing.pth"),
    }


def test_lavis_captioning_trains_and_evaluates(
    tmp_path, photographs, captions_by_path, small_lavis_captioner, recorded_steps
):
    """LAVIS's model, task and builders are trained, validated and tested by our runner."""
    paths = sorted(captions_by_path)
    held_out = []
    for number, path in enumerate(paths[20:24]):
        name = f"COCO_val2014_{number:012d}.jpg"  # LAVIS reads the number from the name
        shutil.copy(photographs / path, tmp_path / name)
        held_out.append({"image": name, "caption": captions_by_path[path]})
    rows = rows_of("coco_caption", captions_by_path)
    for row in rows:
        row["image"] = str(photographs / row["image"])
    run = {
        "task": "captioning",
        "num_beams": 1,
        "max_len": 16,
        "min_len": 2,
        "report_metric": False,
    }
    config = write_config(
        tmp_path, tmp_path, {"coco_caption": rows}, small_lavis_captioner, run, test=held_out
    )
    grit = {f"run__grit__{key}": None for key in ("queue_size", "search_space", "start_epoch")}
    runner = run_here(
        tmp_path / "out",
        config=config,
        **{**UNUSED_TOY_KEYS, **grit},
        run__k_test=None,
        run__max_epoch=2,
        run__valid_splits='["val"]',
        run__test_splits='["test"]',
    )
    assert type(runner._model).__name__ == "BlipCaption"
    for epoch in (0, 1):
        trained = torch.cat(
            [
                samples["index"]
                for epoch_of_step, samples, _ in recorded_steps
                if epoch_of_step == epoch
            ]
        )
        assert len(set(trained.tolist())) == len(trained) == len(rows) // 8 * 8
        assert not any(samples["grouped"] for epoch_of_step, samples, _ in recorded_steps)
    losses = [record["loss_lm"] for record in records(tmp_path / "out", "epoch")]
    assert losses[1] < losses[0]
    captions = json.loads((tmp_path / "out/job/result/val_epoch1.json").read_text())
    assert sorted(record["image_id"] for record in captions) == [0, 1, 2, 3]
    assert [record["split"] for record in records(tmp_path / "out", "eval")] == [
        "val",
        "val",
        "test",
    ]
    assert weights(tmp_path / "out").keys() == runner._model.state_dict().keys()
