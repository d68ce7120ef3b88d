"""What the demonstration measures of its trained models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from lavis.tasks.retrieval import RetrievalTask
from torch.utils.data import DataLoader

from lavis_mafa import load_model
from lavis_mafa.algorithm.backbone import Images, Texts
from lavis_mafa.algorithm.mining import DIRECTIONS
from lavis_mafa.metrics.binary import area_under_roc
from lavis_mafa.metrics.recall import ranked_truth, retrieval_with_truth
from lavis_mafa.models.inference.rerank import compute_sim_matrix, encode_split, itm_scores
from lavis_mafa.runners.run_log import read_log
from lavis_mafa.studies.demo.branches import Branch
from lavis_mafa.toyworld import ToyScenesBuilder, ToyScenesEval

K_TEST = 32
SHORTLIST = 16


@dataclass
class Examined:
    """A trained model with the test images and texts that it encoded."""

    backbone: Any
    images: Images
    texts: Texts
    similarity: np.ndarray

    @classmethod
    def of(cls, branch: Branch, loader: Any) -> Examined:
        model = load_model(branch.family.arch, is_eval=True, checkpoint=str(branch.checkpoint))
        with torch.inference_mode():
            images, texts = encode_split(model.backbone, loader)
            assert images.features is not None and texts.features is not None
            similarity = model.backbone.similarity(images.features, texts.features).numpy()
        return cls(model.backbone, images, texts, similarity)


def toy_world(train_size: int, test_size: int) -> dict[str, Any]:
    """The splits of the toy world."""
    cfg = load_dataset_config(ToyScenesBuilder.default_config_path())
    cfg.build_info.train_size, cfg.build_info.test_size = train_size, test_size
    return ToyScenesBuilder(cfg).build_datasets()


def measure(
    branches: Sequence[Branch],
    test: ToyScenesEval,
    folder: Path,
    judges: Sequence[Branch] | None = None,
) -> dict[str, dict[str, Any]]:
    """Retrieval of every branch on the test images, against original pairs and full truth.

    The AUC of ITM is taken on one shortlist shared by all: a model with weak ITC would make its own
    easy.

    Args:
        folder: where LAVIS's report of metrics may write.
        judges: the shortlist holds pairs that these find most similar together; None: `branches`.

    Returns:
        Figures by branch name, percentages but for ``itm_auc`` (0 to 1).
    """
    for name in ("output_dir", "result_dir"):
        registry.mapping["paths"][name] = str(folder)
    loader: Any = DataLoader(test, batch_size=250, collate_fn=test.collater)
    truth = test.truth_matrix()
    figures: dict[str, dict[str, Any]] = {}
    examined = {branch.name: Examined.of(branch, loader) for branch in branches}
    for name, one in examined.items():
        scores = compute_sim_matrix(one.backbone, loader, K_TEST)
        report: Any = RetrievalTask._report_metrics(*scores, test.txt2img, test.img2txt)
        report.update(retrieval_with_truth(*scores, truth))
        report["itc_valid_txt_r1"] = 100.0 * float(ranked_truth(one.similarity, truth)[:, 0].mean())
        figures[name] = report
    asked = branches if judges is None else judges
    image_of, text_of = _shortlist(
        [(examined.get(b.name) or Examined.of(b, loader)).similarity for b in asked]
    )
    valid = truth[image_of, text_of]
    pairs = torch.from_numpy(image_of), torch.from_numpy(text_of)
    for name, one in examined.items():
        with torch.inference_mode():
            logits = itm_scores(one.backbone, one.images, one.texts, *pairs)
        figures[name]["itm_auc"] = area_under_roc(logits.numpy(), valid)
    return figures


def _shortlist(similarities: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs that models together find most similar, the same number for each image."""
    ranks = sum(np.argsort(np.argsort(-sim, axis=1), axis=1) for sim in similarities)
    k = min(SHORTLIST, similarities[0].shape[1])
    texts = np.argsort(ranks, axis=1, kind="stable")[:, :k]
    return np.repeat(np.arange(len(texts)), k), texts.ravel()


def negatives_of(branch: Branch) -> dict[str, float | None]:
    """False negatives in a branch's last epoch, both directions' mean.

    ``false_negative_rate``: share of valid pairs among the hard negatives that were picked;
    ``false_negative_rate_in_itm``: among the pairs that ITM then learned as "no match".
    """
    epochs = read_log(branch.folder, "epoch")
    last = epochs[-1] if epochs else {}
    names = (
        "false_negative_rate",
        "false_negative_rate_in_itm",
        "con_d_precision",
        "con_d_recall",
    )
    return {name: _mean(last, name + "_{}") for name in names}


def _mean(record: dict[str, Any], name: str) -> float | None:
    values = [record.get(name.format(direction)) for direction in DIRECTIONS]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
