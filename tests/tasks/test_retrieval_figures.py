"""Scores in addition to LAVIS's: all valid pairs, saved scores."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from lavis.common.registry import registry
from lavis.datasets.datasets.retrieval_datasets import RetrievalEvalDataset
from lavis.processors.blip_processors import BlipCaptionProcessor
from lavis.tasks.retrieval import RetrievalTask

from lavis_mafa import load_model
from lavis_mafa.data.known_truth import original_pairs, read_truth, truth_with
from lavis_mafa.tasks import MafaPretrainTask, MafaRetrievalTask
from lavis_mafa.tasks.recall import retrieval_with_truth
from lavis_mafa.training.session import run
from research.toy_measures import K_TEST, measure, toy_world


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Where LAVIS's retrieval task writes its figures."""
    for name in ("output_dir", "result_dir"):
        monkeypatch.setitem(registry.mapping["paths"], name, str(tmp_path))
    return tmp_path


ROWS = [
    {"image": "a.jpg", "caption": ["A dog running.", "An animal"]},
    {"image": "b.jpg", "caption": ["Two cats"]},
    {"image": "c.jpg", "caption": ["A dog  running", "Grass"]},
]


def truth_file(folder, pairs):
    path = folder / "truth.json"
    path.write_text(json.dumps(pairs))
    return str(path)


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


def test_re_ranking_depth_is_logged_once(folders, caplog):
    caplog.set_level(logging.INFO)
    dataset = lavis_dataset(ROWS, folders)
    # Only with figures that the depth limits.
    truth = truth_file(folders, [["b.jpg", "An animal"]])
    task = MafaRetrievalTask({"k_test": 2, "truth_file": truth})
    for _ in range(2):
        task.evaluation(FixedScores(dataset), SimpleNamespace(dataset=dataset))
    messages = [r.message for r in caplog.records if "run.k_test" in r.message]
    assert len(messages) == 1 and "only the 2 best candidates" in messages[0]
    for k_test in (0, 5):  # no re-ranking; everything is re-ranked
        caplog.clear()
        evaluate_with_both(dataset, k_test=k_test, truth_file=truth)
        assert "run.k_test" not in caplog.text


def test_only_the_main_process_scores_and_saves(monkeypatch, folders):
    dataset = lavis_dataset(ROWS, folders)
    monkeypatch.setattr("lavis_mafa.tasks.mafa_retrieval.is_main_process", lambda: False)
    task = MafaRetrievalTask({"k_test": 0, "save_scores": True})
    model, loader = FixedScores(dataset), SimpleNamespace(dataset=dataset)
    assert task.evaluation(model, loader) is None
    assert model.asked["k_test"] == 0  # every process takes part in the scoring
    assert not list(folders.glob("evaluate*")) and not list(folders.glob("scores*"))


# Saved scores


@pytest.mark.strict_smoke
def test_scores_are_saved_with_the_original_captions(folders):
    dataset = lavis_dataset(ROWS, folders)
    scores, _, _ = evaluate_with_both(dataset, split="coco_retrieval.test", save_scores=True)
    saved = np.load(folders / "scores_coco_retrieval.test.npz")
    assert np.array_equal(saved["scores_i2t"], scores[0])
    assert np.array_equal(saved["scores_t2i"], scores[1])
    assert saved["images"].tolist() == dataset.image
    assert saved["captions"].tolist() == [text for row in ROWS for text in row["caption"]]
    assert saved["captions"][0] != dataset.text[0]
    assert saved["image_of"].tolist() == [0, 0, 1, 2, 2]


def test_scores_are_saved_only_on_request(folders):
    evaluate_with_both(lavis_dataset(ROWS, folders))
    assert not list(folders.glob("scores*"))


# Truth from a file


@pytest.mark.strict_smoke
@pytest.mark.parametrize(
    "pairs, added",
    [
        ([["b.jpg", "An animal"], ["a.jpg", "Grass"]], {(1, 1), (0, 4)}),
        ([[1, 1], [0, 4]], {(1, 1), (0, 4)}),
        # These two captions are equal after processing.
        ([["b.jpg", "A dog running."]], {(1, 0), (1, 3)}),
        ([["b.jpg", "an  ANIMAL"], ["z.jpg", "Grass"], [7, 0], [0, 5]], {(1, 1)}),
        ([["a.jpg", "An animal"]], set()),  # an original pair
    ],
)
def test_additional_pairs_by_name_and_by_index(folders, pairs, added):
    dataset = lavis_dataset(ROWS, folders)
    plain = original_pairs(dataset)
    assert set(zip(*map(np.ndarray.tolist, np.nonzero(plain)), strict=True)) == {
        (0, 0),
        (0, 1),
        (1, 2),
        (2, 3),
        (2, 4),
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


@pytest.mark.parametrize("kind", [MafaPretrainTask, MafaRetrievalTask])
def test_truth_file_extends_the_truth_of_the_split(toy, folders, kind):
    known = toy["val"]
    image, text = np.argwhere(~known.truth_matrix())[0].tolist()
    path = truth_file(folders, [[image, text]])
    scores, added, _ = evaluate_with_both(known, kind, truth_file=path)
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
    run(str(ROOT / "projects/mafa/eval/retrieval_toy.yaml"), options)
    lines = (folders / "job" / "log.jsonl").read_text().splitlines()
    record = next(r for r in map(json.loads, lines) if r["kind"] == "eval")
    common = record.keys() & expected.keys()
    assert {"txt_r1", "agg_metrics", "valid_txt_r1", "txt_map_r", "img_map_r"} <= common
    assert {key: record[key] for key in common} == pytest.approx({k: expected[k] for k in common})
    saved = np.load(folders / "job" / "result" / "scores_test.npz")
    scores = saved["scores_i2t"], saved["scores_t2i"]
    recomputed = retrieval_with_truth(*scores, test.truth_matrix())
    assert recomputed == pytest.approx({key: record[key] for key in recomputed})
