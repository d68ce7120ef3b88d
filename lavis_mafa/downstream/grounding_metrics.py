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


def stretch(heat: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize a heat map ``(h, w)`` to the picture's size ``(H, W)`` by bicubic interpolation."""
    whole = heat[None, None].float()
    return F.interpolate(whole, size=tuple(size), mode="bicubic", align_corners=False)[0, 0]


def box_scores(heat: Tensor, boxes: Tensor) -> Tensor:
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


def choose(scores: Tensor) -> int | None:
    """Return the index of the highest of K scores ``(K,)``, the first of several equal ones.

    None if no score is above 0: the heat map then selects nothing.
    """
    if len(scores) == 0 or not bool((scores > 0).any()):
        return None
    return int(torch.nan_to_num(scores, nan=-torch.inf).argmax())


def peak(heat: Tensor) -> tuple[int, int] | None:
    """Return the pixel ``(x, y)`` of the maximum of a map ``(H, W)``; None if it has no heat."""
    if not bool((heat > 0).any()):
        return None
    place = int(torch.nan_to_num(heat, nan=-torch.inf).argmax())
    return place % heat.shape[1], place // heat.shape[1]


def inside(point: tuple[int, int] | None, box: _Box) -> bool:
    """Return whether the center of a pixel is in a box: a hit in the pointing game."""
    if point is None:
        return False
    (x, y), (left, upper, width, height) = point, box
    return left <= x + 0.5 <= left + width and upper <= y + 0.5 <= upper + height


def score_grounding(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of an evaluation, in percent.

    Args:
        records: one for each expression, with ``truth`` (its box), ``box`` (chosen, or None),
            ``boxes`` (the proposals, or None), ``peak`` (or None) and ``split`` (part of the data,
            or None).

    Returns:
        Over expressions with proposals: ``acc`` (IoU of chosen and true box at least 0.5),
        ``acc_<part>`` for every part, ``chance`` (``acc`` of a random proposal), ``possible``
        (``acc`` of the best proposal) and ``undecided`` (no proposal was chosen, which counts as
        wrong). Over all expressions: ``pointing`` (the maximum of the map is in the true box).
        ``agg_metrics`` is ``acc``, or ``pointing`` where there are no proposals.
    """
    if not records:
        return {}
    hits: list[bool] = []
    shares: list[float] = []
    parts: dict[str, list[bool]] = {}
    undecided = 0
    for record in records:
        if record["boxes"] is None:
            continue
        truth = torch.tensor(record["truth"], dtype=torch.float64)
        proposals = torch.tensor(record["boxes"], dtype=torch.float64).reshape(-1, 4)
        right = _iou(proposals, truth) >= _IOU_OF_A_HIT
        shares.append(float(right.double().mean()) if len(right) else 0.0)
        box = record["box"]
        undecided += box is None
        chosen = torch.tensor(box or [0.0] * 4, dtype=torch.float64)
        hits.append(bool(_iou(chosen, truth) >= _IOU_OF_A_HIT))
        if record.get("split"):
            parts.setdefault(str(record["split"]), []).append(hits[-1])
    pointing = _percent([inside(record["peak"], record["truth"]) for record in records])
    if not hits:
        return {"agg_metrics": pointing, "pointing": pointing}
    acc = _percent(hits)
    return {
        "agg_metrics": acc,
        "acc": acc,
        **{f"acc_{part}": _percent(own) for part, own in sorted(parts.items())},
        "pointing": pointing,
        "chance": _percent(shares),
        "possible": _percent([share > 0 for share in shares]),
        "undecided": 100.0 * undecided / len(hits),
    }


def _percent(values: Sequence[float]) -> float:
    return 100.0 * sum(values) / len(values)
