"""Fine-tuning for retrieval by the real commands, on the toy world and photographs."""

from __future__ import annotations

import json

from fine_tuning import (
    EVAL,
    SIZES,
    TRAIN,
    assert_trains_and_evaluates,
    checkpoint,  # noqa: F401
    settings,
)
from runs import records, run_here

from lavis_mafa.training.session import run


def test_train_then_evaluate(checkpoint, tmp_path):  # noqa: F811
    assert_trains_and_evaluates("retrieval_ft_toy", "toy_scenes", "txt_map_r", checkpoint, tmp_path)


def test_retrieval_with_lavis_flickr30k_builder(photographs, checkpoint, tmp_path):  # noqa: F811
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
        "model.max_txt_len": 30,
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
        "run.loggers": "[]",
        "run.evaluate": True,
    }
    option_list = [f"{key}={value}" for key, value in evaluate_options.items()]
    run(str(EVAL / "retrieval_ft_flickr.yaml"), option_list)
    for key in ("txt_r1", "txt_r5", "img_r1", "img_r10"):
        assert records(evaluated, "eval")[0][key] == evaluations[-1][key]
