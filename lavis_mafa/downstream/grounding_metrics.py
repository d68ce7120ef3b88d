"""Metrics of visual grounding without boxes in training: heat maps rank proposals (ALBEF 6.4).

They follow ALBEF's evaluation code. Boxes are ``(x, y, width, height)`` in pixels of the
picture, whose origin is its upper left corner; sizes are ``(height, width)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_IOU_OF_A_HIT = 0.5

_Box = Sequence[float]


def _iou(one: Tensor, other: Tensor) -> Tensor:
    """Return the intersection over union of boxes ``(..., 4)``, 0 to 1; shapes broadcast.

    A box without area has an IoU of 0 with every box.
    """
    one, other = one.double(), other.double()
    low = torch.maximum(one[..., :2], other[..., :2])
    high = torch.minimum(one[..., :2] + one[..., 2:], other[..., :2] + other[..., 2:])
    overlap = (high - low).clamp(min=0).prod(dim=-1)
    union = one[..., 2:].prod(dim=-1) + other[..., 2:].prod(dim=-1) - overlap
    return torch.where(overlap > 0, overlap / union, torch.zeros_like(union))


def choose_box(
    heat: Tensor, size: tuple[int, int], boxes: Sequence[_Box]
) -> tuple[_Box | None, float | None]:
    """Return the proposal with the highest score, the first of several equal ones, and its score.

    Both are None if no score is above 0: the heat map then selects nothing.

    Args:
        heat: ``(h, w)``, which is resized to the picture.
        size: of the picture.
        boxes: the proposals.
    """
    scores = _box_scores(_stretch(heat, size), torch.tensor(boxes).reshape(-1, 4))
    if not bool((scores > 0).any()):
        return None, None
    best = int(torch.nan_to_num(scores, nan=-torch.inf).argmax())
    return boxes[best], float(scores[best])


def _stretch(heat: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize a heat map ``(h, w)`` to the picture's size ``(H, W)`` by bicubic interpolation."""
    whole = heat[None, None].float()
    return F.interpolate(whole, size=tuple(size), mode="bicubic", align_corners=False)[0, 0]


def _box_scores(heat: Tensor, boxes: Tensor) -> Tensor:
    """Score boxes: the heat inside a box, divided by the square root of its area (ALBEF).

    Args:
        heat: ``(H, W)``, in the size of the picture.
        boxes: ``(K, 4)``. Corners are truncated to pixels and clipped to the picture; the area is
            that of the given box. A box without area scores 0.

    Returns:
        ``(K,)`` float64.
    """
    height, width = heat.shape
    # Integral image: sums[y, x] is the heat above y and left of x.
    sums = F.pad(heat.double().cumsum(dim=0).cumsum(dim=1), (1, 0, 1, 0))
    boxes = boxes.double().to(heat.device)
    corners = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1).long()
    left, right = corners[:, 0].clamp(0, width), corners[:, 2].clamp(0, width)
    upper, lower = corners[:, 1].clamp(0, height), corners[:, 3].clamp(0, height)
    inside = sums[lower, right] - sums[upper, right] - sums[lower, left] + sums[upper, left]
    areas = boxes[:, 2:].clamp(min=0).prod(dim=1)
    valid = (areas > 0) & (right > left) & (lower > upper)
    # Clamped, because `where` computes both branches.
    return torch.where(valid, inside / areas.clamp(min=1e-12).sqrt(), 0.0)


def score_grounding(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of an evaluation, in percent.

    Args:
        records: one for each expression, with ``truth`` (its box), ``box`` (chosen, or None),
            ``boxes`` (the proposals) and ``split`` (part of the data, or None).

    Returns:
        ``acc`` (IoU of chosen and true box at least 0.5) and ``agg_metrics``, which is equal;
        ``acc_<part>`` for every part; ``chance`` (``acc`` of a random proposal); ``possible``
        (``acc`` of the best proposal) and ``undecided`` (no proposal was chosen, which counts as
        wrong).
    """
    if not records:
        return {}
    hits: list[bool] = []
    shares: list[float] = []
    parts: dict[str, list[bool]] = {}
    for record in records:
        truth = torch.tensor(record["truth"], dtype=torch.float64)
        proposals = torch.tensor(record["boxes"], dtype=torch.float64).reshape(-1, 4)
        right = _iou(proposals, truth) >= _IOU_OF_A_HIT
        shares.append(float(right.double().mean()) if len(right) else 0.0)
        chosen = torch.tensor(record["box"] or [0.0] * 4, dtype=torch.float64)
        hits.append(bool(_iou(chosen, truth) >= _IOU_OF_A_HIT))
        if record.get("split"):
            parts.setdefault(str(record["split"]), []).append(hits[-1])
    acc = _percent(hits)
    return {
        "agg_metrics": acc,
        "acc": acc,
        **{f"acc_{part}": _percent(own) for part, own in sorted(parts.items())},
        "chance": _percent(shares),
        "possible": _percent([share > 0 for share in shares]),
        "undecided": _percent([record["box"] is None for record in records]),
    }


def _percent(values: Sequence[float]) -> float:
    return 100.0 * sum(values) / len(values)
