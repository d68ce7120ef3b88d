"""LAVIS's own data sets, models and tasks, unchanged, under our runner."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml
from runs import records, run_here, weights

from lavis_mafa.runners import RunnerMafa

LISTED = ("sbu_caption",)  # LAVIS's default has lists of files here
EVALUATED = ("coco_caption", "coco_retrieval", "flickr30k")  # those that have val and test as well
NOT_OURS = {
    **{f"datasets__toy_scenes__build_info__{key}_size": None for key in ("train", "val", "test")},
    "model__mafa__con_d__arch": None,
}
# Which photographs and captions of each a builder has; they overlap.
PARTS = {
    "coco_caption": (range(0, 4), range(5)),
    "coco_retrieval": (range(0, 4), range(2)),
    "flickr30k": (range(2, 6), range(5)),
    "vg_caption": (range(1, 11), range(1)),
    "sbu_caption": (range(5, 17), range(2)),
}


@pytest.fixture(scope="module")
def described(photographs):
    """Captions of every photograph, by its path."""
    captions: dict[str, list[str]] = {}
    for row in json.loads((photographs / "train.json").read_text()):
        captions.setdefault(row["image"], []).append(row["caption"])
    return captions


def rows_of(name, described):
    photos, which = PARTS[name]
    names = sorted(described)
    return [
        {"image": names[photo], "caption": described[names[photo]][one], "image_id": f"{photo}"}
        for photo in photos
        for one in which
    ]


def write_config(folder, images, data, model=None, run=None, test=()):
    """A config for LAVIS's builders with annotation files in ``folder``: {builder: rows}."""
    datasets = {}
    for name, rows in data.items():
        splits = {"train": rows, **({"val": test, "test": test} if name in EVALUATED else {})}
        annotations = {}
        for split, content in splits.items():
            path = folder / f"{name}_{split}.json"
            path.write_text(json.dumps(list(content)))
            where = [str(path)] if name in LISTED else str(path)
            annotations[split] = {"url": where, "storage": where}
        phases = ("train", "eval")
        datasets[name] = {
            "vis_processor": {p: {"name": f"blip_image_{p}", "image_size": 32} for p in phases},
            "text_processor": {p: {"name": "blip_caption"} for p in phases},
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
def seen(monkeypatch):
    """Every step's epoch, samples and output, as the runner handled them."""
    steps = []
    note = RunnerMafa._record_step

    def recorded(self, output, losses, samples, bar):
        steps.append((samples["epoch"], samples, output))
        note(self, output, losses, samples, bar)

    monkeypatch.setattr(RunnerMafa, "_record_step", recorded)
    return steps


def train(folder, photographs, described, names, test=(), **changes):
    data = {name: rows_of(name, described) for name in names}
    config = write_config(folder, photographs, data, test=test)
    runner = run_here(folder / "out", config=config, **NOT_OURS, run__max_epoch=2, **changes)
    return runner, [row for rows in data.values() for row in rows]


@pytest.mark.parametrize(
    "names",
    [
        ("coco_caption", "vg_caption", "sbu_caption"),
        ("flickr30k", "vg_caption"),
        ("coco_caption", "flickr30k"),
    ],
    ids="+".join,
)
def test_several_builders_train_together(tmp_path, photographs, described, seen, names):
    """A random epoch and a grouped one over LAVIS's builders, without and with val and test."""
    paths = sorted(described)
    held_out = [{"image": path, "caption": described[path]} for path in paths[:4]]
    runner, rows = train(tmp_path, photographs, described, names, test=held_out)

    assert len(runner.train_set) == len(rows) > 24
    assert [len(part) for part in runner.train_set.parts] == [
        len(rows_of(name, described)) for name in names
    ]
    assert all(type(part).__module__.startswith("lavis.") for part in runner.train_set.parts)
    owners = [name for name in names if name in EVALUATED]
    prefixes = [f"{name}." for name in owners] if len(owners) > 1 else [""]
    expected = {f"{prefix}{split}" for prefix in prefixes for split in ("val", "test")}
    assert runner.eval_sets.keys() == expected
    told = records(tmp_path / "out", "epoch")
    assert len(told) == 2 and all(0 < record["loss"] < 30 for record in told)
    assert not (tmp_path / "out" / "job" / "unreadable.jsonl").exists()

    steps, lost = divmod(len(rows), 8)
    trained = {}
    for epoch in (0, 1):
        mine = [samples for at, samples, _ in seen if at == epoch]
        assert len(mine) == steps
        assert {samples["grouped"] for samples in mine} == {epoch == 1}
        trained[epoch] = torch.cat([samples["index"] for samples in mine]).tolist()
        assert len(set(trained[epoch])) == 8 * steps  # each once
        for samples in mine:
            for place, index in enumerate(samples["index"].tolist()):
                asked = runner.train_set.dataset[index]["text_input"]
                assert samples["text_input"][place] == asked
                first_words = rows[index]["caption"].lower().split()[:2]
                assert asked.split()[:2] == first_words
    # What did not fill a mini-batch comes first in the next epoch.
    left = set(range(len(rows))) - set(trained[0])
    assert len(left) == lost and set(trained[1][:lost]) == left


def test_one_photograph_in_several_builders_is_one_image(tmp_path, photographs, described, seen):
    names = ("coco_caption", "vg_caption", "sbu_caption")
    runner, rows = train(tmp_path, photographs, described, names)
    ids = runner.train_set.image_ids.tolist()
    number = {}
    for image_id, row in zip(ids, rows, strict=True):
        assert number.setdefault(row["image"], image_id) == image_id
    assert len(set(number.values())) == len(number) == 17 < len(rows)

    across = 0
    begins = {
        name: sum(len(rows_of(n, described)) for n in names[:k]) for k, name in enumerate(names)
    }
    for _, samples, output in seen:
        index = samples["index"].tolist()
        same = torch.tensor([[rows[a]["image"] == rows[b]["image"] for b in index] for a in index])
        for found in (output.i2t, output.t2i):
            assert torch.equal(found.positives, same)
            there = found.hard >= 0
            assert not same[there, found.hard[there]].any()
        part = torch.tensor([sum(i >= begin for begin in begins.values()) for i in index])
        across += int((same & (part[:, None] != part[None, :])).sum())
    assert across, "no mini-batch held one photograph twice: this test saw nothing"


def test_every_builder_that_has_a_split_is_evaluated(tmp_path, photographs, described):
    """Two retrieval sets at once: each is scored by itself."""
    paths = sorted(described)
    held_out = [{"image": path, "caption": described[path]} for path in paths[30:38]]
    train(
        tmp_path,
        photographs,
        described,
        ("coco_retrieval", "flickr30k", "vg_caption"),
        test=held_out,
        run__valid_splits='["val"]',
        run__test_splits='["test"]',
    )
    told = records(tmp_path / "out", "eval")
    val, test = ([f"{name}.{split}" for name in EVALUATED[1:]] for split in ("val", "test"))
    assert [record["split"] for record in told] == [*val, *val, *test]
    for one, other in zip(told[::2], told[1::2], strict=True):
        # They hold the same images here.
        for key in ("txt_r1", "txt_r10", "img_r5"):
            assert 0 <= one[key] == other[key] <= 100


@pytest.fixture
def small_lavis(tmp_path, monkeypatch):
    """LAVIS's BLIP captioner with few weights: its own classes, a vocabulary in a folder."""
    from lavis.models.vit import VisionTransformerEncoder
    from omegaconf import OmegaConf

    from lavis_mafa.io.checkpoints import CONFIGS
    from lavis_mafa.models import AlbefMafa
    from lavis_mafa.models.parts.vit import build_vit

    tiny = OmegaConf.load(AlbefMafa.default_config_path("tiny")).model

    def small_encoder(cls, cfg, from_pretrained=False):
        return build_vit(tiny, from_pretrained)

    monkeypatch.setattr(VisionTransformerEncoder, "from_config", classmethod(small_encoder))
    monkeypatch.chdir(tmp_path)
    # LAVIS asks for this tokenizer by name; a folder of the name is found first.
    vocabulary = tmp_path / "bert-base-uncased" / "vocab.txt"
    vocabulary.parent.mkdir()
    shutil.copy(CONFIGS / "models" / "tiny_vocab.txt", vocabulary)
    med = json.loads((CONFIGS / "models" / "med_config_tiny.json").read_text())
    med["vocab_size"] = len(vocabulary.read_text().splitlines()) + 2  # [DEC] and [ENC]
    (tmp_path / "med.json").write_text(json.dumps(med))
    torch.save({"model": {}}, tmp_path / "nothing.pth")
    return {
        "arch": "blip_caption",
        "model_type": "base_coco",
        "med_config_path": str(tmp_path / "med.json"),
        "image_size": 32,
        "load_finetuned": True,
        "finetuned": str(tmp_path / "nothing.pth"),
    }


def test_lavis_captioning_under_our_runner(tmp_path, photographs, described, small_lavis, seen):
    """LAVIS's model, task and builders are trained, validated and tested by our runner."""
    paths = sorted(described)
    held_out = []
    for number, path in enumerate(paths[20:24]):
        name = f"COCO_val2014_{number:012d}.jpg"  # LAVIS reads the number from the name
        shutil.copy(photographs / path, tmp_path / name)
        held_out.append({"image": name, "caption": described[path]})
    rows = rows_of("coco_caption", described)
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
        tmp_path, tmp_path, {"coco_caption": rows}, small_lavis, run, test=held_out
    )
    grit = {f"run__grit__{key}": None for key in ("queue_size", "search_space", "start_epoch")}
    runner = run_here(
        tmp_path / "out",
        config=config,
        **{**NOT_OURS, **grit},
        run__k_test=None,
        run__max_epoch=2,
        run__valid_splits='["val"]',
        run__test_splits='["test"]',
    )
    assert type(runner._model).__name__ == "BlipCaption"
    for epoch in (0, 1):
        read = torch.cat([samples["index"] for at, samples, _ in seen if at == epoch])
        assert len(set(read.tolist())) == len(read) == len(rows) // 8 * 8
        assert not any(samples["grouped"] for at, samples, _ in seen)
    losses = [record["loss_lm"] for record in records(tmp_path / "out", "epoch")]
    assert losses[1] < losses[0]
    told = json.loads((tmp_path / "out/job/result/val_epoch1.json").read_text())
    assert sorted(record["image_id"] for record in told) == [0, 1, 2, 3]
    assert [record["split"] for record in records(tmp_path / "out", "eval")] == [
        "val",
        "val",
        "test",
    ]
    assert weights(tmp_path / "out").keys() == runner._model.state_dict().keys()
