"""LAVIS's retrieval task, with figures that count all valid pairs where these are known."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import is_main_process
from lavis.common.registry import registry
from lavis.tasks.retrieval import RetrievalTask
from numpy.typing import NDArray

from lavis_mafa.algorithm.binary import require_finite
from lavis_mafa.algorithm.options import option
from lavis_mafa.data.known_truth import read_truth, truth_with
from lavis_mafa.families.rerank import RerankOptions
from lavis_mafa.io.files import append_line, atomic_write, lost_writes
from lavis_mafa.tasks.metrics import METRICS, MetricNames
from lavis_mafa.tasks.recall import retrieval_of_own_pairs, retrieval_with_truth


@dataclass(kw_only=True)
class RetrievalOptions(RerankOptions):
    """Keys of ``run`` for retrieval."""

    retrieval_metrics: list[str] = option(
        factory=list,
        doc="mafa_retrieval: further registered metrics to report",
        choices=MetricNames("retrieval"),
    )
    save_scores: bool = option(doc="retrieval: write scores_<split>.npz into the result folder")
    truth_file: str | None = option(
        doc="retrieval: JSON list of further valid [image, caption] pairs", path="file"
    )


@registry.register_task("mafa_retrieval")
class MafaRetrievalTask(RetrievalTask):
    """Trains any LAVIS retrieval model and evaluates as LAVIS's ``retrieval`` does.

    In addition to LAVIS's figures, in log and ``evaluate.txt``:

    - recall and mAP@R against all valid pairs (`lavis_mafa.tasks.recall.retrieval_with_truth`)
      where the split has ``truth_matrix()`` (``toy_scenes``) or ``run.truth_file`` lists pairs;
    - the registered metrics (`lavis_mafa.tasks.metrics.METRICS`) of ``run.retrieval_metrics``.

    With ``run.save_scores`` the scores go to ``scores_<split>.npz`` in the result folder.
    """

    asks_of_model = "compute_sim_matrix"
    requires_k_test = False

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        path = (cfg or {}).get("truth_file")
        self._pairs = read_truth(path) if path else None
        self._scores: tuple[Any, ...] | None = None  # data set, images to texts, texts to images
        self._has_logged_depth = False

    @torch.no_grad()
    def evaluation(self, model: Any, data_loader: Any, **kwargs: Any) -> dict[str, float] | None:
        """Return LAVIS's figures (``txt_r1`` ... ``agg_metrics``) and those of all valid pairs.

        On rank 0; None on others.

        Raises:
            ValueError: if a score is not finite; on all ranks.
        """
        scores_i2t, scores_t2i = model.compute_sim_matrix(data_loader, task_cfg=self.cfg)
        # On every rank, since all have all scores: none may wait for one that has stopped.
        for scores in (scores_i2t, scores_t2i):
            require_finite("retrieval scores", np.asarray(scores))
        if not is_main_process():
            return None
        dataset = data_loader.dataset
        figures = self._report_metrics(scores_i2t, scores_t2i, dataset.txt2img, dataset.img2txt)
        more = self._figures_of_truth(dataset, scores_i2t, scores_t2i)
        for name in self.cfg.get("retrieval_metrics") or ():
            more.update(METRICS[name](scores_i2t, scores_t2i, dataset))
        if more:
            self._log_depth(*scores_i2t.shape)
            # Appended as LAVIS appends its own: a run evaluates several splits and epochs.
            append_line(Path(registry.get_path("output_dir")) / "evaluate.txt", more)
        if self.cfg.get("save_scores"):
            # Saved in after_evaluation, which is given the name of the split.
            self._scores = dataset, scores_i2t, scores_t2i
        return {**figures, **more}

    @staticmethod
    def _report_metrics(
        scores_i2t: NDArray[Any], scores_t2i: NDArray[Any], txt2img: Any, img2txt: Any
    ) -> dict[str, float]:
        """Return LAVIS's figures and write them to ``evaluate.txt``, as LAVIS does."""
        figures = retrieval_of_own_pairs(scores_i2t, scores_t2i, txt2img, img2txt)
        append_line(Path(registry.get_path("output_dir")) / "evaluate.txt", figures)
        return figures

    def after_evaluation(
        self, val_result: Any, split_name: str = "evaluation", **kwargs: Any
    ) -> Any:
        """Save the scores if ``run.save_scores`` is set; return the figures unchanged."""
        if self._scores is not None:
            path = Path(registry.get_path("result_dir")) / f"scores_{split_name}.npz"
            with lost_writes.allow(path):
                _save_scores(path, *self._scores)
                logging.info("scores are in %s", path)
            self._scores = None
        return val_result

    def _figures_of_truth(
        self, dataset: Any, scores_i2t: NDArray[Any], scores_t2i: NDArray[Any]
    ) -> dict[str, float]:
        truth = dataset.truth_matrix() if hasattr(dataset, "truth_matrix") else None
        if self._pairs is not None:
            richer = truth_with(dataset, self._pairs)
            truth = truth if richer is None else richer
        return {} if truth is None else retrieval_with_truth(scores_i2t, scores_t2i, truth)

    def _log_depth(self, images: int, texts: int) -> None:
        k_test = self.cfg.get("k_test") or 0
        if 0 < k_test < max(images, texts) and not self._has_logged_depth:
            self._has_logged_depth = True
            logging.info(
                "only the %d best candidates by ITC are re-ranked (run.k_test): R-Precision and "
                "mAP@R count only these, all others tie",
                k_test,
            )


def _save_scores(
    path: str | os.PathLike[str], dataset: Any, scores_i2t: NDArray[Any], scores_t2i: NDArray[Any]
) -> None:
    """Write retrieval scores as ``.npz``: 8 bytes for each pair of image and caption.

    The file has ``scores_i2t`` ``(I, T)`` and ``scores_t2i`` ``(T, I)`` float32, the names of the
    ``images`` ``(I,)``, all ``captions`` ``(T,)`` grouped by image, and ``image_of`` ``(T,)``,
    the image of every caption.

    Args:
        dataset: LAVIS's retrieval evaluation set (``image``, ``text``, ...).
    """
    captions = _captions_of(dataset)
    with atomic_write(path) as file:
        np.savez(
            file,
            scores_i2t=np.asarray(scores_i2t, np.float32),
            scores_t2i=np.asarray(scores_t2i, np.float32),
            images=np.array([str(name) for name in dataset.image], np.str_),
            captions=np.array([caption for own in captions for caption in own], np.str_),
            image_of=np.repeat(np.arange(len(captions)), [len(own) for own in captions]),
        )


def _captions_of(dataset: Any) -> list[list[str]]:
    """Return the captions of every image of a LAVIS retrieval evaluation set.

    They are the original captions if the data set has its annotations, else the processed ones.

    Raises:
        ValueError: if the captions are not grouped by image.
    """
    own = [dataset.img2txt[image] for image in range(len(dataset.image))]
    if [text for texts in own for text in texts] != list(range(len(dataset.text))):
        raise ValueError("captions of this data set are not grouped by image")
    # Other benchmarks find a caption's id by its text, which processing would have changed.
    raw = [one.get("caption") for one in getattr(dataset, "annotation", None) or ()]
    if [len(c) if isinstance(c, list) else 0 for c in raw] == [len(texts) for texts in own]:
        return raw
    return [[dataset.text[text] for text in texts] for texts in own]
