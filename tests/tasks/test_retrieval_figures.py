"""Figures in addition to LAVIS's: COCO's test split, all valid pairs, saved scores."""

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
from lavis_mafa.toyworld.measure import K_TEST, measure, toy_world

pytest.importorskip("eccv_caption")


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Where LAVIS's retrieval task writes its figures."""
    for name in ("output_dir", "result_dir"):
        monkeypatch.setitem(registry.mapping["paths"], name, str(tmp_path))
    return tmp_path


class Scores:
    """A model with fixed scores."""

    def __init__(self, dataset):
        rng = np.random.default_rng(4)
        shape = len(dataset.image), len(dataset.text)
        self.tables = rng.random(shape, np.float32), rng.random(shape[::-1], np.float32)

    def compute_sim_matrix(self, data_loader, task_cfg):
        return self.tables


def of_lavis(rows, folder):
    """LAVIS's own evaluation set of an annotation file."""
    path = folder / "karpathy.json"
    path.write_text(json.dumps(rows))
    return RetrievalEvalDataset(None, BlipCaptionProcessor(), str(folder), [str(path)])


def evaluated(dataset, kind=MafaRetrievalTask, split="test", **cfg):
    """The scores that a task got, its figures, and those of LAVIS's task."""
    model, loader = Scores(dataset), SimpleNamespace(dataset=dataset)
    task = kind({"k_test": 0, **cfg})
    figures = task.after_evaluation(task.evaluation(model, loader), split_name=split, epoch=0)
    return model.tables, figures, RetrievalTask({}).evaluation(model, loader)


@pytest.fixture
def coco(monkeypatch, folders):
    """A data set that is taken for COCO's test split, and the package's data of it."""
    metrics = small_metrics(5)
    use_small(monkeypatch, metrics)
    return of_lavis(karpathy(metrics, six=(1, 8)), folders), metrics


# COCO's test split


@pytest.mark.strict_smoke
@pytest.mark.parametrize("kind", [MafaRetrievalTask, MafaPretrainTask])
def test_figures_of_coco_stand_beside_those_of_lavis(coco, kind, folders):
    dataset, metrics = coco
    scores, figures, theirs = evaluated(dataset, kind)
    added = {key: value for key, value in figures.items() if key not in theirs}
    ids = eccv.coco_ids(
        dataset.image, [row["caption"] for row in dataset.annotation], None, metrics
    )
    assert added == eccv.eccv_scores(*scores, *ids, metrics) and len(added) == 24
    assert {key: figures[key] for key in theirs} == theirs
    # LAVIS's line of the file stays as it is, ours is the next one.
    lines = [json.loads(line) for line in (folders / "evaluate.txt").read_text().splitlines()]
    assert lines == [theirs, added, theirs]


def test_other_images_have_no_such_figures(coco, folders):
    dataset, metrics = coco
    rows = karpathy(metrics)
    rows[0]["image"] = "val2014/COCO_val2014_000000000001.jpg"
    _, figures, theirs = evaluated(of_lavis(rows, folders))
    assert figures == theirs


def test_without_the_package_the_log_tells_how_to_get_it(coco, monkeypatch, caplog):
    def missing():
        raise ImportError(f"COCO's further positives need a package: {eccv.INSTALL}")

    monkeypatch.setattr(eccv, "load_metrics", missing)
    _, figures, theirs = evaluated(coco[0])
    assert figures == theirs
    assert [r.message for r in caplog.records if "pip install eccv_caption" in r.message] != []


def test_captions_that_are_not_coco_s_cost_only_these_figures(coco, folders, caplog):
    rows = karpathy(coco[1])
    rows[2]["caption"] = rows[2]["caption"][:1]
    _, figures, theirs = evaluated(of_lavis(rows, folders))
    assert figures == theirs and "1 images have fewer than 5 captions" in caplog.text


def test_re_ranking_depth_is_logged_once(coco, caplog):
    caplog.set_level(logging.INFO)
    dataset = coco[0]
    task = MafaRetrievalTask({"k_test": 4})
    for _ in range(2):
        task.evaluation(Scores(dataset), SimpleNamespace(dataset=dataset))
    told = [r.message for r in caplog.records if "run.k_test" in r.message]
    assert len(told) == 1 and "only the 4 best candidates" in told[0]
    for k_test in (0, 52):  # nothing is re-ranked; everything is
        caplog.clear()
        evaluated(dataset, k_test=k_test)
        assert "run.k_test" not in caplog.text


def test_only_the_main_process_scores_and_saves(coco, monkeypatch, folders):
    monkeypatch.setattr("lavis_mafa.tasks.mafa_retrieval.is_main_process", lambda: False)
    task = MafaRetrievalTask({"k_test": 0, "save_scores": True})
    loader = SimpleNamespace(dataset=coco[0])
    assert task.evaluation(Scores(coco[0]), loader) is None
    assert not list(folders.glob("evaluate*")) and not list(folders.glob("scores*"))


# Saved scores


@pytest.mark.strict_smoke
def test_scores_are_saved_for_the_command(coco, folders):
    dataset, metrics = coco
    scores, figures, _ = evaluated(dataset, split="coco_retrieval.test", save_scores=True)
    path = folders / "scores_coco_retrieval.test.npz"
    saved = read_scores(path)
    assert np.array_equal(saved.scores_i2t, scores[0])
    assert np.array_equal(saved.scores_t2i, scores[1])
    assert saved.images == dataset.image
    # Captions as people wrote them, not as the model read them.
    assert saved.captions_per_image() == [row["caption"] for row in dataset.annotation]
    assert saved.captions[0] != dataset.text[0]
    assert main(["eccv", str(path)]) == 0
    told = json.loads(path.with_name("scores_coco_retrieval.test_eccv.json").read_text())
    assert told == {key: pytest.approx(figures[key], abs=1e-3) for key in told}


def test_scores_are_saved_where_it_is_asked_for(coco, folders):
    evaluated(coco[0])
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
        # Once processed, two captions are the same.
        ([["b.jpg", "A dog running."]], {(1, 0), (1, 3)}),
        ([["b.jpg", "an  ANIMAL"], ["z.jpg", "Grass"], [7, 0]], {(1, 1)}),
        ([["a.jpg", "An animal"]], set()),  # an original pair
    ],
)
def test_further_pairs_by_name_and_by_number(folders, pairs, added):
    dataset = of_lavis(ROWS, folders)
    plain = original_pairs(dataset)
    assert set(zip(*map(np.ndarray.tolist, np.nonzero(plain)), strict=True)) == {
        *((0, 0), (0, 1), (1, 2), (2, 3), (2, 4))
    }
    found = truth_with(dataset, read_truth(truth_file(folders, pairs)))
    new = found & ~plain
    assert set(zip(*map(np.ndarray.tolist, np.nonzero(new)), strict=True)) == added
    assert (found >= plain).all()


def test_figures_against_truth_from_a_file(folders):
    dataset = of_lavis(ROWS, folders)
    path = truth_file(folders, [["b.jpg", "An animal"], ["a.jpg", "Grass"]])
    scores, figures, theirs = evaluated(dataset, truth_file=path)
    truth = original_pairs(dataset)
    truth[1, 1] = truth[0, 4] = True
    added = {key: value for key, value in figures.items() if key not in theirs}
    assert added == retrieval_with_truth(*scores, truth)
    assert {key: figures[key] for key in theirs} == theirs
    # Without a file nothing is added.
    assert evaluated(dataset)[1] == theirs


def test_truth_from_a_file_adds_to_what_the_split_knows(toy, folders):
    known = toy["val"]
    image, text = np.argwhere(~known.truth_matrix())[0].tolist()
    path = truth_file(folders, [[image, text]])
    scores, figures, _ = evaluated(known, truth_file=path)
    richer = known.truth_matrix().copy()
    richer[image, text] = True
    expected = retrieval_with_truth(*scores, richer)
    assert {key: figures[key] for key in expected} == expected
    assert expected["txt_map_r"] != retrieval_with_truth(*scores, known.truth_matrix())["txt_map_r"]


def test_pairs_of_another_split_are_skipped_with_a_warning(folders, caplog):
    dataset = of_lavis(ROWS, folders)
    path = truth_file(folders, [["z.jpg", "Grass"], ["a.jpg", "a cow"]])
    _, figures, theirs = evaluated(dataset, truth_file=path)
    assert figures == theirs
    assert "2 of 2 pairs are not in this split, the first is ['z.jpg', 'Grass']" in caplog.text


@pytest.mark.parametrize(
    "content, told",
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
def test_invalid_truth_file_is_refused(folders, content, told):
    path = folders / "truth.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=told):
        MafaRetrievalTask({"truth_file": str(path)})
    with pytest.raises(FileNotFoundError, match="run.truth_file: no such file"):
        MafaRetrievalTask({"truth_file": str(folders / "none.json")})


# The whole way


def test_evaluate_gives_the_figures_of_the_demonstration(folders):
    """And those of a file of truth and of saved scores, by the command's own config."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    weights = load_model("albef_mafa", "tiny").state_dict()
    of = {"model": {"arch": "albef_mafa", "model_type": "tiny"}}
    torch.save({"model": weights, "config": of}, folders / "checkpoint_last.pth")
    sizes = [f"datasets.toy_scenes.build_info.{n}" for n in ("train_size=30", "test_size=40")]
    trained = SimpleNamespace(
        config=str(ROOT / "projects/mafa/train/albef_toy.yaml"),
        options=tuple(sizes),
        folder=folders,
        checkpoint=folders / "checkpoint_last.pth",
    )
    test = toy_world(30, 40)["test"]
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
    ]
    try:
        run(str(ROOT / "projects/mafa/eval/retrieval_toy.yaml"), options, evaluate=True)
    finally:
        torch.set_num_threads(threads)
    lines = (folders / "job" / "log.jsonl").read_text().splitlines()
    told = next(r for r in map(json.loads, lines) if r["kind"] == "eval")
    both = told.keys() & expected.keys()
    assert {"txt_r1", "agg_metrics", "valid_txt_r1", "txt_map_r", "img_map_r"} <= both
    assert {key: told[key] for key in both} == pytest.approx({k: expected[k] for k in both})
    saved = read_scores(folders / "job" / "result" / "scores_test.npz")
    again = retrieval_with_truth(saved.scores_i2t, saved.scores_t2i, test.truth_matrix())
    assert again == pytest.approx({key: told[key] for key in again})
    assert "eccv_caption" in sys.modules and not any(key.startswith("eccv") for key in told)


def test_a_missing_file_of_truth_is_a_problem_of_the_config(folders):
    options = [f"run.truth_file={folders / 'none.json'}", f"run.output_dir={folders}"]
    with pytest.raises(ConfigError, match="run.truth_file: no such file"):
        run(str(ROOT / "projects/mafa/eval/retrieval_toy.yaml"), options, evaluate=True)


def test_pairs_of_another_split_leave_what_the_split_knows(toy, folders):
    path = truth_file(folders, [["z.jpg", "Grass"]])
    assert evaluated(toy["val"], truth_file=path)[1] == evaluated(toy["val"])[1]
    assert "valid_txt_r1" in evaluated(toy["val"])[1]
