"""Boxes, heat inside them and the scores of visual grounding, compared with slow loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.downstream.mafa_grounding import (
    _box_scores,
    _choose_box,
    _iou,
    _score_grounding,
    _stretch,
)

SIDE = 12
whole_boxes = st.tuples(
    st.integers(-3, SIDE), st.integers(-3, SIDE), st.integers(0, SIDE), st.integers(0, SIDE)
)
numbers = st.floats(-5, 15, width=16)
any_boxes = st.tuples(numbers, numbers, st.floats(0, 15, width=16), st.floats(0, 15, width=16))


def pixels(box):
    x, y, width, height = box
    return {(i, j) for i in range(x, x + width) for j in range(y, y + height)}


@given(one=whole_boxes, other=whole_boxes)
def test_iou_counts_pixels(one, other):
    first, second = pixels(one), pixels(other)
    union = len(first | second)
    expected = len(first & second) / union if union else 0.0
    found = _iou(torch.tensor(one), torch.tensor(other))
    assert float(found) == pytest.approx(expected, abs=1e-12)
    assert float(_iou(torch.tensor(other), torch.tensor(one))) == float(found)


def test_iou_broadcasts_and_handles_fractions_of_pixels():
    boxes = torch.tensor([[0, 0, 2, 2], [1, 0, 2, 2], [2, 0, 2, 2], [0.5, 0.5, 1, 1]])
    found = _iou(boxes, torch.tensor([0.0, 0, 2, 2]))
    assert found.tolist() == pytest.approx([1, 1 / 3, 0, 1 / 4])
    assert _iou(boxes[:, None], boxes[None]).shape == (4, 4)


def slow_score(heat, box):
    """ALBEF's score: heat in the slice of full pixels, divided by the exact area."""
    x, y, width, height = box
    total = 0.0
    for row in range(max(math.trunc(y), 0), min(math.trunc(y + height), heat.shape[0])):
        for column in range(max(math.trunc(x), 0), min(math.trunc(x + width), heat.shape[1])):
            total += float(heat[row, column])
    return total / (width * height) ** 0.5 if width * height > 1e-9 else 0.0


@settings(max_examples=60)
@given(boxes=st.lists(any_boxes, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_box_scores_equal_slow_loop(boxes, seed):
    boxes = [box for box in boxes if box[2] * box[3] == 0 or box[2] * box[3] > 1e-6]
    heat = torch.randn(9, 11, generator=torch.Generator().manual_seed(seed))
    found = _box_scores(heat, torch.tensor(boxes).reshape(-1, 4))
    expected = [slow_score(heat, box) for box in boxes]
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_map_is_stretched_to_the_image_size():
    heat = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    stretched = _stretch(heat, (6, 20))
    assert stretched.shape == (6, 20)
    row, column = divmod(int(stretched.argmax()), 20)
    assert row < 3 and column >= 10
    assert torch.equal(_stretch(heat, (2, 2)), heat)


@pytest.mark.parametrize(
    ("heat", "chosen"),
    [([0.5, 2, 2, 1], 1), ([-1, 0.1], 1), ([0, 0, -1], None), ([math.nan] * 2, None), ([], None)],
)
def test_choice_of_a_box(heat, chosen):
    """Each box is one pixel of a row, whose heat is its score."""
    boxes = [[float(x), 0.0, 1.0, 1.0] for x in range(len(heat))]
    size = (1, max(1, len(heat)))
    found = _choose_box(torch.tensor([heat or [0.0]], dtype=torch.float32), size, boxes)
    assert found == (
        (None, None) if chosen is None else (boxes[chosen], pytest.approx(heat[chosen]))
    )


def record(truth, boxes, box, split=None):
    return {"truth": truth, "boxes": boxes, "box": box, "split": split}


def test_grounding_scores_of_hand_made_records():
    left, right, all_of_it = [0, 0, 4, 4], [4, 0, 4, 4], [0, 0, 8, 4]
    half = [0, 0, 2, 4]  # its IoU with left is exactly 0.5
    scores = _score_grounding(
        [
            record(left, [left, right], left, "testA"),
            record(left, [left, half, right], half, "testA"),
            record(left, [left, right, right, right], right, "testB"),
            record(left, [right], None, "testB"),
        ]
    )
    assert scores.pop("agg_metrics") == scores["acc"]
    assert scores == {
        "acc": 50.0,
        "acc_testA": 100.0,
        "acc_testB": 0.0,
        "chance": pytest.approx(100 * (1 / 2 + 2 / 3 + 1 / 4 + 0) / 4),
        "possible": 75.0,
        "undecided": 25.0,
    }
    # its IoU is also 0.5
    assert _score_grounding([record(left, [all_of_it], all_of_it)])["acc"] == 100.0


def test_scores_of_nothing():
    assert _score_grounding([]) == {}
    none_there = _score_grounding([record([0, 0, 4, 4], [], None)])
    assert (none_there["acc"], none_there["undecided"], none_there["possible"]) == (0, 100, 0)
