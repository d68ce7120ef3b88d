"""LAVIS's classification task for one rank or several, and text assignment."""

from __future__ import annotations

from typing import Any

from lavis.common.registry import registry
from lavis.tasks.image_text_pretrain import ImageTextPretrainTask
from lavis.tasks.multimodal_classification import MultimodalClassificationTask

from lavis_mafa.algorithm.binary import require_finite
from lavis_mafa.downstream import task_records as results
from lavis_mafa.tasks.tally import Tally


class _CountsCorrect:
    """Mixin: training accuracy of models whose output has ``logits`` and ``labels``."""

    def step_figures(self, output: Any, samples: dict[str, Any]) -> dict[str, float]:
        """Return counts of one step for log and tally; none if the output lacks them."""
        logits, labels = output.get("logits"), output.get("labels")
        if logits is None or labels is None:
            return {}
        correct = (logits.argmax(dim=1) == labels).sum()
        return {"correct": float(correct), "judged": float(len(labels))}

    def epoch_figures(self, tally: Tally) -> dict[str, float | None]:
        """Return the ``accuracy`` of an epoch in percent."""
        share = tally.ratio("correct", "judged")
        return {} if share is None else {"accuracy": 100 * share}


@registry.register_task("mafa_text_assignment")
class MafaTextAssignmentTask(_CountsCorrect, ImageTextPretrainTask):
    """Trains ``albef_nlvr_pretrain_mafa``; evaluates nothing."""


@registry.register_task("mafa_classification")
class MafaClassificationTask(results.InBatches, _CountsCorrect, MultimodalClassificationTask):
    """Trains any LAVIS model that has ``predict`` and evaluates it (NLVR2, SNLI-VE).

    Figures in percent: ``acc``, also for each ``statement_type`` where samples have one, and
    ``agg_metrics``, which is ``acc``.
    """

    doing = "classifying"
    asks_of_model = "predict"

    def valid_step(self, model: Any, samples: Any) -> list[results.Record]:
        """Classify a mini-batch.

        Raises:
            ValueError: if samples have no ``instance_id``, or a prediction is not finite.
        """
        ids = results.required_column(samples, self.inst_id_key)
        types = results.optional_column(samples, len(ids), "statement_type")
        outputs = model.predict(samples)
        require_finite("predictions of classes", outputs["predictions"].float().cpu().numpy())
        predictions = outputs["predictions"].argmax(dim=1).tolist()
        targets = outputs["targets"].tolist()
        return [
            {
                self.inst_id_key: one,
                "prediction": predicted,
                "target": target,
                "statement_type": kind,
            }
            for one, predicted, target, kind in zip(ids, predictions, targets, types, strict=True)
        ]

    def after_evaluation(
        self, val_result: list[results.Record], split_name: str, epoch: Any, **kwargs: Any
    ) -> dict[str, float]:
        """Write ``<split>_epoch<epoch>.json`` and compute the figures, on the main process."""
        key, name = self.inst_id_key, f"{split_name}_epoch{epoch}"
        records, _ = results.write_result(
            val_result, key, name, lambda one: {k: one[k] for k in (key, "prediction", "target")}
        )
        overall = _accuracy(records)
        figures = {"agg_metrics": overall, "acc": overall}
        for kind in sorted({r["statement_type"] for r in records if r["statement_type"]}):
            figures[f"acc_{kind}"] = _accuracy([r for r in records if r["statement_type"] == kind])
        return figures


def _accuracy(records: list[results.Record]) -> float:
    """Return the percentage of records whose ``prediction`` is the ``target``; 0 of none."""
    right: int = sum(record["prediction"] == record["target"] for record in records)
    return 100 * right / max(1, len(records))
