"""Studies of real pictures: preparation, what is measured, and a whole study of 60 pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from small_study import plan_for

from lavis_mafa.algorithm.binary import area_under_roc
from research.picture_data import labels_of, verified_rows
from research.picture_measures import (
    KnownSplit,
    auc_by_image,
    ceilings,
    itm_figures,
    measure,
)
from research.studies.plan import check

STUDIES = ROOT / "projects/mafa/studies"
TINY = {"start_epochs": 1, "warm_up_epochs": 1, "uniform_epochs": 1, "epochs": 1} | {
    "con_d_epochs": 1,
    "batch": 8,
    "search_space": 16,
}


@pytest.fixture
def folder(tmp_path):
    """40 pictures of two classes in the layout of the studies; captions are shared in a class."""
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    train, test, classes = [], [], {}
    for number in range(40):
        kind = number % 2
        pixels = rng.integers(0, 90, (48, 48, 3)).astype(np.uint8)
        pixels[..., kind] += np.uint8(150)
        Image.fromarray(pixels).save(tmp_path / f"images/{number}.png")
        classes[f"{number}.png"] = ["red", "green"][kind]
        texts = [f"{classes[f'{number}.png']} place {number % 6} .", f"a {number} of its own"]
        row = {"image": f"images/{number}.png", "caption": texts}
        (test if number < 12 else train).append(row)
    for name, content in (("train", train), ("test", test), ("meta", {"classes": classes})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_only_training_images_have_labels(folder):
    labels = labels_of(folder)
    assert len(labels) == 28 and labels["images/13.png"] == "green"
    assert not {f"images/{number}.png" for number in range(12)} & set(labels)


def test_verified_images_are_a_share_and_do_not_depend_on_others(folder):
    rows = verified_rows(folder, 0.5, seed=3)
    images = {row["image"] for row in rows}
    assert 6 <= len(images) <= 22 and all(len(row["caption"]) == 2 for row in rows)
    train = json.loads((folder / "train.json").read_text())
    (folder / "train.json").write_text(json.dumps(train[:10]))
    kept = {row["image"] for row in train[:10]}
    assert {row["image"] for row in verified_rows(folder, 0.5, seed=3)} == images & kept
    assert {row["image"] for row in verified_rows(folder, 1.0, seed=3)} == kept


def test_ceilings_are_what_a_random_order_of_the_valid_reaches():
    truth = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1]], bool)
    own = np.array([[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]], bool)
    rng = np.random.default_rng(0)
    hits = np.zeros(2)
    for _ in range(4000):  # best of the valid ones by random scores
        scores = np.where(truth, rng.random(truth.shape), -1)
        hits[0] += own[np.arange(3), scores.argmax(axis=1)].mean()
        hits[1] += own[scores.argmax(axis=0), np.arange(4)].mean()
    found = ceilings(own, truth)
    expected = 100 * hits / 4000
    assert [found["ceiling_txt_r1"], found["ceiling_img_r1"]] == pytest.approx(expected, abs=2)


def test_itm_is_measured_on_valid_strangers_against_two_kinds_of_invalid_pairs():
    own = np.eye(4, dtype=bool)
    truth = own.copy()
    truth[0, 1] = truth[1, 0] = True
    same = np.array([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 1]], bool)
    match = np.where(truth, 0.6, np.where(same, 0.7, 0.1))  # own pairs would be .6, too
    match[0, 2] = 0.5
    seen = []

    def probability(images, texts):
        seen.append(set(zip(images.tolist(), texts.tolist(), strict=True)))
        return match[images, texts]

    one = SimpleNamespace(probability_of_match=probability)
    found = itm_figures(one, KnownSplit(None, own, truth, same, 0, None))
    assert seen[0] == {(0, 1), (1, 0)}
    assert found == {"itm_auc_same": 0.25, "itm_auc_far": 1.0}
    found = itm_figures(one, KnownSplit(None, own, truth, None, 0, None))
    assert found["itm_auc_same"] is None and 0 < found["itm_auc_far"] < 1


def test_a_model_is_measured_on_the_test_images(folder, tmp_path):
    from lavis_mafa import load_model

    torch.manual_seed(0)
    model = load_model("albef_mafa", "tiny")
    config = {"model": {"arch": "albef_mafa", "model_type": "tiny"}}
    torch.save({"model": model.state_dict(), "config": config}, tmp_path / "last.pth")
    info = "datasets.image_text_json.build_info"
    files = [f"{info}.annotations.{s}.storage={folder}/{s}.json" for s in ("train", "test")]
    run = SimpleNamespace(
        config=str(ROOT / "projects/mafa/train/albef_small_own_data.yaml"),
        options=(
            "model.model_type=tiny",
            "model.image_size=32",
            f"{info}.images.storage={folder}",
            *files,
        ),
        folder=tmp_path,
        checkpoint=tmp_path / "last.pth",
    )
    ((same_run, figures),) = measure([run], [])
    assert same_run is run
    # Each of 12 images has two captions; one of them is that of another image, too.
    assert figures["ceiling_txt_r1"] == pytest.approx(100 * 2 / 3)
    assert figures["ceiling_img_r1"] == pytest.approx(100 * (0.5 + 1) / 2)
    assert figures["valid_txt_r1"] >= figures["txt_r1"] and 0 <= figures["itm_auc_same"] <= 1
    assert figures["itm_auc_far"] is not None and "judged_auc_itm" not in figures
    by_image = figures["by_image"]
    assert set(by_image) == {"itc_r1", "itc_valid_r1", "itm_auc_same"}
    assert {len(values) for values in by_image.values()} == {12}
    for name, values in by_image.items():
        assert np.mean(values) == pytest.approx(figures[name])
    assert figures["itc_valid_r1"] >= figures["itc_r1"]
    assert figures["false_negative_rate"] is None  # no log of training


def test_figures_of_images_vary_as_their_auc_does():
    """Their mean is the AUC, and the AUC without an image is near the mean without it."""
    rng = np.random.default_rng(0)
    images, valid = np.repeat(np.arange(60), 5), rng.random(300) < 0.3
    scores = np.round(rng.normal(size=300) + valid, 1)  # with ties
    values = auc_by_image(scores, valid, images)
    auc = area_under_roc(scores, valid)
    assert values.mean() == pytest.approx(auc)
    for image in range(60):
        kept = images != image
        without = area_under_roc(scores[kept], valid[kept])
        assert np.delete(values, image).mean() == pytest.approx(without, abs=5e-4)


@pytest.mark.parametrize(
    "name", ["ucm", "photographs", "photographs --at set", "ucm_features", "ucm_features --at set"]
)
def test_all_runs_of_the_studies_have_valid_configs(name, folder, tmp_path):
    name, *section = name.split(" ")
    plan = plan_for(name, *section, "--set", f"data={folder}", "--output", tmp_path)
    check(plan)
    uses = {job.name.split("/")[0]: " ".join(job.command) for job in plan.jobs.values()}
    assert f"{folder}/train.json" in uses["base"] and "negatives=uniform" in uses["warm_up"]
    oracles = [run for run, command in uses.items() if "con_d.arch=oracle" in command]
    rows = {"ucm": 5, "photographs": 0, "ucm_features": 0 if section else 1}
    assert len(oracles) == rows[name]
    assert ("image_start" in uses) == (name == "ucm")
    if oracles:
        assert "verified.jsonl" in uses["con_d"] and "con_d" in oracles


@pytest.mark.research
@pytest.mark.timeout(900)
def test_a_study_on_kept_features_from_end_to_end(folder, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    names = [f"images/{number}.png" for number in range(40)]
    (kept / "names.txt").write_text("\n".join(names))
    features = np.random.default_rng(0).normal(size=(40, 2, 4, 12)).astype(np.float16)
    features[::2, ..., 0] += 3  # the class
    np.save(kept / "features.npy", features)
    values = {**TINY, "warm_up_batch": 8, "vocabulary": 200, "data": folder, "features": kept}
    command = [sys.executable, "-m", "research", "study", str(STUDIES / "photographs.yaml")]
    command += ["--set", *(f"{key}={value}" for key, value in values.items()), "--seeds", "0"]
    command += ["--output", str(tmp_path / "out"), "--rows", "warm_up", "base", "ecm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    figures = [row["seeds"]["0"] for row in found.values()]
    assert len(found) == 3 and all(0 < one["valid_txt_r10"] <= 100 for one in figures)
