"""Fine-tuning by the real commands: VQA, entailment and retrieval on the toy world and
photographs.
"""

from __future__ import annotations

import json

import pytest
import torch
from omegaconf import OmegaConf
from runs import ROOT, TOY, finish, records, run_here, start, weights

from lavis_mafa.models import AlbefMafa
from lavis_mafa.runners.session import run

TRAIN, EVAL = ROOT / "projects/mafa/train", ROOT / "projects/mafa/eval"
# Keys of the small pre-training run that do not apply here.
PRETRAINING_KEYS = (
    *("run.grit.queue_size", "run.grit.search_space", "run.grit.start_epoch"),
    *("model.mafa.con_d.arch", "run.k_test"),
)
QUESTIONS = "datasets.toy_vqa.build_info.questions_per_image"
SIZES = {"train_size": 60, "val_size": 8, "test_size": 12}


def settings(name, checkpoint, data, **more):
    """Return the config file and the options of a small run."""
    info = {f"datasets.{data}.build_info.{key}": value for key, value in SIZES.items()}
    no_pretraining_data = {key.replace("__", "."): None for key in TOY}
    options = {
        **dict.fromkeys(PRETRAINING_KEYS),
        **(no_pretraining_data if data != "toy_scenes" else {}),
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
    return {"config": str(TRAIN / f"{name}.yaml")}, options


def train_small(folder, name, checkpoint, data, **more):
    config, options = settings(name, checkpoint, data, **more)
    return run_here(folder, **config, **{k.replace(".", "__"): v for k, v in options.items()})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny ALBEF in the format of a pre-training checkpoint."""
    torch.manual_seed(0)
    cfg = OmegaConf.load(AlbefMafa.default_config_path("tiny")).model
    path = tmp_path_factory.mktemp("pretrained") / "checkpoint_last.pth"
    content = {"model": {"arch": "albef_mafa", "model_type": "tiny"}}
    torch.save({"model": AlbefMafa.from_config(cfg).state_dict(), "config": content}, path)
    return path


@pytest.mark.parametrize(
    "name, data, metric",
    [
        ("vqa_ft_toy", "toy_vqa", "acc"),
        ("ve_ft_toy", "toy_ve", "acc"),
        ("retrieval_ft_toy", "toy_scenes", "txt_map_r"),
    ],
)
def test_train_then_evaluate(name, data, metric, checkpoint, tmp_path):
    train_small(tmp_path, name, checkpoint, data)
    trained = records(tmp_path, "eval")
    assert [record["split"] for record in trained] == ["val", "val", "test"]
    assert 0 <= trained[-1][metric] <= 100
    losses = [record["loss"] for record in records(tmp_path, "epoch")]
    assert losses[1] < losses[0]
    assert not any("_m." in key for key in weights(tmp_path)) or data == "toy_scenes"
    evaluated = tmp_path / "told"
    run(
        str(EVAL / f"{name}.yaml"),
        [
            *(f"datasets.{data}.build_info.{key}={value}" for key, value in SIZES.items()),
            *([f"{QUESTIONS}=2"] if data == "toy_vqa" else []),
            *(["datasets.toy_scenes.type=dense"] if data == "toy_scenes" else []),
            f"model.finetuned={tmp_path}/job/checkpoint_best.pth",
            *("run.job_id=job", f"run.output_dir={evaluated}", "run.tensorboard=False"),
        ],
        evaluate=True,
    )
    separate = records(evaluated, "eval")[-1]
    for key, value in trained[-1].items():
        if key not in ("time", "epoch", "kind", "split"):
            assert separate[key] == pytest.approx(value), key


def test_vqa_on_two_processes(checkpoint, tmp_path):
    """All weights are used for any number of answers; every question is scored once."""
    config, options = settings("vqa_ft_toy", checkpoint, "toy_vqa", **{"run.max_epoch": 1})
    options = {key.replace(".", "__"): value for key, value in options.items()}
    finish(start("train.py", tmp_path, ranks=2, **config, **options))
    assert len(records(tmp_path, "epoch")) == 1
    result = tmp_path / "job/result/test_vqa_result.json"
    question_ids = [record["question_id"] for record in json.loads(result.read_text())]
    assert question_ids == list(range(2 * SIZES["test_size"]))


def test_retrieval_with_lavis_flickr30k_builder(photographs, checkpoint, tmp_path):
    """The shipped config on real files with smaller sizes: LAVIS's builder and annotation
    format.
    """
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
    train_options = settings("retrieval_ft_flickr", checkpoint, "flickr30k", **split, **tiny)[1]
    for key in SIZES:
        del train_options[f"{files}.{key}"]
    train_options = {key.replace(".", "__"): value for key, value in train_options.items()}
    run_here(tmp_path, config=str(TRAIN / "retrieval_ft_flickr.yaml"), **train_options)
    steps, evaluations = records(tmp_path, "step"), records(tmp_path, "eval")
    assert len(steps) == 20 and {"loss_itc", "loss_itm"} <= steps[0].keys()
    assert [record["split"] for record in evaluations] == ["val", "val", "test"]
    evaluated = tmp_path / "told"
    evaluate_options = {
        **{key: value for key, value in {**split, **tiny}.items() if "queue" not in key},
        "model.finetuned": tmp_path / "job/checkpoint_best.pth",
        "run.job_id": "job",
        "run.output_dir": evaluated,
        "run.tensorboard": False,
    }
    option_list = [f"{key}={value}" for key, value in evaluate_options.items()]
    run(str(EVAL / "retrieval_ft_flickr.yaml"), option_list, evaluate=True)
    for key in ("txt_r1", "txt_r5", "img_r1", "img_r10"):
        assert records(evaluated, "eval")[0][key] == evaluations[-1][key]


@pytest.fixture
def pictures(tmp_path, toy):
    """Twelve images of the toy world as files."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(12):
        toy["test"].picture(number).save(folder / f"{number}.jpg")
    return folder


def write_json_files(folder, **contents):
    """Write one JSON file per argument; return the paths by name."""
    paths = {name: folder / f"{name}.json" for name in contents}
    for name, content in contents.items():
        paths[name].write_text(json.dumps(content))
    return paths


def train_on_files(name, checkpoint, folder, **more):
    """Train with a shipped config, a tiny model and the CPU."""
    options = {
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
    run(str(TRAIN / f"{name}.yaml"), [f"{key}={value}" for key, value in options.items()])


def annotation_options(data, split, *paths):
    files = [str(path) for path in paths]
    key = f"datasets.{data}.build_info.annotations.{split}"
    return {f"{key}.url": json.dumps(files), f"{key}.storage": json.dumps(files)}


def test_vqa_with_lavis_coco_and_visual_genome_builders(pictures, checkpoint, tmp_path):
    """Ten annotators' answers are weighted by their count, Visual Genome's single one by 0.2."""
    answers = [["red"] * 6 + ["crimson"] * 4, ["2"] * 10, ["yes"] * 5 + ["no"] * 5]
    questions = [
        {
            "question_id": n,
            "image": f"{n}.jpg",
            "question": "what is red?",
            "answer": answers[n % 3],
        }
        for n in range(12)
    ]
    unanswered = [{key: row[key] for key in row if key != "answer"} for row in questions]
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
            for row in questions
        ],
    }
    paths = write_json_files(
        tmp_path,
        train=questions[:6],
        more=questions[6:],
        evaluated=unanswered,
        candidates=["red", "crimson", "2", "yes", "no"],
        official={"questions": official["questions"]},
        truth={"annotations": official["annotations"]},
        genome=[{**row, "answer": "two", "dataset": "vg"} for row in questions],
    )
    train_on_files(
        "vqa_ft",
        checkpoint,
        tmp_path,
        **annotation_options("coco_vqa", "train", paths["train"], paths["more"]),
        **annotation_options(
            *("coco_vqa", "val", paths["evaluated"], paths["candidates"]),
            *(paths["official"], paths["truth"]),
        ),
        **annotation_options("coco_vqa", "test", paths["evaluated"], paths["candidates"]),
        **annotation_options("vg_vqa_mafa", "train", paths["genome"]),
        **{
            f"datasets.{data}.build_info.images.storage": pictures
            for data in ("coco_vqa", "vg_vqa_mafa")
        },
        **{"run.valid_splits": '["val"]'},
    )
    assert len(records(tmp_path, "step")) == 24 // 4
    val, test = records(tmp_path, "eval")
    assert val["split"] == "val" and 0 <= val["acc"] <= 100 and "other" in val
    assert test["split"] == "test" and "acc" not in test
    predictions = json.loads((tmp_path / "job/result/test_vqa_result.json").read_text())
    assert [row["question_id"] for row in predictions] == list(range(12))
    assert {row["answer"] for row in predictions} <= {"red", "crimson", "2", "yes", "no"}


def test_entailment_with_lavis_snli_ve_builder(pictures, checkpoint, tmp_path):
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
