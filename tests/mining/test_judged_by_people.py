"""`count` and `label quality` of data whose truth are judgements by people (build_info.truth)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image
from small_world import call, con_d

from lavis_mafa.mining.judged_pairs import INVALID, UNKNOWN, VALID, Judged
from lavis_mafa.mining.judging import TRUTH

IMAGES, CAPTIONS = 24, 2
INFO = "datasets.image_text_json.build_info"


@pytest.fixture(scope="module")
def world(tmp_path_factory, models):
    """A folder with pairs, judgements of half of them, and arguments of commands on them."""
    folder = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    pairs = []
    for k in range(IMAGES):
        pixels = rng.integers(0, 255, (40, 40, 3)).astype(np.uint8)
        (folder / "images").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"images/{k}.png")
        pairs += [{"image": f"images/{k}.png", "caption": f"picture {k} {c}"} for c in "ab"]
    (folder / "train.json").write_text(json.dumps(pairs))
    votes = {}
    for image in range(IMAGES):
        for text in range(len(pairs)):
            if text // CAPTIONS != image and rng.random() < 0.5:
                votes[image, text] = int(rng.integers(0, 5))
    rows = [
        {
            "image": f"{image}.png",
            "caption_of": f"images/{text // CAPTIONS}.png",
            "caption_index": text % CAPTIONS,
            **{"yes": yes, "no": 4 - yes},
        }
        for (image, text), yes in votes.items()
    ]
    (folder / "judgements.json").write_text(json.dumps(rows))
    model, judge, _ = models

    def of(output, *more):
        return [
            *("count", "--cfg-path", ROOT / "projects/mafa/train/albef_own_data.yaml"),
            *("--checkpoint", model, "--output", output, "--con-d", *con_d("a", judge)),
            *("--options", f"{INFO}.annotations.train.storage={folder / 'train.json'}"),
            *(f"{INFO}.images.storage={folder}", f"{INFO}.cache_dir={folder / 'cache'}"),
            *("model.model_type=tiny", "model.tokenizer=tiny_vocab.txt", "model.image_size=32"),
            *("run.device=cpu", "run.amp=False", "run.num_workers=0", "run.batch_size_train=8"),
            *("run.grit.queue_size=48", "run.grit.search_space=16", "run.batch_size_eval=24"),
            *(*more, "--sampling", "random"),
        ]

    return folder, votes, of


def verdict(votes, image, text):
    """Of four votes: 3 or 4 yes is at least 2/3, 0 or 1 at most 1/3."""
    yes = votes.get((image // CAPTIONS, text), 2)
    return VALID if yes > 2 else INVALID if yes < 2 else UNKNOWN


def test_judgements_count_as_a_loop(world, tmp_path, capsys):
    folder, votes, of = world
    truth_of_data = f"{INFO}.truth={folder / 'judgements.json'}"
    call(*of(tmp_path, truth_of_data, "--batch-sizes", 4, 8, 16))
    judged = Judged.load(tmp_path)
    truth = [verdict(votes, i, t) for i, t in zip(judged.image, judged.text, strict=True)]
    assert judged.truth.tolist() == truth
    counts = json.loads((tmp_path / "counts.json").read_text())
    known = judged.truth != UNKNOWN
    by_people = [one for one in counts["counts"] if one["judge"] == TRUTH]
    assert len(by_people) == 6 and all(0 < one["judged"] < 48 for one in by_people)
    text = (tmp_path / "counts.md").read_text()
    assert f"The truth of {known.sum()} of the {len(judged)} pairs is known" in text
    # `label quality` takes the truth from the file of judged pairs.
    capsys.readouterr()
    call("label", "quality", tmp_path)
    p, valid = judged.probability["a"][known], judged.truth[known] == VALID
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "| a " in line]
    half = next(row for row in rows if row[2].strip() == "0.5")
    assert half[5].strip() == f"{100 * valid[p > 0.5].mean():.1f}"
    assert half[8].strip() == f"{100 * (p > 0.5)[valid].mean():.1f}"
