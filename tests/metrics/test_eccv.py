"""Scores of ECCV Caption, CxC and COCO: ids, ranking, slow loops, the command."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from lavis.datasets.datasets.retrieval_datasets import RetrievalEvalDataset
from lavis.processors.blip_processors import BlipCaptionProcessor
from runs import finish, spawn
from small_coco import (
    file_name,
    karpathy,
    slow_figures,
    small_metrics,
    use_small,
)

from lavis_mafa.cli import main
from lavis_mafa.metrics import eccv
from lavis_mafa.metrics.score_files import SavedScores, captions_of, read_scores, save_scores

pytest.importorskip("eccv_caption")


@pytest.fixture(scope="module")
def metrics():
    return eccv._load_metrics()


@pytest.fixture(scope="module")
def test_split(metrics):
    """Names and captions as in the real test split, some images with six captions."""
    rows = karpathy(metrics, six=(0, 17, 4999))
    return [row["image"] for row in rows], [row["caption"] for row in rows]


@pytest.fixture
def small():
    return small_metrics()


def ids_of(metrics, **options):
    rows = karpathy(metrics, **options)
    return eccv.coco_ids(
        [row["image"] for row in rows], [row["caption"] for row in rows], metrics=metrics
    )


# Ids


@pytest.mark.strict_smoke
def test_ids_of_the_real_test_split(metrics, test_split):
    names, captions = test_split
    image_ids, caption_ids = eccv.coco_ids(names, captions)
    assert [file_name(caption_id) for caption_id in image_ids.tolist()] == names
    assert names[0] == "val2014/COCO_val2014_000000391895.jpg"
    texts = [text for of_image in captions for text in of_image]
    assert len(caption_ids) == len(texts) == 25003
    for text, caption_id in zip(texts, caption_ids.tolist(), strict=True):
        assert (caption_id == -1) == text.startswith("One more") and (
            caption_id == -1 or str(caption_id) in text
        )
    assert np.flatnonzero(caption_ids < 0).tolist() == [5, 91, 25002]
    assert set(caption_ids[caption_ids >= 0].tolist()) == set(metrics.coco_ids.tolist())


@pytest.mark.strict_smoke
def test_test_split_is_recognised_by_its_file_names(test_split):
    names = test_split[0]
    assert eccv.is_coco_test(names)
    assert eccv.is_coco_test([name.split("_")[-1] for name in names[::-1]])  # 000000391895.jpg
    assert not eccv.is_coco_test(names[:-1])
    assert not eccv.is_coco_test([*names[:-1], names[0]])
    assert not eccv.is_coco_test([*names[:-1], "val2014/COCO_val2014_000000000042.jpg"])
    assert not eccv.is_coco_test([*names[:-1], "dog.jpg"])
    assert not eccv.is_coco_test([*names, "dog.jpg"])
    assert not eccv.is_coco_test([])


def test_reordered_images_keep_their_ids(small):
    rows = karpathy(small)
    reversed_rows = rows[::-1]
    reordered = eccv.coco_ids(
        [r["image"] for r in reversed_rows], [r["caption"] for r in reversed_rows], small
    )
    plain = ids_of(small)
    assert reordered[0].tolist() == plain[0][::-1].tolist()
    assert reordered[1].tolist() == plain[1].reshape(-1, 5)[::-1].ravel().tolist()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rows: rows.pop(), r"these 9 images are not COCO's test split .*; 1 are missing"),
        (lambda rows: rows[3].update(image="dog.jpg"), r"1 are others, such as 'dog.jpg'; 1"),
        (lambda rows: rows[3].update(image=file_name(5)), "1 are others, such as 'val2014/"),
        (lambda rows: rows[3].update(image=rows[4]["image"]), "1 are missing"),
        (lambda rows: rows.append(rows[0]), r"these 11 images are not .*; 0 are missing"),
        (lambda rows: rows[3]["caption"].pop(), r"1 images have fewer than 5 .* with 4; expected"),
    ],
)
def test_other_data_are_rejected(small, change, message):
    rows = karpathy(small)
    change(rows)
    with pytest.raises(ValueError, match=message):
        eccv.coco_ids([r["image"] for r in rows], [r["caption"] for r in rows], small)


def test_other_data_are_rejected_with_the_real_ids():
    with pytest.raises(ValueError, match="these 2 images .* 5000 images .* 5000 are missing"):
        eccv.coco_ids(["a.jpg", "b.jpg"], [["x"] * 5] * 2)
    with pytest.raises(ValueError, match="shorter than argument 1"):
        eccv.coco_ids([r["image"] for r in karpathy(eccv._load_metrics())], [["x"] * 5])


# Ranking


@st.composite
def rankings(draw):
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    queries, candidates = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    levels = draw(st.sampled_from([1, 2, 5, 10**6]))
    scores = rng.integers(0, levels, (queries, candidates)).astype(np.float32) - 100
    if draw(st.booleans()):
        scores[scores < 1] = -np.inf
    rows = rng.permutation(queries)[: draw(st.integers(0, queries))]
    columns = np.sort(rng.permutation(candidates)[: draw(st.integers(1, candidates))])
    return scores, rows, columns, draw(st.integers(1, 45))


@settings(max_examples=200, deadline=None)
@given(rankings())
def test_best_candidates_equal_a_stable_sort(given_scores):
    scores, rows, columns, k = given_scores
    best = eccv._best_candidates(scores, rows, columns, k)
    assert best.shape == (len(rows), min(k, len(columns)))
    for row, found in zip(rows.tolist(), best.tolist(), strict=True):
        assert found == sorted(columns.tolist(), key=lambda c: (-scores[row, c], c))[:k]


def test_nan_scores_are_rejected():
    scores = np.zeros((2, 3), np.float32)
    scores[1, 2] = np.nan
    with pytest.raises(ValueError, match="query 1 contain NaN"):
        eccv._best_candidates(scores, np.arange(2), np.arange(3), 2)


# Scores


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 4, 10**6]), st.sets(st.integers(0, 9)))
def test_scores_equal_slow_loop(seed, levels, six):
    metrics = small_metrics(seed)
    image_ids, caption_ids = ids_of(metrics, six=sorted(six))
    rng = np.random.default_rng(seed)
    shape = (len(image_ids), len(caption_ids))
    i2t = rng.integers(0, levels, shape).astype(np.float32)
    t2i = rng.integers(0, levels, shape[::-1]).astype(np.float32)
    scores = eccv.eccv_scores(i2t, t2i, image_ids, caption_ids, metrics)
    assert scores == pytest.approx(slow_figures(i2t, t2i, image_ids, caption_ids, metrics))
    # Neither the scale nor the order of the images matters.
    scaled = eccv.eccv_scores(2 * i2t - 7, t2i / 4, image_ids, caption_ids, metrics)
    assert scaled == scores
    if levels == 10**6:
        texts, images = rng.permutation(shape[1]), rng.permutation(shape[0])
        i2t += np.arange(shape[1]) / shape[1]  # avoids ties
        t2i += np.arange(shape[0]) / shape[0]
        permuted = eccv.eccv_scores(
            i2t[images][:, texts], t2i[texts][:, images], image_ids[images], caption_ids[texts],
            metrics,
        )  # fmt: skip
        assert permuted == pytest.approx(
            eccv.eccv_scores(i2t, t2i, image_ids, caption_ids, metrics), abs=1e-9
        )


def test_caption_without_id_is_ignored(small):
    """However high its scores are."""
    rng = np.random.default_rng(3)
    i2t, t2i = rng.random((10, 50)), rng.random((50, 10))
    plain = eccv.eccv_scores(i2t, t2i, *ids_of(small), small)
    position = 5  # of the sixth caption of the first image
    more_i2t = np.insert(i2t, position, 9.0, axis=1)
    more_t2i = np.insert(t2i, position, 9.0, axis=0)
    assert eccv.eccv_scores(more_i2t, more_t2i, *ids_of(small, six=(0,)), small) == plain


def scores_by_id(ids, i2t_of, t2i_of):
    """Return scores in both directions: zero, plus the given score for the pairs of each truth."""
    image_ids, caption_ids = ids
    row = {id_: n for n, id_ in enumerate(image_ids.tolist())}
    column = {id_: n for n, id_ in enumerate(caption_ids.tolist()) if id_ >= 0}
    i2t = np.zeros((len(image_ids), len(caption_ids)), np.float32)
    t2i = np.zeros((len(caption_ids), len(image_ids)), np.float32)
    for truth, score in i2t_of:
        for image, captions in truth.items():
            i2t[row[image], [column[caption] for caption in captions if caption in column]] += score
    for truth, score in t2i_of:
        for caption, images in truth.items():
            t2i[column[caption], [row[image] for image in images]] += score
    return i2t, t2i


def imperfect_scores(metrics, ids):
    """Rank ECCV Caption's positives first, ordered by agreement with CxC and COCO; return scores
    below 100.
    """
    truths = (metrics.eccv_gts, 4), (metrics.cxc_gts, 1), (metrics.coco_gts, 2)
    ways = [[(truth[way], score) for truth, score in truths] for way in ("i2t", "t2i")]
    scores = eccv.eccv_scores(*scores_by_id(ids, *ways), *ids, metrics)
    assert len(scores) == 24
    return {key: value for key, value in scores.items() if value != 100}


def maximum_cxc_recall(metrics):
    """Return the highest reachable CxC R@1: CxC excludes the own image of some captions."""
    own, valid = metrics.coco_gts["t2i"], metrics.cxc_gts["t2i"]
    return 100 * float(np.mean([own[query][0] in valid[query] for query in valid]))


@pytest.mark.slow
def test_ideal_scores_on_all_of_the_real_data(metrics, test_split):
    # Two queries have a valid caption outside the 25,000: positions R = 19 and R = 13 are wrong.
    best = 100 * (1261 - 1 / 19 - 1 / 13) / 1261
    assert imperfect_scores(metrics, eccv.coco_ids(*test_split)) == pytest.approx(
        {
            "eccv_txt_r_precision": best,
            "eccv_txt_map_r": best,
            "cxc_img_r1": maximum_cxc_recall(metrics),
        }
    )


# Files and the command


@pytest.fixture
def saved_scores(small, tmp_path):
    """The scores of a LAVIS data set in COCO's format."""
    (tmp_path / "test.json").write_text(json.dumps(karpathy(small, six=(4,))))
    dataset = RetrievalEvalDataset(None, BlipCaptionProcessor(), "", [tmp_path / "test.json"])
    rng = np.random.default_rng(8)
    scores = rng.random((10, 51), np.float32), rng.random((51, 10), np.float32)
    return SavedScores.of(dataset, *scores)


def test_saved_scores_are_read_back(saved_scores, small, tmp_path):
    assert saved_scores.captions_per_image() == [
        row["caption"] for row in karpathy(small, six=(4,))
    ]
    read_back = read_scores(save_scores(saved_scores, tmp_path / "scores_test.npz"))
    for name in ("scores_i2t", "scores_t2i", "image_of"):
        assert np.array_equal(getattr(read_back, name), getattr(saved_scores, name))
        assert getattr(read_back, name).dtype == getattr(saved_scores, name).dtype
    assert (read_back.images, read_back.captions) == (saved_scores.images, saved_scores.captions)
    assert [path.name for path in tmp_path.glob("scores*")] == ["scores_test.npz"]


def test_captions_are_stored_unprocessed_if_available(toy):
    known = toy["val"]
    assert captions_of(known) == [[known.text[t] for t in known.img2txt[i]] for i in range(20)]


def test_files_without_scores_are_rejected(saved_scores, tmp_path):
    with pytest.raises(FileNotFoundError, match="run.save_scores: True writes one"):
        read_scores(tmp_path / "scores.npz")
    path = tmp_path / "wrong.npz"
    path.write_text("scores")
    with pytest.raises(ValueError, match="is not a file of scores"):
        read_scores(path)
    np.savez(path, scores_i2t=np.array([{}], object))
    with pytest.raises(ValueError, match="is not a file of scores"):
        read_scores(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match="is not a file of scores"):
        read_scores(tmp_path / "one.npy")
    saved_scores.captions.pop()
    with pytest.raises(ValueError, match="10 images and 50 captions, but scores"):
        read_scores(save_scores(saved_scores, path))


def test_command_writes_and_prints_a_table(saved_scores, small, tmp_path, monkeypatch, capsys):
    use_small(monkeypatch, small)
    path = save_scores(saved_scores, tmp_path / "scores_coco.test.npz")
    assert main(["report", str(path)]) == 0
    table = capsys.readouterr().out
    assert table == (tmp_path / "scores_coco.test_eccv.md").read_text()
    written = json.loads((tmp_path / "scores_coco.test_eccv.json").read_text())
    ids = ids_of(small, six=(4,))
    expected = eccv.eccv_scores(saved_scores.scores_i2t, saved_scores.scores_t2i, *ids, small)
    assert written == pytest.approx(expected, abs=1e-3)
    lines = [re.sub(" +", " ", line) for line in table.splitlines()]
    assert lines[0] == "| | COCO 1K | COCO 5K | CxC | ECCV |"
    cells = [f"{expected[f'{name}_img_r1']:.2f}" for name in ("coco1k", "coco5k", "cxc", "eccv")]
    assert f"| text to image, R@1 | {' | '.join(cells)} |" in lines
    assert f"| image to text, mAP@R | | | | {expected['eccv_txt_map_r']:.2f} |" in lines
    assert len(lines) == 12


def test_command_rejects_other_data(saved_scores, tmp_path):
    path = save_scores(saved_scores, tmp_path / "scores_test.npz")
    command = [sys.executable, "-m", "lavis_mafa", "report", path]
    output = finish(spawn(ROOT, command), status=1)
    assert "these 10 images are not COCO's test split" in output
    assert "RuntimeWarning" not in output and "Traceback" not in output
    assert not list(tmp_path.glob("*_eccv*"))


def test_error_explains_how_to_install_the_package(monkeypatch, saved_scores, tmp_path, caplog):
    monkeypatch.setitem(sys.modules, "eccv_caption", None)
    with pytest.raises(ImportError, match="pip install eccv_caption==0.1.0"):
        eccv._load_metrics()
    assert main(["report", str(save_scores(saved_scores, tmp_path / "s.npz"))]) == 1
    assert "pip install eccv_caption==0.1.0" in caplog.text
