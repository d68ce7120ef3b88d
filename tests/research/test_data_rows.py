"""Check the data benchmark at a tiny size: both sides read the same pairs."""

from __future__ import annotations

import pytest
from lavis.processors import randaugment
from lavis.processors.blip_processors import BlipImageTrainProcessor

from lavis_mafa.algorithm.tokens import TOKENS
from lavis_mafa.processors.augmentation import QuickAugmentation, auto_contrast
from research.benchmarks import data
from research.benchmarks.harness import Sizes


@pytest.fixture
def sides(tmp_path):
    root, annotations = data.generated(tmp_path, 3, 640, 480)
    return data.Sides(root, annotations, tmp_path)


def test_both_sides_make_equal_batches(sides):
    ours, theirs = sides.batch(), sides.batch_of_lavis()
    assert ours["text_input"] == theirs["text_input"] == sides.captions
    assert ours["image"].shape == theirs["image"].shape == (3, 3, data.SIDE, data.SIDE)
    ids = theirs[TOKENS].input_ids
    assert ids.shape == (3, data.MAX_LENGTH)
    assert (ids[:, : ours[TOKENS].input_ids.shape[1]] == ours[TOKENS].input_ids).all()
    assert type(sides.theirs.vis_processor) is BlipImageTrainProcessor
    assert type(sides.ours.parts[0].vis_processor) is QuickAugmentation


def test_lavis_side_uses_its_own_augmentation():
    with data.augmentation_of_lavis():
        assert randaugment.func_dict["AutoContrast"] is randaugment.autocontrast_func
    assert randaugment.func_dict["AutoContrast"] is auto_contrast


def test_rows_of_both_image_sources(monkeypatch, photographs):
    monkeypatch.setattr(data, "PHOTOGRAPHS", photographs)
    rows = list(data.rows(Sizes("quick", repeats=1)))
    of_a_kind = ["tokenise", "decode", "both"]
    assert [row.target for row in rows] == [data.TARGET] * 10
    assert [row.what.split()[0] for row in rows] == [*of_a_kind * 2, "decode", *of_a_kind]
    assert all(row.ours > 0 and row.reference > 0 for row in rows)
