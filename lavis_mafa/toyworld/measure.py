"""Measure models that a study trained on the toy world, where all valid pairs are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from lavis.tasks.retrieval import RetrievalTask
from torch.utils.data import DataLoader

from lavis_mafa import load_model
from lavis_mafa.algorithm.backbone import Images, Texts
from lavis_mafa.config import load_config
from lavis_mafa.metrics.binary import area_under_roc
from lavis_mafa.metrics.recall import ranked_truth, retrieval_with_truth
from lavis_mafa.models.inference.rerank import compute_sim_matrix, encode_split, itm_scores
from lavis_mafa.runners.run_log import read_log
from lavis_mafa.toyworld import ToyScenesBuilder, ToyScenesEval

K_TEST = 32
SHORTLIST = 16  # texts for each image in the pairs that ITM's AUC is taken on
DIRECTIONS = ("i2t", "t2i")
RATES = ("false_negative_rate", "false_negative_rate_in_itm", "con_d_precision", "con_d_recall")


class Trained(Protocol):
    """A completed training run.

    Attributes:
        config, options: the config file of the run and the options that override it.
        folder, checkpoint: where it wrote its logs and its weights.
    """

    config: str
    options: tuple[str, ...]
    folder: Path

    @property
    def checkpoint(self) -> Path: ...


Run = TypeVar("Run", bound=Trained)


@dataclass
class Examined:
    """A trained model with the test images and texts that it encoded."""

    backbone: Any
    images: Images
    texts: Texts
    similarity: np.ndarray

    @classmethod
    def of(cls, run: Trained, loader: Any) -> Examined:
        arch = load_config(run.config, list(run.options), machine=False).model_cfg.arch
        model = load_model(arch, is_eval=True, checkpoint=str(run.checkpoint))
        with torch.inference_mode():
            images, texts = encode_split(model.backbone, loader)
            assert images.features is not None and texts.features is not None
            similarity = model.backbone.similarity(images.features, texts.features).numpy()
        return cls(model.backbone, images, texts, similarity)


def toy_world(train_size: int, test_size: int) -> dict[str, Any]:
    """Return the splits of the toy world."""
    cfg = load_dataset_config(ToyScenesBuilder.default_config_path())
    cfg.build_info.train_size, cfg.build_info.test_size = train_size, test_size
    return ToyScenesBuilder(cfg).build_datasets()


def measure(runs: Sequence[Run], judges: Sequence[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Measure retrieval, ITM and hard negatives of runs, on the test images of their data.

    Args:
        runs: all with the same data.
        judges: ITM's AUC is taken on the pairs that these runs together find most similar. All
            runs share them: a model with a weak ITC would choose easy pairs for itself.

    Yields:
        Each run with its figures: percentages of retrieval against original pairs and full truth,
        ``itm_auc`` (0 to 1), and `negatives_of`.
    """
    # Several threads wait for each other longer than they help models of this size.
    torch.set_num_threads(1)
    data = load_config(runs[0].config, list(runs[0].options), machine=False).datasets_cfg
    sizes = data.toy_scenes.build_info
    test: ToyScenesEval = toy_world(sizes.train_size, sizes.test_size)["test"]
    loader: Any = DataLoader(test, batch_size=250, collate_fn=test.collater)
    truth = test.truth_matrix()
    examined = {id(judge): Examined.of(judge, loader) for judge in judges}
    image_of, text_of = _shortlist([one.similarity for one in examined.values()])
    valid = truth[image_of, text_of]
    pairs = torch.from_numpy(image_of), torch.from_numpy(text_of)
    for run in runs:
        one = examined.get(id(run)) or Examined.of(run, loader)
        for name in ("output_dir", "result_dir"):  # where LAVIS's report of metrics writes
            registry.mapping["paths"][name] = str(run.folder)
        scores = compute_sim_matrix(one.backbone, loader, K_TEST)
        figures: Any = RetrievalTask._report_metrics(*scores, test.txt2img, test.img2txt)
        figures.update(retrieval_with_truth(*scores, truth))
        figures["itc_valid_txt_r1"] = 100.0 * float(
            ranked_truth(one.similarity, truth)[:, 0].mean()
        )
        with torch.inference_mode():
            logits = itm_scores(one.backbone, one.images, one.texts, *pairs)
        figures["itm_auc"] = area_under_roc(logits.numpy(), valid)
        yield run, {**figures, **negatives_of(run.folder)}


def _shortlist(similarities: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs that models together find most similar, the same number for each image."""
    ranks = sum(np.argsort(np.argsort(-sim, axis=1), axis=1) for sim in similarities)
    k = min(SHORTLIST, similarities[0].shape[1])
    texts = np.argsort(ranks, axis=1, kind="stable")[:, :k]
    return np.repeat(np.arange(len(texts)), k), texts.ravel()


def negatives_of(folder: Path) -> dict[str, float | None]:
    """Return rates of a run's last epoch, 0 to 1, the mean of both directions.

    ``false_negative_rate``: share of valid pairs among the hard negatives that were picked;
    ``false_negative_rate_in_itm``: among the pairs that ITM then learned as "no match".
    """
    epochs = read_log(folder, "epoch")
    last = epochs[-1] if epochs else {}
    return {name: _mean([last.get(f"{name}_{d}") for d in DIRECTIONS]) for name in RATES}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
