"""Measure models that a study trained on the toy world, where all valid pairs are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from torch.utils.data import DataLoader

from lavis_mafa import load_model
from lavis_mafa.algorithm.backbone import Images, Texts
from lavis_mafa.algorithm.binary import area_under_roc
from lavis_mafa.algorithm.mining import DIRECTIONS
from lavis_mafa.checkpoints.recorded_sizes import PLACES
from lavis_mafa.families.many_pairs import ManyPairs
from lavis_mafa.families.rerank import MAX_TOKENS, encode_split, rerank
from lavis_mafa.settings import load_config
from lavis_mafa.tasks.recall import retrieval_of_own_pairs, retrieval_with_truth
from lavis_mafa.tools.charts import Bars
from lavis_mafa.toyworld import ToyScenesBuilder, ToyScenesEval
from lavis_mafa.toyworld.builder import DETAILED
from lavis_mafa.training.run_log import mean_of, read_log
from research.studies.plan import Job

K_TEST = 32
_SHORTLIST = 16  # number of texts per image in the pairs for ITM's AUC
_ANY_PAIR = ("valid_txt", "valid_img", "detailed_valid_txt", "detailed_valid_img")
RATES = (
    "false_negative_rate",
    "false_negative_rate_in_itm",
    "con_d_precision",
    "con_d_base_rate",
    "con_d_lift",
    "con_d_recall",
)


@dataclass
class Examined:
    """A trained model, with its encoded test images and texts."""

    backbone: Any
    images: Images
    texts: Texts
    similarity: np.ndarray
    rerank_by: str = "sum"

    @classmethod
    def of(cls, run: Job, loader: Any) -> Examined:
        whole = load_config(run.config, list(run.options), machine=False)
        cfg = whole.model_cfg
        # The run's config is trusted, but paths in the checkpoint are not followed.
        own, device = {name: cfg[name] for name in PLACES if cfg.get(name)}, whole.run_cfg.device
        model = load_model(cfg.arch, None, True, device, str(run.checkpoint), own)
        with torch.inference_mode():
            images, texts = encode_split(model.backbone, loader)
            assert images.features is not None and texts.features is not None
            similarity = model.backbone.similarity(images.features, texts.features).cpu().numpy()
        by = whole.run_cfg.get("rerank_by", "sum")
        return cls(model.backbone, images, texts, similarity, by)

    def retrieval(self, test: Any, truth: np.ndarray, k_test: int) -> dict[str, Any]:
        """Return percentages of retrieval, re-ranked by ITM, against original pairs and the truth;
        ``odds_*`` are re-ranked by ``run.rerank_by: odds``.

        Args:
            test: the data set that was encoded.
            truth: ``(I, T)`` bool, all valid pairs of the data set.
        """
        found: dict[str, Any] = {}
        orders = ("odds", self.rerank_by)
        both = rerank(self.backbone, self.images, self.texts, k_test, orders)
        for prefix, scores in zip(("odds_", ""), both, strict=True):
            figures = retrieval_of_own_pairs(*scores, test.txt2img, test.img2txt)
            figures |= retrieval_with_truth(*scores, truth)
            found |= {f"{prefix}{name}": value for name, value in figures.items()}
        return found

    @torch.inference_mode()
    def probability_of_match(self, images: np.ndarray, texts: np.ndarray) -> np.ndarray:
        """Return ITM's P(match) for pairs ``(P,)`` of image and text numbers.

        A probability, since one logit says nothing without the other.
        """
        pairs = torch.from_numpy(images), torch.from_numpy(texts)
        logits = ManyPairs(self.backbone).match(self.images, self.texts, *pairs)
        return np.asarray(logits.softmax(dim=1)[:, 1].cpu().numpy())


def toy_world(build_info: Mapping[str, Any], kind: str = "default") -> dict[str, Any]:
    """Return the splits of `toy_scenes` with this type and ``build_info``."""
    cfg = load_dataset_config(ToyScenesBuilder.default_config_path(kind))
    cfg.build_info.update(build_info)
    return ToyScenesBuilder(cfg).build_datasets()


def measure(runs: Sequence[Job], judges: Sequence[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Measure retrieval, ITM and hard negatives of runs, on the test images of their data.

    Args:
        runs: all with the same test images.
        judges: runs that together choose the most similar pairs, on which ITM's AUC of all runs is
            computed. By itself, a model with a weak ITC would choose easy pairs.

    Yields:
        Each run with its figures: percentages of retrieval against original pairs and full truth,
        in a world with topics also for detailed captions (``detailed_*``); ``any_r1``, the mean of
        R@1 against the full truth over all of these; ``itm_auc`` (0 to 1); and `negatives_of`.
    """
    # Several threads wait for each other longer than they help models of this size.
    torch.set_num_threads(1)
    data = load_config(judges[0].config, list(judges[0].options), machine=False).datasets_cfg
    world = toy_world(data.toy_scenes.build_info, data.toy_scenes.get("type", "default"))
    test = world["test"]
    truth = test.truth_matrix()
    detailed = [(one, one.truth_matrix()) for one in [world.get(DETAILED)] if one is not None]
    examined = {id(judge): Examined.of(judge, _loader(test)) for judge in judges}
    image_of, text_of = _shortlist([one.similarity for one in examined.values()])
    valid = truth[image_of, text_of]
    for run in runs:
        one = examined.get(id(run)) or Examined.of(run, _loader(test))
        figures = one.retrieval(test, truth, K_TEST)
        figures["itc_valid_txt_r1"] = r1(one.similarity, truth)
        figures["itc_valid_img_r1"] = r1(one.similarity.T, truth.T)
        for captions, valid_captions in detailed:
            # Only the captions differ, so the images need not be encoded again.
            with torch.inference_mode():
                texts = ManyPairs(one.backbone).encode_texts(captions.text, max_length=MAX_TOKENS)
            other = replace(one, texts=texts)
            more = other.retrieval(captions, valid_captions, K_TEST)
            figures.update({f"detailed_{name}": value for name, value in more.items()})
        figures["any_r1"] = mean_of(figures, [f"{k}_r1" for k in _ANY_PAIR])
        odds = [f"{k.replace('valid', 'odds_valid')}_r1" for k in _ANY_PAIR]
        figures["odds_any_r1"] = mean_of(figures, odds)
        figures["odds_gain"] = figures["odds_any_r1"] - figures["any_r1"]
        figures["itm_auc"] = area_under_roc(one.probability_of_match(image_of, text_of), valid)
        yield run, {**figures, **negatives_of(run.folder)}


def _loader(test: ToyScenesEval) -> Any:
    return DataLoader(test, batch_size=250, collate_fn=test.collater)


def r1(similarity: np.ndarray, truth: np.ndarray) -> float:
    """Return the percentage of queries whose most similar candidate is valid."""
    return 100.0 * float(relevant_first(similarity, truth).mean())


def relevant_first(scores: np.ndarray, relevant: np.ndarray) -> np.ndarray:
    """Return for each query ``(Q,)`` whether the candidate with the highest score is relevant."""
    best: np.ndarray = np.take_along_axis(relevant, scores.argmax(axis=1, keepdims=True), axis=1)
    return best[:, 0]


def _shortlist(similarities: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs that several models find most similar, equally many for each image."""
    ranks = sum(np.argsort(np.argsort(-sim, axis=1), axis=1) for sim in similarities)
    k = min(_SHORTLIST, similarities[0].shape[1])
    texts = np.argsort(ranks, axis=1, kind="stable")[:, :k]
    return np.repeat(np.arange(len(texts)), k), texts.ravel()


def negatives_of(folder: Path) -> dict[str, float | None]:
    """Return rates of a run's last epoch, averaged over both directions.

    ``false_negative_rate``: share of valid pairs among the hard negatives that were picked, 0 to 1;
    ``false_negative_rate_in_itm``: among the pairs that ITM then learned as "no match"; Con-D's
        rates are named as in the log (``con_d_lift`` is its precision divided by the base rate).
    """
    epochs = read_log(folder, "epoch")
    last = epochs[-1] if epochs else {}
    return {name: mean_of(last, [f"{name}_{d}" for d in DIRECTIONS]) for name in RATES}


def headline(figures: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[Bars]]:
    """Return a sentence on how mining changed false negatives, and bars that compare the systems.

    Args:
        figures: measured figures by the name of the run, with the system's ``name``.
    """
    grit, mafa = figures.get("grit", {}), figures.get("mafa", {})
    before, after = (one.get("false_negative_rate_in_itm") for one in (grit, mafa))
    text = ""
    if before is not None and after is not None:
        text = (
            f"{before:.0%} of the hard negatives that ITM learns as 'no match' in {grit['name']} "
            f"actually match; in {mafa['name']} {after:.0%} do.".replace("%", " %")
        )
    bars = []
    for title, key, scale, low, high in (
        ("Learned as no match, but match (percent)", "false_negative_rate_in_itm", 100, 0, 100),
        ("First search result is valid (R@1, percent)", "any_r1", 1, 0, 100),
        ("ITM separates valid pairs from others (AUC, 0.5 to 1)", "itm_auc", 1, 0.5, 1),
    ):
        systems = [one for run, one in figures.items() if run != "con_d"]
        values = {one["name"]: scale * one[key] for one in systems if one.get(key) is not None}
        bars += [Bars(title, values, low, high)] if values else []
    return text, bars
