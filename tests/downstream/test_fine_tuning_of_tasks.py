"""Fine-tuning for VQA and visual entailment by the real commands."""

from __future__ import annotations

import json
from pathlib import Path

import lavis
import pytest
import torch
from fine_tuning import (
    SIZES,
    annotation_options,
    assert_trains_and_evaluates,
    checkpoint,  # noqa: F401
    settings,
    train_on_files,
    train_small,
    write_json_files,
)
from runs import finish, put_small_lavis, records, run_here, start

from lavis_mafa import load_model


@pytest.mark.parametrize("name, data", [("vqa_ft_toy", "toy_vqa"), ("ve_ft_toy", "toy_ve")])
def test_train_then_evaluate(name, data, checkpoint, tmp_path):  # noqa: F811
    assert_trains_and_evaluates(name, data, "acc", checkpoint, tmp_path)


def test_vqa_on_two_processes(checkpoint, tmp_path):  # noqa: F811
    """All weights are used for any number of answers; every question is scored once."""
    config, options = settings("vqa_ft_toy", checkpoint, "toy_vqa", **{"run.max_epoch": 1})
    options = {key.replace(".", "__"): value for key, value in options.items()}
    finish(start("train.py", tmp_path, ranks=2, **config, **options))
    assert len(records(tmp_path, "epoch")) == 1
    result = tmp_path / "job/result/test_vqa_result.json"
    question_ids = [record["question_id"] for record in json.loads(result.read_text())]
    assert question_ids == list(range(2 * SIZES["test_size"]))


@pytest.fixture
def pictures(tmp_path, toy):
    """Twelve images of the toy world as files."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(12):
        toy["test"].picture(number).save(folder / f"{number}.jpg")
    return folder


@pytest.mark.parametrize("blip", [False, True], ids=["albef", "LAVIS's BLIP"])
def test_vqa_with_lavis_coco_and_visual_genome_builders(
    blip,
    pictures,
    checkpoint,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """Ten annotators' answers are weighted by their count, Visual Genome's single one by 0.2."""
    config, genome, more = "vqa_ft", "vg_vqa_mafa", {}
    if blip:  # fine-tuned from our checkpoint by LAVIS's config (MAFA, Table 3)
        config, genome = f"{Path(lavis.__file__).parent}/projects/blip/train/vqav2_ft", "vg_vqa"
        checkpoint = tmp_path / "blip.pth"
        torch.save({"model": load_model("blip_mafa", "tiny").state_dict()}, checkpoint)
        monkeypatch.chdir(tmp_path)
        more["model.med_config_path"] = put_small_lavis(tmp_path, monkeypatch, more_words=2)
        more |= {"model.model_type": "vqav2", "run.task": "mafa_vqa"}
        for part in ("coco_vqa.vis_processor.train", "coco_vqa.vis_processor.eval"):
            more[f"datasets.{part}.image_size"] = 32
        more["datasets.vg_vqa.vis_processor.train.image_size"] = 32
    answers = [["red"] * 6 + ["crimson"] * 4, ["2"] * 10, ["yes"] * 5 + ["no"] * 5]
    row = {"question": "what is red?"}
    questions = [
        {**row, "question_id": n, "image": f"{n}.jpg", "answer": answers[n % 3]} for n in range(12)
    ]
    unanswered = [{key: row[key] for key in row if key != "answer"} for row in questions]
    official = [{**row, "image_id": row["question_id"]} for row in unanswered]
    annotations = [
        {
            "question_id": row["question_id"],
            "image_id": row["question_id"],
            "question_type": "what is",
            "answer_type": "other",
            "multiple_choice_answer": row["answer"][0],
            "answers": [{"answer": one, "answer_id": k} for k, one in enumerate(row["answer"])],
        }
        for row in questions
    ]
    paths = write_json_files(
        tmp_path,
        train=questions[:6],
        more=questions[6:],
        evaluated=unanswered,
        candidates=["red", "crimson", "2", "yes", "no"],
        official={"questions": official},
        truth={"annotations": annotations},
        genome=[{**row, "answer": "two", "dataset": "vg"} for row in questions],
    )
    train_on_files(
        config,
        checkpoint,
        tmp_path,
        **more,
        **annotation_options("coco_vqa", "train", paths["train"], paths["more"]),
        **annotation_options(
            "coco_vqa",
            "val",
            paths["evaluated"],
            paths["candidates"],
            paths["official"],
            paths["truth"],
        ),
        **annotation_options("coco_vqa", "test", paths["evaluated"], paths["candidates"]),
        **annotation_options(genome, "train", paths["genome"]),
        **{f"datasets.{data}.build_info.images.storage": pictures for data in ("coco_vqa", genome)},
        **{"run.valid_splits": '["val"]'},
    )
    assert len(records(tmp_path, "step")) == 24 // 4
    val, test = records(tmp_path, "eval")
    assert val["split"] == "val" and 0 <= val["acc"] <= 100 and "other" in val
    assert test["split"] == "test" and "acc" not in test
    predictions = json.loads((tmp_path / "job/result/test_vqa_result.json").read_text())
    assert [row["question_id"] for row in predictions] == list(range(12))
    assert {row["answer"] for row in predictions} <= {"red", "crimson", "2", "yes", "no"}


def test_entailment_with_lavis_snli_ve_builder(pictures, checkpoint, tmp_path):  # noqa: F811
    labels = ["entailment", "neutral", "contradiction"]
    rows = [
        {"image": str(n), "sentence": "a red circle", "label": labels[n % 3]} for n in range(12)
    ]
    paths = write_json_files(tmp_path, train=rows, val=rows[:6], test=rows[6:])
    splits = [annotation_options("snli_ve", split, paths[split]) for split in paths]
    train_on_files(
        "ve_ft",
        checkpoint,
        tmp_path,
        **{key: value for files in splits for key, value in files.items()},
        **{"datasets.snli_ve.build_info.images.storage": pictures},
    )
    assert len(records(tmp_path, "step")) == 3
    evaluations = records(tmp_path, "eval")
    assert [record["split"] for record in evaluations] == ["val", "test"]
    assert all(0 <= record["acc"] <= 100 for record in evaluations)
    predictions = json.loads((tmp_path / "job/result/test_epochbest.json").read_text())
    assert [row["target"] for row in predictions] == [2, 1, 0, 2, 1, 0]
    correct = [row["prediction"] == row["target"] for row in predictions]
    assert evaluations[-1]["acc"] == pytest.approx(100 * sum(correct) / 6)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A tiny ALBEF, pre-trained on the toy world for two epochs."""
    folder = tmp_path_factory.mktemp("seen")
    run_here(
        folder,
        **{f"datasets__toy_scenes__build_info__{key}": None for key in SIZES},
        run__max_epoch=2,
        run__batch_size_train=64,
        run__warmup_steps=50,
        run__grit__queue_size=1280,
        run__grit__search_space=640,
    )
    return folder / "job/checkpoint_last.pth"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name, data, chance, minimum",
    [
        # Chance: the best accuracy without looking at the image.
        ("vqa_ft_toy", "toy_vqa", 45, 57),
        ("ve_ft_toy", "toy_ve", 35, 50),
    ],
)
def test_fine_tuning_beats_chance(name, data, chance, minimum, pretrained, tmp_path):
    """Scored by the exact truth on images that training has not seen."""
    info = {f"datasets.{data}.build_info.{key}": None for key in SIZES}
    schedule = {"run.batch_size_train": 64, "run.max_epoch": 2, "run.warmup_steps": 50}
    train_small(tmp_path, name, pretrained, data, **info, **schedule, **{"run.valid_splits": "[]"})
    assert records(tmp_path, "eval")[-1]["acc"] > minimum > chance
