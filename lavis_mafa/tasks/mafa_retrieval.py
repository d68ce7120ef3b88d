"""LAVIS's retrieval task, with recall against full truth where the data have it."""

from __future__ import annotations

from typing import Any

import torch
from lavis.common.dist_utils import is_main_process
from lavis.common.registry import registry
from lavis.tasks.retrieval import RetrievalTask

from lavis_mafa.evaluation.recall import retrieval_with_truth


@registry.register_task("mafa_retrieval")
class MafaRetrievalTask(RetrievalTask):
    """Trains any LAVIS retrieval model and evaluates as LAVIS's ``retrieval`` does.

    A split that offers ``truth_matrix()`` (``toy_scenes``) is also scored against all valid pairs:
    see `lavis_mafa.evaluation.recall.retrieval_with_truth`.
    """

    @torch.no_grad()
    def evaluation(self, model: Any, data_loader: Any, **kwargs: Any) -> dict[str, float] | None:
        """LAVIS's figures (``txt_r1`` ... ``agg_metrics``) and those against truth, on rank 0."""
        scores_i2t, scores_t2i = model.compute_sim_matrix(data_loader, task_cfg=self.cfg)
        if not is_main_process():
            return None
        dataset = data_loader.dataset
        figures = self._report_metrics(scores_i2t, scores_t2i, dataset.txt2img, dataset.img2txt)
        if hasattr(dataset, "truth_matrix"):
            figures.update(retrieval_with_truth(scores_i2t, scores_t2i, dataset.truth_matrix()))
        return figures
