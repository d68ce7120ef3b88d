"""Scores in addition to LAVIS's: COCO's test split, all valid pairs, saved scores."""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from lavis.common.registry import registry
from lavis.datasets.datasets.retrieval_datasets import RetrievalEvalDataset
from lavis.processors.blip_processors import BlipCaptionProcessor
from lavis.tasks.retrieval import RetrievalTask
from small_coco import karpathy, small_metrics, use_small

from lavis_mafa import load_model
from lavis_mafa.cli import main
from lavis_mafa.config import ConfigError
from lavis_mafa.metrics import eccv
from lavis_mafa.metrics.known_truth import original_pairs, read_truth, truth_with
from lavis_mafa.metrics.recall import retrieval_with_truth
from lavis_mafa.metrics.score_files import read_scores
from lavis_mafa.runners.session import run
from lavis_mafa.tasks import MafaPretrainTask, MafaRetrievalTask
from research.toy_measures import K_TEST, measure, toy_world

pytest.importorskip("eccv_caption")


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Where LAVIS's retrieval task writes its figures."""
    for name in ("output_dir", "result_dir"):
        monkeypatch.setitem(registry.mapping["paths"], name, str(tmp_path))
    return tmp_path


class FixedScores:
    """A model with fixed scores."""

    def __init__(self, dataset):
        rng = np.random.default_rng(4)
        shape = len(dataset.image), len(dataset.text)
        self.tables = rng.random(shape, np.float32), rng.random(shape[::-1], np.float32)

    def compute_sim_matrix(self, data_loader, task_cfg):
        self.asked = task_cfg
        return self.tables


def lavis_dataset(rows, folder):
    """Build LAVIS's own evaluation set of an annotation file."""
    path = folder / "karpathy.json"
    path.write_text(json.dumps(rows))
    return RetrievalEvalDataset(None, BlipCaptionProcessor(), str(folder), [str(path)])


def evaluate_with_both(dataset, kind=MafaRetrievalTask, split="test", **cfg):
    """Return a task's scores, its figures that LAVIS's task lacks, and LAVIS's, which it has."""
    model, loader = FixedScores(dataset), SimpleNamespace(dataset=dataset)
    task = kind({"k_test": 0, **cfg})
    result = task.after_evaluation(task.evaluation(model, loader), split_name=split, epoch=0)
    theirs = RetrievalTask({}).evaluation(model, loader)
    added = {key: value for key, value in result.items() if key not in theirs}
    assert result == {**theirs, **added}
    return model.tables, added, theirs


@pytest.fixture
def coco(monkeypatch, folders):
    """A data set treated as COCO's test split, and the package's data for it."""
    metrics = small_metrics(5)
    use_small(monkeypatch, metrics)
    return lavis_dataset(karpathy(metrics, six=(1, 8)), folders), metrics


# COCO's test split


@pytest.mark.strict_smoke
@pytest.mark.parametrize("kind", [MafaRetrievalTask, MafaPretrainTask])
def test_coco_scores_are_added_to_those_of_lavis(coco, kind, folders):
    dataset, metrics = coco
    scores, added, theirs = evaluate_with_both(dataset, kind)
    captions = [row["caption"] for row in dataset.annotation]
    ids = eccv.coco_ids(dataset.image, captions, metrics)
    assert added == eccv.eccv_scores(*scores, *ids, metrics) and len(added) == 24
    # LAVIS's line in the file is unchanged, ours follows.
    lines = [json.loads(line) for line in (folders / "evaluate.txt").read_text().splitlines()]
    assert lines == [theirs, added, theirs]


def test_other_images_get_no_coco_scores(coco, folders):
    dataset, metrics = coco
    rows = karpathy(metrics)
    rows[0]["image"] = "val2014/COCO_val2014_000000000001.jpg"
    assert not evaluate_with_both(lavis_dataset(rows, folders))[1]


def test_log_explains_how_to_install_the_missing_package(coco, monkeypatch, caplog):
    def missing():
        raise ImportError(f"COCO's further positives need a package: {eccv.INSTALL}")

    monkeypatch.setattr(eccv, "_load_metrics", missing)
    assert not evaluate_with_both(coco[0])[1]
    assert [r.message for r in caplog.records if "pip install eccv_caption" in r.message] != []


def test_other_captions_skip_only_the_coco_scores(coco, folders, caplog):
    rows = karpathy(coco[1])
    rows[2]["caption"] = rows[2]["caption"][:1]
    assert not evaluate_with_both(lavis_dataset(rows, folders))[1]
    assert "1 images have fewer than 5 captions" in caplog.text


def test_re_ranking_depth_is_logged_once(coco, caplog):
    caplog.set_level(logging.INFO)
    dataset = coco[0]
    task = MafaRetrievalTask({"k_test": 4})
    for _ in range(2):
        task.evaluation(FixedScores(dataset), SimpleNamespace(dataset=dataset))
    messages = [r.message for r in caplog.records if "run.k_test" in r.message]
    assert len(messages) == 1 and "only the 4 best candidates" in messages[0]
    for k_test in (0, 52):  # no re-ranking; everything is re-ranked
        caplog.clear()
        evaluate_with_both(dataset, k_test=k_test)
        assert "run.k_test" not in caplog.text


def test_only_the_main_process_scores_and_saves(coco, monkeypatch, folders):
    monkeypatch.setattr("lavis_mafa.tasks.mafa_retrieval.is_main_process", lambda: False)
    task = MafaRetrievalTask({"k_test": 0, "save_scores": True})
    model, loader = FixedScores(coco[0]), SimpleNamespace(dataset=coco[0])
    assert task.evaluation(model, loader) is None
    assert model.asked["k_test"] == 0  # every process takes part in the scoring
    assert not list(folders.glob("evaluate*")) and not list(folders.glob("scores*"))


# Saved scores


@pytest.mark.strict_smoke
def test_scores_are_saved_for_the_eccv_command(coco, folders):
    dataset, metrics = coco
    scores, added, theirs = evaluate_with_both(
        dataset, split="coco_retrieval.test", save_scores=True
    )
    figures = {**theirs, **added}
    path = folders / "scores_coco_retrieval.test.npz"
    saved = read_scores(path)
    assert np.array_equal(saved.scores_i2t, scores[0])
    assert np.array_equal(saved.scores_t2i, scores[1])
    assert saved.images == dataset.image
    # Original captions, not those processed for the model.
    assert saved.captions_per_image() == [row["caption"] for row in dataset.annotation]
    assert saved.captions[0] != dataset.text[0]
    assert main(["report", str(path)]) == 0
    written = json.loads(path.with_name("scores_coco_retrieval.test_eccv.json").read_text())
    assert written == {key: pytest.approx(figures[key], abs=1e-3) for key in written}


def test_scores_are_saved_only_on_request(coco, folders):
    evaluate_with_both(coco[0])
    assert not list(folders.glob("scores*"))


# Truth from a file


def truth_file(folder, pairs):
    path = folder / "truth.json"
    path.write_text(json.dumps(pairs))
    return str(path)


ROWS = [
    {"image": "a.jpg", "caption": ["A dog running.", "An animal"]},
    {"image": "b.jpg", "caption": ["Two cats"]},
    {"image": "c.jpg", "caption": ["A dog  running", "Grass"]},
]


@pytest.mark.strict_smoke
@pytest.mark.parametrize(
    "pairs, added",
    [
        ([["b.jpg", "An animal"], ["a.jpg", "Grass"]], {(1, 1), (0, 4)}),
        ([[1, 1], [0, 4]], {(1, 1), (0, 4)}),
        # These two captions are equal after processing.
        ([["b.jpg", "A dog running."]], {(1, 0), (1, 3)}),
        ([["b.jpg", "an  ANIMAL"], ["z.jpg", "Grass"], [7, 0]], {(1, 1)}),
        ([["a.jpg", "An animal"]], set()),  # an original pair
    ],
)
def test_additional_pairs_by_name_and_by_index(folders, pairs, added):
    dataset = lavis_dataset(ROWS, folders)
    plain = original_pairs(dataset)
    assert set(zip(*map(np.ndarray.tolist, np.nonzero(plain)), strict=True)) == {
        *((0, 0), (0, 1), (1, 2), (2, 3), (2, 4))
    }
    truth_matrix = truth_with(dataset, read_truth(truth_file(folders, pairs)))
    additional = truth_matrix & ~plain
    assert set(zip(*map(np.ndarray.tolist, np.nonzero(additional)), strict=True)) == added
    assert (truth_matrix >= plain).all()


def test_scores_with_a_truth_file(folders):
    dataset = lavis_dataset(ROWS, folders)
    path = truth_file(folders, [["b.jpg", "An animal"], ["a.jpg", "Grass"]])
    scores, added, _ = evaluate_with_both(dataset, truth_file=path)
    truth = original_pairs(dataset)
    truth[1, 1] = truth[0, 4] = True
    assert added == retrieval_with_truth(*scores, truth)
    assert not evaluate_with_both(dataset)[1], "without a file nothing is added"


def test_truth_file_extends_the_truth_of_the_split(toy, folders):
    known = toy["val"]
    image, text = np.argwhere(~known.truth_matrix())[0].tolist()
    path = truth_file(folders, [[image, text]])
    scores, added, _ = evaluate_with_both(known, truth_file=path)
    extended = known.truth_matrix().copy()
    extended[image, text] = True
    expected = retrieval_with_truth(*scores, extended)
    assert added == expected
    assert expected["txt_map_r"] != retrieval_with_truth(*scores, known.truth_matrix())["txt_map_r"]


def test_pairs_of_another_split_are_skipped_with_a_warning(folders, caplog):
    dataset = lavis_dataset(ROWS, folders)
    path = truth_file(folders, [["z.jpg", "Grass"], ["a.jpg", "a cow"]])
    assert not evaluate_with_both(dataset, truth_file=path)[1]
    assert "2 of 2 pairs are not in this split, the first is ['z.jpg', 'Grass']" in caplog.text


@pytest.mark.parametrize(
    "content, message",
    [
        ("{}", "expected a JSON list of further valid pairs"),
        ("[]", "expected a JSON list of further valid pairs"),
        ("[", "is not JSON"),
        ('[["a.jpg", "x"], ["a.jpg", 3]]', r"entry 1 is \['a.jpg', 3\]; expected"),
        ("[[true, false]]", "entry 0 is"),
        ('[["a.jpg"]]', "entry 0 is"),
        ('["ab"]', "entry 0 is 'ab'"),
    ],
)
def test_invalid_truth_file_is_rejected(folders, content, message):
    path = folders / "truth.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        MafaRetrievalTask({"truth_file": str(path)})
    with pytest.raises(FileNotFoundError, match="run.truth_file: no such file"):
        MafaRetrievalTask({"truth_file": str(folders / "none.json")})


# End to end


def test_evaluate_reproduces_the_measurement_of_the_demo(folders):
    """Also with a truth file and saved scores, by the command's own config."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    weights = load_model("albef_mafa", "tiny").state_dict()
    config = {"model": {"arch": "albef_mafa", "model_type": "tiny"}}
    torch.save({"model": weights, "config": config}, folders / "checkpoint_last.pth")
    sizes = [f"datasets.toy_scenes.build_info.{n}" for n in ("train_size=30", "test_size=40")]
    trained = SimpleNamespace(
        config=str(ROOT / "projects/mafa/train/albef_toy.yaml"),
        options=tuple(sizes),
        folder=folders,
        checkpoint=folders / "checkpoint_last.pth",
    )
    test = toy_world({"train_size": 30, "test_size": 40}, "clustered")["test"]
    ((_, expected),) = measure([trained], [trained])
    path = truth_file(folders, [[test.image[0], test.text[0]]])
    options = [
        f"model.finetuned={trained.checkpoint}",
        *sizes,
        f"run.k_test={K_TEST}",
        f"run.output_dir={folders}",
        "run.job_id=job",
        "run.save_scores=True",
        f"run.truth_file={path}",
        "run.evaluate=True",
    ]
    try:
        run(str(ROOT / "projects/mafa/eval/retrieval_toy.yaml"), options)
    finally:
        torch.set_num_threads(threads)
    lines = (folders / "job" / "log.jsonl").read_text().splitlines()
    record = next(r for r in map(json.loads, lines) if r["kind"] == "eval")
    common = record.keys() & expected.keys()
    assert {"txt_r1", "agg_metrics", "valid_txt_r1", "txt_map_r", "img_map_r"} <= common
    assert {key: record[key] for key in common} == pytest.approx({k: expected[k] for k in common})
    saved = read_scores(folders / "job" / "result" / "scores_test.npz")
    recomputed = retrieval_with_truth(saved.scores_i2t, saved.scores_t2i, test.truth_matrix())
    assert recomputed == pytest.approx({key: record[key] for key in recomputed})
    assert "eccv_caption" in sys.modules and not any(key.startswith("eccv") for key in record)


def test_missing_truth_file_is_a_config_problem(folders):
    options = [f"run.truth_file={folders / 'none.json'}", f"run.output_dir={folders}"]
    options.append("run.evaluate=True")
    with pytest.raises(ConfigError, match="run.truth_file: no such file"):
        run(str(ROOT / "projects/mafa/eval/retrieval_toy.yaml"), options)


def test_pairs_of_another_split_keep_the_truth_of_the_split(toy, folders):
    path = truth_file(folders, [["z.jpg", "Grass"]])
    assert evaluate_with_both(toy["val"], truth_file=path)[1] == evaluate_with_both(toy["val"])[1]
    assert "valid_txt_r1" in evaluate_with_both(toy["val"])[1]
