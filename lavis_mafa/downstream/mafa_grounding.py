"""Visual grounding by Grad-CAM of models trained on image-text pairs without boxes."""

from __future__ import annotations

import logging
from typing import Any

from lavis.common.dist_utils import is_main_process
from lavis.common.registry import registry
from lavis.tasks.base_task import BaseTask

from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.downstream import grounding_metrics as grounding
from lavis_mafa.downstream import task_records as results
from lavis_mafa.downstream.gradcam import heat_maps, layer_of
from lavis_mafa.tasks.mafa_pretrain import StepFigures

logger = logging.getLogger(__name__)

_RESULT_KEYS = ("instance_id", "ref_id", "text", "split", "box", "score")


@registry.register_task("mafa_grounding")
class MafaGroundingTask(results.InBatches, StepFigures, BaseTask):
    """Locates what an expression refers to by the heat map of the ITM head (ALBEF 6.4, appendix A).

    Proposals are ranked by the heat inside over the square root of the area; a choice is right if
    its IoU with the true box is at least 0.5. Figures: `lavis_mafa.downstream.grounding_metrics`,
    with the parts that samples name (testA, testB).

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
            box, score = grounding.choose_box(heat, own["size"], own["boxes"])
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
        return grounding.score_grounding(records)
