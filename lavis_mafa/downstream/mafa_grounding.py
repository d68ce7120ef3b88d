"""Visual grounding by Grad-CAM of models trained on image-text pairs without boxes (ALBEF 6.4).

Figures follow ALBEF's evaluation code. Boxes are ``(x, y, width, height)`` in pixels of the
picture, whose origin is its upper left corner; sizes are ``(height, width)``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lavis.common.dist_utils import is_main_process
from lavis.common.registry import registry
from lavis.tasks.base_task import BaseTask
from torch import Tensor

from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.downstream import task_records as results
from lavis_mafa.downstream.gradcam import heat_maps, layer_of
from lavis_mafa.tasks.mafa_pretrain import StepFigures

logger = logging.getLogger(__name__)

_Box = Sequence[float]
_IOU_OF_A_HIT = 0.5
_RESULT_KEYS = ("instance_id", "ref_id", "text", "split", "box", "score")


@registry.register_task("mafa_grounding")
class MafaGroundingTask(results.InBatches, StepFigures, BaseTask):
    """Locates what an expression refers to by the heat map of the ITM head (ALBEF 6.4, appendix A).

    Proposals are ranked by the heat inside over the square root of the area; a choice is right if
    its IoU with the true box is at least 0.5. Figures: `_score_grounding`, with the parts that
    samples name (testA, testB).

    It evaluates any model whose texts attend to images in LAVIS's ``med.py``, and trains it by its
    own losses; a ``*_mafa`` model trains as with the task ``mafa_pretrain``.

    Samples of an evaluation set have ``image``, ``text_input``, ``index`` (their place in the set),
    ``size`` (``[height, width]`` of the picture in pixels), ``box`` (the true one,
    ``[x, y, width, height]``) and ``boxes`` (proposals); optional are ``instance_id``, ``ref_id``
    and ``split``.

    Args:
        layer: BERT's layer, from 0 (``run.block_num``); None: the third with cross-attention.
    """

    doing = "grounding"

    def __init__(self, layer: int | None = None) -> None:
        super().__init__()
        self.layer = layer

    @classmethod
    def setup_task(cls, cfg: Any) -> MafaGroundingTask:
        return cls(cfg.run_cfg.get("block_num"))

    def before_evaluation(self, model: Any, dataset: Any, **kwargs: Any) -> None:
        """Check before anything is computed that model and data fit.

        Raises:
            TypeError: if its texts do not attend to images, or it has no ITM head.
            ValueError: if samples have no boxes, or the layer has no cross-attention.
        """
        super().before_evaluation(model=model, dataset=dataset, **kwargs)
        backbone_of(model)
        layer = layer_of(model, self.layer)
        if len(dataset):
            sample = dataset[0]
            missing = [name for name in ("index", "size", "box", "boxes") if name not in sample]
            if missing:
                raise ValueError(
                    f"mafa_grounding needs {', '.join(missing)} in the samples of "
                    f"{type(dataset).__name__}; use refcoco_plus"
                )
        if is_main_process():
            logger.info("Grad-CAM of layer %d", layer)

    def valid_step(self, model: Any, samples: Any) -> list[results.Record]:
        """Choose a proposal for each expression of a mini-batch."""
        texts = list(samples["text_input"])
        maps = heat_maps(backbone_of(model), samples["image"], texts, self.layer)
        columns = {
            name: results.optional_column(samples, len(texts), name)
            for name in ("index", "size", "box", "boxes", "instance_id", "ref_id", "split")
        }
        records = []
        for number, heat in enumerate(maps.cpu()):
            own = {name: values[number] for name, values in columns.items()}
            box, score = _choose_box(heat, own["size"], own["boxes"])
            chosen = {"text": texts[number], "truth": own["box"], "box": box, "score": score}
            records.append({**own, **chosen})
        return records

    def after_evaluation(
        self, val_result: list[results.Record], split_name: str, **kwargs: Any
    ) -> dict[str, float]:
        """Write ``<split>_grounding_result.json`` and score it, on the main process.

        Returns:
            The figures.
        """
        records, _ = results.write_result(
            val_result,
            "index",
            f"{split_name}_grounding_result",
            lambda r: {k: r[k] for k in _RESULT_KEYS if r[k] is not None or k == "box"},
        )
        return _score_grounding(records)


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


def _choose_box(
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


def _score_grounding(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
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
