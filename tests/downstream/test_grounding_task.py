"""Task mafa_grounding: from heat maps to scores, files and overlays, on one and several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from runs import finish, launcher, records, spawn
from torch import nn
from torch.utils.data import DataLoader
from toy_tasks import PLUGIN, ToyGroundingBuilder

from lavis_mafa import load_model
from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.downstream import MafaGroundingTask, mafa_grounding
from lavis_mafa.downstream.gradcam import heat_maps
from lavis_mafa.downstream.mafa_grounding import _stretch
from lavis_mafa.downstream.task_records import _collate_ragged
from lavis_mafa.training.session import run

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = ROOT / "projects/mafa"
TOYS = ROOT / "tests/downstream/configs"
EVALUATE = TOYS / "eval/grounding_toy.yaml"
TRAIN = TOYS / "train/grounding_toy.yaml"
SMALL = {"train_size": 40, "val_size": 6, "test_size": 11}
SIZES = [f"datasets.toy_grounding.build_info.{key}={value}" for key, value in SMALL.items()]
SIZES.append(f"run.plugins=[{PLUGIN}]")


@pytest.fixture(autouse=True)
def result_dir(tmp_path, monkeypatch):
    monkeypatch.setitem(registry.mapping["paths"], "result_dir", str(tmp_path / "result"))
    return tmp_path / "result"


@pytest.fixture(scope="module")
def toy():
    cfg = load_dataset_config(ToyGroundingBuilder.default_config_path())
    cfg.build_info.update(SMALL)
    return ToyGroundingBuilder(cfg).build_datasets()


@pytest.fixture
def model(tiny):
    nn.init.normal_(tiny.itm_head.weight, std=1.0)
    return tiny.eval()


def evaluate(task, dataset, model, batch_size=4, split="test"):
    """Evaluate as the runner does."""
    task.before_evaluation(model=model, dataset=dataset)
    loader = DataLoader(dataset, batch_size=batch_size, collate_fn=_collate_ragged)
    records = task.evaluation(model, loader, cuda_enabled=False)
    return task.after_evaluation(val_result=records, split_name=split, epoch=0)


def set_hot_cell(monkeypatch, cell_of):
    """Replace heat maps by maps (B, 2, 2) with all heat in one cell, by a function of text and
    image.
    """

    def maps(backbone, images, captions, layer):
        heat = torch.zeros(len(captions), 2, 2)
        for number, caption in enumerate(captions):
            cell = cell_of(caption, images[number])
            if cell is not None:
                heat[number, cell // 2, cell % 2] = 1.0
        return heat

    monkeypatch.setattr(mafa_grounding, "heat_maps", maps)


def true_cells(dataset):
    """Return the cell of the true box by text and image."""
    return {
        (row["text"], dataset[i]["image"].sum().item()): int(
            row["box"][1] // 16 * 2 + row["box"][0] // 16
        )
        for i, row in enumerate(dataset.annotation)
    }


def test_correct_maps_score_100_percent(toy, model, monkeypatch, result_dir):
    cells = true_cells(toy["test"])
    set_hot_cell(monkeypatch, lambda text, image: cells[text, image.sum().item()])
    scores = evaluate(MafaGroundingTask(), toy["test"], model)
    chance = np.mean([1 / len(row["boxes"]) for row in toy["test"].annotation])
    assert scores == {
        "agg_metrics": 100.0,
        "acc": 100.0,
        "chance": pytest.approx(100 * chance),
        "possible": 100.0,
        "undecided": 0.0,
    }
    (path,) = result_dir.iterdir()
    assert path.name == "test_grounding_result.json"
    for row, annotation in zip(json.loads(path.read_text()), toy["test"].annotation, strict=True):
        assert row["instance_id"] == annotation["instance_id"] and row["text"] == annotation["text"]
        assert row["box"] == annotation["box"] and row["score"] > 0
        assert set(row) == {"instance_id", "text", "box", "score"}


def test_records_follow_from_the_maps(toy, model):
    """The chosen box has the most heat per root of its area, in any mini-batch."""
    task = MafaGroundingTask(layer=2)
    task.before_evaluation(model=model, dataset=toy["test"])
    samples = _collate_ragged([toy["test"][i] for i in range(5)])
    with torch.no_grad():
        records = task.valid_step(model, samples)
    maps = heat_maps(backbone_of(model), samples["image"], samples["text_input"], 2)
    for number, record in enumerate(records):
        stretched = _stretch(maps[number], (32, 32))
        sums = [
            float(stretched[int(y) : int(y + h), int(x) : int(x + w)].sum()) / 16
            for x, y, w, h in samples["boxes"][number]
        ]
        assert record["box"] == samples["boxes"][number][int(np.argmax(sums))]
        assert record["score"] == pytest.approx(max(sums), rel=1e-4)
    assert not torch.allclose(
        maps, heat_maps(backbone_of(model), samples["image"], samples["text_input"])
    )
    single = evaluate(MafaGroundingTask(), toy["test"], model, batch_size=1)
    assert single == pytest.approx(evaluate(MafaGroundingTask(), toy["test"], model, batch_size=7))


def test_models_without_maps_are_rejected(toy, model):
    task = MafaGroundingTask()
    with pytest.raises(TypeError, match="Blip2Mafa has no layer in which texts attend to images"):
        task.before_evaluation(model=load_model("blip2_mafa", "tiny"), dataset=toy["test"])
    with pytest.raises(ValueError, match="needs index, size, box, boxes in the samples of ToyEx"):
        task.before_evaluation(model=model, dataset=toy["train"])
    with pytest.raises(ValueError, match="layer 9 of AlbefMafa .* layers that do: 2, 3"):
        evaluate(MafaGroundingTask(layer=9), toy["val"], model)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """A short training with the shipped config; its folder and runner."""
    folder = tmp_path_factory.mktemp("trained")
    settings = [*SIZES, "run.max_epoch=1", "run.batch_size_train=16", f"run.output_dir={folder}"]
    settings += ["model.load_pretrained=False", "model.pretrained=null", "run.loggers=[]"]
    return folder, run(str(TRAIN), settings)


def test_best_checkpoint_is_chosen_by_grounding_accuracy(trained_run):
    folder, runner = trained_run
    steps = records(folder, "step", "run")
    assert steps and all("loss_itm" in line and "loss_itc" in line for line in steps)
    scores = {line["split"]: line["agg_metrics"] for line in records(folder, "eval", "run")}
    assert set(scores) == {"val", "test"}
    assert runner.progress.best.value == scores["val"]
    assert (folder / "run/checkpoint_best.pth").is_file()
    assert {path.name for path in (folder / "run/result").iterdir()} == {
        "val_grounding_result.json",
        "test_grounding_result.json",
    }


def test_several_ranks_score_like_one(trained_run, tmp_path):
    """The real command on one and two ranks; 11 images do not divide evenly."""
    folder, _ = trained_run
    results = {}
    for ranks in (1, 2):
        output = tmp_path / str(ranks)
        options = [*SIZES, f"model.finetuned={folder}/run/checkpoint_last.pth"]
        options += ["run.batch_size_eval=3", "run.use_dist_eval_sampler=True"]
        options += [f"run.output_dir={output}", "run.job_id=job"]
        command = [*launcher(ranks), ROOT / "evaluate.py", "--cfg-path", EVALUATE]
        finish(spawn(tmp_path, [*command, "--options", *options]))
        (line,) = records(output, "eval")
        rows = json.loads((output / "job/result/test_grounding_result.json").read_text())
        boxes = [row["box"] for row in rows]
        results[ranks] = (boxes, *(line[name] for name in ("acc", "possible", "chance")))
    assert len(results[1][0]) % 2
    assert results[1] == results[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_toy_recipe_learns_to_localise(tmp_path, monkeypatch):
    """The two commands in the header of grounding_toy.yaml: far better than a random object."""
    monkeypatch.chdir(tmp_path)
    options = ["run.job_id=run", "run.valid_splits=[]", "run.test_splits=[]"]
    run(str(PROJECTS / "train/albef_toy.yaml"), [*options, "model.mafa.con_d.arch=oracle"])
    run(str(TRAIN), ["run.valid_splits=[]", f"run.plugins=[{PLUGIN}]"])
    (scores,) = records(tmp_path / "output/grounding_toy", "eval", "run")
    assert scores["split"] == "test" and 35 < scores["chance"] < 45
    assert scores["acc"] > scores["chance"] + 30
