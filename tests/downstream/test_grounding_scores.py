"""Boxes, heat inside them and the scores of visual grounding, compared with slow loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.downstream.grounding_metrics import (
    _iou,
    box_scores,
    choose,
    inside,
    peak,
    score_grounding,
    stretch,
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


@settings(max_examples=60, deadline=None)
@given(boxes=st.lists(any_boxes, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_box_scores_equal_slow_loop(boxes, seed):
    boxes = [box for box in boxes if box[2] * box[3] == 0 or box[2] * box[3] > 1e-6]
    heat = torch.randn(9, 11, generator=torch.Generator().manual_seed(seed))
    found = box_scores(heat, torch.tensor(boxes).reshape(-1, 4))
    expected = [slow_score(heat, box) for box in boxes]
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_map_is_stretched_to_the_image_size():
    heat = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    stretched = stretch(heat, (6, 20))
    assert stretched.shape == (6, 20)
    assert peak(stretched)[0] >= 10 and peak(stretched)[1] < 3
    assert torch.equal(stretch(heat, (2, 2)), heat)


def test_choice_of_a_box():
    assert choose(torch.tensor([0.5, 2.0, 2.0, 1.0])) == 1
    assert choose(torch.tensor([-1.0, 0.1])) == 1
    assert choose(torch.tensor([0.0, 0.0, -1.0])) is None
    assert choose(torch.tensor([float("nan"), 0.5])) == 1
    assert choose(torch.tensor([float("nan")])) is None
    assert choose(torch.tensor([])) is None


def test_pointing_game():
    heat = torch.zeros(4, 6)
    assert peak(heat) is None and not inside(None, [0, 0, 6, 4])
    heat[3, 1] = 2.0
    assert peak(heat) == (1, 3)
    assert inside((1, 3), [1, 3, 1, 1])
    assert not inside((1, 3), [2, 3, 1, 1]) and not inside((1, 3), [1, 2, 1, 1])
    assert not inside((1, 3), [0, 3, 1, 1]) and not inside((1, 3), [1, 4, 1, 1])


def record(truth, boxes, box, point=None, split=None):
    return {"truth": truth, "boxes": boxes, "box": box, "peak": point, "split": split}


def test_grounding_scores_of_hand_made_records():
    left, right, all_of_it = [0, 0, 4, 4], [4, 0, 4, 4], [0, 0, 8, 4]
    half = [0, 0, 2, 4]  # its IoU with left is exactly 0.5
    scores = score_grounding(
        [
            record(left, [left, right], left, (0, 0), "testA"),
            record(left, [left, half, right], half, (5, 0), "testA"),
            record(left, [left, right, right, right], right, (1, 1), "testB"),
            record(left, [right], None, None, "testB"),
        ]
    )
    assert scores.pop("agg_metrics") == scores["acc"]
    assert scores == {
        "acc": 50.0,
        "acc_testA": 100.0,
        "acc_testB": 0.0,
        "pointing": 50.0,
        "chance": pytest.approx(100 * (1 / 2 + 2 / 3 + 1 / 4 + 0) / 4),
        "possible": 75.0,
        "undecided": 25.0,
    }
    # its IoU is also 0.5
    assert score_grounding([record(left, [all_of_it], all_of_it)])["acc"] == 100.0


def test_without_proposals_only_pointing_is_scored():
    box = [0, 0, 4, 4]
    records = [record(box, None, None, (1, 1)), record(box, None, None, (5, 1))]
    assert score_grounding(records) == {"agg_metrics": 50.0, "pointing": 50.0}
    assert score_grounding([]) == {}
    none_there = score_grounding([record(box, [], None, (1, 1))])
    assert (none_there["acc"], none_there["undecided"], none_there["possible"]) == (0, 100, 0)
