"""What the demonstration measures of its trained models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.tasks.retrieval import RetrievalTask
from torch.utils.data import DataLoader

from lavis_mafa import load_model
from lavis_mafa.datasets.toy_scenes import ToyScenesEval
from lavis_mafa.demo.branches import Branch
from lavis_mafa.demo.runs import read_log
from lavis_mafa.evaluation.recall import area_under_roc, ranked_truth, retrieval_with_truth
from lavis_mafa.evaluation.rerank import compute_sim_matrix, encode_split, itm_scores

K_TEST = 32
SHORTLIST = 16
DIRECTIONS = ("i2t", "t2i")


def measure(branches: list[Branch], test: ToyScenesEval, folder: Path) -> dict[str, Any]:
    """Retrieval of every branch on the test images, against original pairs and full truth.

    The AUC of ITM is taken on one shortlist shared by all: a model with weak ITC would make its own
    easy.

    Args:
        folder: where LAVIS's report of metrics may write.

    Returns:
        Figures by branch name, percentages but for ``itm_auc`` (0 to 1).
    """
    loader: Any = DataLoader(test, batch_size=250, collate_fn=test.collater)
    truth = test.truth_matrix()
    figures: dict[str, dict[str, float]] = {}
    similarities, encoded = [], {}
    for branch in branches:
        model = load_model(branch.family.arch, is_eval=True, checkpoint=str(branch.checkpoint))
        scores = compute_sim_matrix(model.backbone, loader, K_TEST)
        report: Any = RetrievalTask._report_metrics(*scores, test.txt2img, test.img2txt)
        report.update(retrieval_with_truth(*scores, truth))
        with torch.inference_mode():
            images, texts = encode_split(model.backbone, loader)
            sim = model.backbone.similarity(images.features, texts.features).numpy()
        report["itc_valid_txt_r1"] = 100.0 * float(ranked_truth(sim, truth)[:, 0].mean())
        figures[branch.name] = report
        similarities.append(sim)
        encoded[branch.name] = (model.backbone, images, texts)
    image_of, text_of = _shortlist(similarities)
    valid = truth[image_of, text_of]
    for name, (backbone, images, texts) in encoded.items():
        with torch.inference_mode():
            logits = itm_scores(
                backbone, images, texts, torch.from_numpy(image_of), torch.from_numpy(text_of), 512
            )
        figures[name]["itm_auc"] = area_under_roc(logits.numpy(), valid)
    return figures


def _shortlist(similarities: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs that the models together find most similar, the same number for each image."""
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
