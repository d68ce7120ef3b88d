"""Fine-tuning by the real commands: VQA, entailment, retrieval; toy world and photographs."""

from __future__ import annotations

import json

import pytest
import torch
from omegaconf import OmegaConf
from runs import ROOT, finish, records, run_here, start, weights

from lavis_mafa.models import AlbefMafa
from lavis_mafa.runners.session import run

TRAIN, EVAL = ROOT / "projects/mafa/train", ROOT / "projects/mafa/eval"
# What only pre-training on toy_scenes knows.
NOT_HERE = (
    *("run.grit.queue_size", "run.grit.search_space", "run.grit.start_epoch"),
    *("model.mafa.con_d.arch", "run.k_test"),
)
QUESTIONS = "datasets.toy_vqa.build_info.questions_per_image"
SIZES = {"train_size": 60, "val_size": 8, "test_size": 12}


def settings(name, checkpoint, data, **more):
    """A small run of a toy config."""
    info = {f"datasets.{data}.build_info.{key}": value for key, value in SIZES.items()}
    none = {f"datasets.toy_scenes.build_info.{key}": None for key in SIZES}
    given = {
        **dict.fromkeys(NOT_HERE),
        **(none if data != "toy_scenes" else {}),
        **info,
        **({QUESTIONS: 2} if data == "toy_vqa" else {}),
        "model.pretrained": checkpoint,
        "run.warmup_steps": 5,
        "run.max_epoch": 2,
        "run.batch_size_train": 8,
        "run.valid_splits": '["val"]',
        "run.test_splits": '["test"]',
        **more,
    }
    return {"config": str(TRAIN / f"{name}.yaml")}, given


def begin(folder, name, checkpoint, data, **more):
    where, given = settings(name, checkpoint, data, **more)
    return run_here(folder, **where, **{k.replace(".", "__"): v for k, v in given.items()})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny ALBEF as pre-training saves it."""
    torch.manual_seed(0)
    cfg = OmegaConf.load(AlbefMafa.default_config_path("tiny")).model
    path = tmp_path_factory.mktemp("pretrained") / "checkpoint_last.pth"
    content = {"model": {"arch": "albef_mafa", "model_type": "tiny"}}
    torch.save({"model": AlbefMafa.from_config(cfg).state_dict(), "config": content}, path)
    return path


@pytest.mark.parametrize(
    "name, data, figure",
    [
        ("vqa_ft_toy", "toy_vqa", "acc"),
        ("ve_ft_toy", "toy_ve", "acc"),
        ("retrieval_ft_toy", "toy_scenes", "txt_map_r"),
    ],
)
def test_train_then_evaluate(name, data, figure, checkpoint, tmp_path):
    begin(tmp_path, name, checkpoint, data)
    trained = records(tmp_path, "eval")
    assert [record["split"] for record in trained] == ["val", "val", "test"]
    assert 0 <= trained[-1][figure] <= 100
    losses = [record["loss"] for record in records(tmp_path, "epoch")]
    assert losses[1] < losses[0]
    assert not any("_m." in key for key in weights(tmp_path)) or data == "toy_scenes"
    told = tmp_path / "told"
    run(
        str(EVAL / f"{name}.yaml"),
        [
            *(f"datasets.{data}.build_info.{key}={value}" for key, value in SIZES.items()),
            *([f"{QUESTIONS}=2"] if data == "toy_vqa" else []),
            f"model.finetuned={tmp_path}/job/checkpoint_best.pth",
            *("run.job_id=job", f"run.output_dir={told}", "run.tensorboard=False"),
        ],
        evaluate=True,
    )
    alone = records(told, "eval")[-1]
    for key, value in trained[-1].items():
        if key not in ("time", "epoch", "kind", "split"):
            assert alone[key] == pytest.approx(value), key


def test_two_processes(checkpoint, tmp_path):
    """All weights are used for any number of answers; questions are scored once each."""
    where, given = settings("vqa_ft_toy", checkpoint, "toy_vqa", **{"run.max_epoch": 1})
    given = {key.replace(".", "__"): value for key, value in given.items()}
    finish(start("train.py", tmp_path, ranks=2, **where, **given))
    assert len(records(tmp_path, "epoch")) == 1
    written = tmp_path / "job/result/test_vqa_result.json"
    numbers = [record["question_id"] for record in json.loads(written.read_text())]
    assert numbers == list(range(2 * SIZES["test_size"]))


def test_photographs_by_the_builder_of_flickr30k(photographs, checkpoint, tmp_path):
    """The shipped config on real files, but for the sizes: LAVIS's builder, its annotations."""
    files = "datasets.flickr30k.build_info"
    split = {}
    for name, images in (("train", 80), ("val", 6), ("test", 10)):
        rows = json.loads((photographs / f"{name}.json").read_text())[:images]
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(rows))
        split[f"{files}.annotations.{name}.url"] = path
        split[f"{files}.annotations.{name}.storage"] = path
    tiny = {
        f"{files}.images.storage": photographs,
        "model.model_type": "tiny",
        "model.image_size": 32,
        "model.queue_size": 64,
        "run.device": "cpu",
        "run.amp": False,
        "run.num_workers": 0,
        "run.k_test": 128,
    }
    given = settings("retrieval_ft_flickr", checkpoint, "flickr30k", **split, **tiny)[1]
    for key in SIZES:
        del given[f"{files}.{key}"]
    given = {key.replace(".", "__"): value for key, value in given.items()}
    run_here(tmp_path, config=str(TRAIN / "retrieval_ft_flickr.yaml"), **given)
    steps, figures = records(tmp_path, "step"), records(tmp_path, "eval")
    assert len(steps) == 20 and {"loss_itc", "loss_itm"} <= steps[0].keys()
    assert [record["split"] for record in figures] == ["val", "val", "test"]
    told = tmp_path / "told"
    options = {
        **{key: value for key, value in {**split, **tiny}.items() if "queue" not in key},
        "model.finetuned": tmp_path / "job/checkpoint_best.pth",
        "run.job_id": "job",
        "run.output_dir": told,
        "run.tensorboard": False,
    }
    listed = [f"{key}={value}" for key, value in options.items()]
    run(str(EVAL / "retrieval_ft_flickr.yaml"), listed, evaluate=True)
    for key in ("txt_r1", "txt_r5", "img_r1", "img_r10"):
        assert records(told, "eval")[0][key] == figures[-1][key]


@pytest.fixture
def pictures(tmp_path, toy):
    """Twelve pictures of the toy world as files."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(12):
        toy["test"].picture(number).save(folder / f"{number}.jpg")
    return folder


def written(folder, **contents):
    """JSON files by name."""
    paths = {name: folder / f"{name}.json" for name in contents}
    for name, content in contents.items():
        paths[name].write_text(json.dumps(content))
    return paths


def on_files(name, checkpoint, folder, **more):
    """A shipped config with a tiny model on a CPU."""
    listed = {
        "model.model_type": "tiny",
        "model.image_size": 32,
        "model.pretrained": checkpoint,
        "run.device": "cpu",
        "run.amp": False,
        "run.num_workers": 0,
        "run.max_epoch": 1,
        "run.batch_size_train": 4,
        "run.tensorboard": False,
        "run.job_id": "job",
        "run.output_dir": folder,
        **more,
    }
    run(str(TRAIN / f"{name}.yaml"), [f"{key}={value}" for key, value in listed.items()])


def files_of(data, split, *paths):
    listed = [str(path) for path in paths]
    key = f"datasets.{data}.build_info.annotations.{split}"
    return {f"{key}.url": json.dumps(listed), f"{key}.storage": json.dumps(listed)}


def test_vqa_by_the_builders_of_coco_and_visual_genome(pictures, checkpoint, tmp_path):
    """Ten annotators' answers are weighted by their number, Visual Genome's one counts 0.2."""
    answers = [["red"] * 6 + ["crimson"] * 4, ["2"] * 10, ["yes"] * 5 + ["no"] * 5]
    asked = [
        {
            "question_id": n,
            "image": f"{n}.jpg",
            "question": "what is red?",
            "answer": answers[n % 3],
        }
        for n in range(12)
    ]
    unanswered = [{key: row[key] for key in row if key != "answer"} for row in asked]
    official = {
        "questions": [{**row, "image_id": row["question_id"]} for row in unanswered],
        "annotations": [
            {
                "question_id": row["question_id"],
                "image_id": row["question_id"],
                "question_type": "what is",
                "answer_type": "other",
                "multiple_choice_answer": row["answer"][0],
                "answers": [{"answer": one, "answer_id": k} for k, one in enumerate(row["answer"])],
            }
            for row in asked
        ],
    }
    paths = written(
        tmp_path,
        train=asked[:6],
        more=asked[6:],
        evaluated=unanswered,
        candidates=["red", "crimson", "2", "yes", "no"],
        official={"questions": official["questions"]},
        truth={"annotations": official["annotations"]},
        genome=[{**row, "answer": "two", "dataset": "vg"} for row in asked],
    )
    on_files(
        "vqa_ft",
        checkpoint,
        tmp_path,
        **files_of("coco_vqa", "train", paths["train"], paths["more"]),
        **files_of(
            *("coco_vqa", "val", paths["evaluated"], paths["candidates"]),
            *(paths["official"], paths["truth"]),
        ),
        **files_of("coco_vqa", "test", paths["evaluated"], paths["candidates"]),
        **files_of("vg_vqa", "train", paths["genome"]),
        **{
            f"datasets.{data}.build_info.images.storage": pictures
            for data in ("coco_vqa", "vg_vqa")
        },
        **{"run.valid_splits": '["val"]'},
    )
    assert len(records(tmp_path, "step")) == 24 // 4
    scored, test = records(tmp_path, "eval")
    assert scored["split"] == "val" and 0 <= scored["acc"] <= 100 and "other" in scored
    assert test["split"] == "test" and "acc" not in test
    told = json.loads((tmp_path / "job/result/test_vqa_result.json").read_text())
    assert [row["question_id"] for row in told] == list(range(12))
    assert {row["answer"] for row in told} <= {"red", "crimson", "2", "yes", "no"}


def test_entailment_by_the_builder_of_snli_ve(pictures, checkpoint, tmp_path):
    labels = ["entailment", "neutral", "contradiction"]
    rows = [
        {"image": str(n), "sentence": "a red circle", "label": labels[n % 3]} for n in range(12)
    ]
    paths = written(tmp_path, train=rows, val=rows[:6], test=rows[6:])
    splits = [files_of("snli_ve", split, paths[split]) for split in paths]
    on_files(
        "ve_ft",
        checkpoint,
        tmp_path,
        **{key: value for files in splits for key, value in files.items()},
        **{"datasets.snli_ve.build_info.images.storage": pictures},
    )
    assert len(records(tmp_path, "step")) == 3
    figures = records(tmp_path, "eval")
    assert [one["split"] for one in figures] == ["val", "test"]
    assert all(0 <= one["acc"] <= 100 for one in figures)
    told = json.loads((tmp_path / "job/result/test_epochbest.json").read_text())
    assert [row["target"] for row in told] == [2, 1, 0, 2, 1, 0]
    right = [row["prediction"] == row["target"] for row in told]
    assert figures[-1]["acc"] == pytest.approx(100 * sum(right) / 6)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A tiny ALBEF that has seen the toy world for two epochs."""
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
    "name, data, chance, reached",
    [
        # Chance: the best answer to every question, and to every sentence, without its picture.
        ("vqa_ft_toy", "toy_vqa", 45, 57),
        ("ve_ft_toy", "toy_ve", 35, 50),
    ],
)
def test_more_than_chance(name, data, chance, reached, pretrained, tmp_path):
    """By exact truth, on pictures that training has not seen."""
    info = {f"datasets.{data}.build_info.{key}": None for key in SIZES}
    fewer = {"run.batch_size_train": 64, "run.max_epoch": 2, "run.warmup_steps": 50}
    begin(tmp_path, name, pretrained, data, **info, **fewer, **{"run.valid_splits": "[]"})
    assert records(tmp_path, "eval")[-1]["acc"] > reached > chance
