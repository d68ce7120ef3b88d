"""Pre-training with GRIT and Con-D, and the figures that show their effect."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lavis.common.registry import registry

from lavis_mafa.algorithm.binary import bin_of, lift
from lavis_mafa.algorithm.losses.matching import is_loss_of_guess
from lavis_mafa.algorithm.mining import DIRECTIONS, STATE_NAMES, MiningRule
from lavis_mafa.algorithm.output import COUNTS, StepOutput
from lavis_mafa.algorithm.rules import ABSENT, AMBIGUOUS, POSITIVE
from lavis_mafa.algorithm.tokens import COUNTS as CAPTION_COUNTS
from lavis_mafa.data.known_truth import known_pairs
from lavis_mafa.tasks.mafa_retrieval import MafaRetrievalTask
from lavis_mafa.tasks.tally import Tally

Array = npt.NDArray[Any]

REPLACED = "samples_replaced"  # unreadable, another one was read instead
WITHOUT_NEGATIVE = "anchors_without_negative"  # in an epoch, by direction
TRUTHS = ("true", "false", "unknown")
# So many that thresholds with two digits are edges of bins.
HISTOGRAM_BINS = 100  # of Con-D's probabilities
# Rates of an epoch, with the two sums whose ratio they are.
_BY_CON_D = {
    "false_negative_rate_by_con_d": ("found", "judged"),
    "ambiguous_rate": ("ambiguous", "judged"),
    "con_d_probability": ("probability_sum", "judged"),
}
_BY_TRUTH = {
    "false_negative_rate": ("false", "picked"),
    "false_negative_rate_in_itm": ("false_in_itm", "negatives_in_itm"),
}
_OF_CON_D = {
    "con_d_precision": ("true_found", "found"),
    "con_d_recall": ("true_found", "false"),
    "con_d_base_rate": ("false", "judged"),  # every hard negative is judged
}
_NAMES = {
    (direction, truth): [
        f"con_d_bin_{direction}_{truth}_{place}" for place in range(HISTOGRAM_BINS)
    ]
    for direction in DIRECTIONS
    for truth in TRUTHS
}


class StepFigures:
    """Mixin: training by a model's whole output, with figures of models that use `run_step`.

    Where the valid pairs of the training data are known, it also counts the false negatives among
    the hard negatives, and Con-D's precision and recall in detecting them. Pairs whose truth is
    unknown (`lavis_mafa.data.known_truth.known_pairs`) are left out of these rates.
    """

    _truth: Any = None  # whether pairs are valid, if the training data know it
    _rule = MiningRule()

    def before_training(self, model: Any, train_set: Any) -> None:
        """Take the valid pairs of the training data, if known, for the figures, and give Con-D
        the training data if it has a method ``know``.

        Raises:
            ValueError: if the data lack what Con-D must know.
        """
        self._truth = train_set.truth
        if hasattr(model, "settings"):
            self._rule = model.settings.connections
        con_d: Any = getattr(model, "con_d", None)
        if hasattr(con_d, "know"):
            con_d.know(train_set)

    def train_step(self, model: Any, samples: dict[str, Any]) -> Any:
        """Return the model's whole output; ``output["loss"]`` is LAVIS's loss."""
        return model(samples)

    def step_figures(self, output: Any, samples: dict[str, Any]) -> dict[str, float]:
        """Return the counts of one step for log and tally: ``<name>_i2t`` and ``<name>_t2i``,
        `REPLACED` samples, and captions by the names of `lavis_mafa.algorithm.tokens.COUNTS`.

        None of models that do not use `run_step`.
        """
        if output.get("counts") is None:
            return {}
        figures: dict[str, float] = {}
        texts = samples.get("text_input") or ()
        # The captions of other ranks are not known here.
        alone = output.candidates is None or len(output.candidates) == len(texts)
        one_caption = alone and len(set(texts)) == 1
        for direction, row in zip(DIRECTIONS, output.counts.tolist(), strict=True):
            counts = dict(zip(COUNTS, row, strict=True))
            if one_caption:  # every negative is a pair with the anchor's own caption
                counts["without_negative"] = float(len(texts))
            figures.update({f"{name}_{direction}": value for name, value in counts.items()})
            judged, total = counts["judged"], counts["probability_sum"]
            # NaN rather than missing where nothing was judged: ranks must sum the same names.
            name = self._named(f"con_d_probability_{direction}")
            figures[name] = total / judged if judged else math.nan
        figures["judged_pairs"] = float(output.judged_pairs or 0)
        figures.update({name: float(samples[name]) for name in CAPTION_COUNTS if name in samples})
        if "load_error" in samples:
            figures[REPLACED] = float(sum(map(bool, samples["load_error"])))
        if self._truth is not None:
            for direction in DIRECTIONS:
                figures.update(self._against_truth(output, direction))
        return figures

    def _named(self, name: str) -> str:
        """Return the name of a figure: a score's figures must not be taken for Con-D's."""
        if self._rule.by_con_d:
            return name
        return name.replace("con_d_probability", "score").replace("con_d", "score")

    def step_bins(self, output: Any) -> dict[str, float]:
        """Count Con-D's probabilities of one step in each bin, and ITM's pairs, for the tally.

        For the bins see `lavis_mafa.algorithm.binary.bin_of`. Names are the same on
        every rank and step: by direction and, where the truth is known, by truth. There is none for
        a score in Con-D's place, which need not be from 0 to 1.
        """
        bins: dict[str, float] = {}
        if output.get("loss_itm") is not None and output.get("i2t") is not None:
            labels = [output[d].host.itm_pairs(self._rule)[2] for d in DIRECTIONS]
            own = len(output.own)
            bins["itm_pairs"] = float(own + sum(map(len, labels)))
            bins["itm_matches"] = own + sum(float(one.sum()) for one in labels)
        if not self._rule.by_con_d:
            return bins
        for direction in DIRECTIONS if output.get("i2t") is not None else ():
            found = output[direction].host
            rows = np.nonzero(found.judged.numpy())[0]
            probability = found.probability.float().numpy()[rows]
            place = bin_of(probability, HISTOGRAM_BINS)
            parts = {"unknown": place}
            if self._truth is not None:
                valid, known = self._truth_of(*_nominated(output, direction, rows))
                parts = {"true": place[valid], "false": place[known & ~valid]}
                if hasattr(self._truth, "known"):
                    parts["unknown"] = place[~known]
            for truth, places in parts.items():
                counts = np.bincount(places, minlength=HISTOGRAM_BINS).tolist()
                bins.update(zip(_NAMES[direction, truth], counts, strict=True))
        return bins

    def epoch_histogram(self, tally: Tally) -> dict[str, Any] | None:
        """Return the bins of an epoch, None if nothing was judged.

        ``{"bins": 100, "i2t": {"true": [...], "false": [...]}, "t2i": ...}``; without known truth
        ``{"unknown": [...]}`` for each direction, and all three if some of it is known.
        """
        histogram: dict[str, Any] = {}
        for direction in DIRECTIONS:
            counts = {
                truth: [int(tally[name]) for name in _NAMES[direction, truth]]
                for truth in TRUTHS
                if _NAMES[direction, truth][0] in tally
            }
            if any(any(row) for row in counts.values()):
                histogram[direction] = counts
        return {"bins": HISTOGRAM_BINS, **histogram} if histogram else None

    def itm_is_on_plateau(self, tally: Tally) -> bool:
        """Return whether ITM's loss of an epoch is that of a guess without looking at the pair."""
        loss, share = tally.ratio("loss_itm", "steps"), tally.ratio("itm_matches", "itm_pairs")
        return loss is not None and share is not None and is_loss_of_guess(loss, share)

    def epoch_figures(self, tally: Tally) -> dict[str, float | None]:
        """Return the figures of an epoch over all ranks.

        Rates of false negatives by Con-D and by truth, precision and recall of Con-D, the base rate
        (share of valid pairs among those judged) and lift that precision must be compared with, and
        numbers of samples replaced, of captions truncated or without a known word, and of anchors
        without a negative in their mini-batch, if there are any. With a score
        in Con-D's place, names have ``score`` instead of ``con_d`` or ``con_d_probability``.
        """
        figures: dict[str, float | None] = {
            name: int(tally[name]) for name in (REPLACED, *CAPTION_COUNTS) if name in tally
        }
        for d in DIRECTIONS:
            if tally[f"without_negative_{d}"]:
                figures[f"{WITHOUT_NEGATIVE}_{d}"] = int(tally[f"without_negative_{d}"])
            judged = bool(tally[f"judged_{d}"])
            for name, (part, whole) in _BY_CON_D.items() if judged else ():
                figures[f"{name}_{d}"] = tally.ratio(f"{part}_{d}", f"{whole}_{d}")
            of_con_d = judged and f"true_found_{d}" in tally
            rates = {**_BY_TRUTH} if f"false_{d}" in tally else {}
            rates |= _OF_CON_D if of_con_d else {}
            for name, (part, whole) in rates.items():
                figures[f"{name}_{d}"] = _ratio(tally, part, whole, d)
            if of_con_d:
                precision = figures[f"con_d_precision_{d}"]
                figures[f"con_d_lift_{d}"] = lift(precision, figures[f"con_d_base_rate_{d}"])
        return {self._named(name): value for name, value in figures.items()}

    def mined(self, output: Any, samples: dict[str, Any], limit: int) -> list[dict[str, Any]]:
        """Return up to ``limit`` pairs of this step not judged negative by Con-D, as records."""
        records = []
        for direction in DIRECTIONS if output.get("i2t") is not None else ():
            found = output[direction].host
            shown = torch.nonzero((found.state == POSITIVE) | (found.state == AMBIGUOUS)).flatten()
            rows = shown[: -(-limit // 2)].numpy()
            pairs = _nominated(output, direction, rows)
            truths: list[bool | None] = [None for _ in rows]
            if self._truth is not None:
                valid, known = self._truth_of(*pairs)
                truths = [bool(v) if k else None for v, k in zip(valid, known, strict=True)]
            anchors, mined = pairs if direction == "i2t" else pairs[::-1]
            for row, anchor, other, truth in zip(rows, anchors, mined, truths, strict=True):
                records.append(
                    {
                        "direction": direction,
                        "anchor_index": int(anchor),
                        "mined_index": int(other),
                        "probability": round(float(found.probability[row]), 7),
                        "state": STATE_NAMES[int(found.state[row])],
                        "truth": truth,
                    }
                )
        return records[:limit]

    def _truth_of(self, images: Array, texts: Array) -> tuple[Array, Array]:
        """Return which pairs ``(P,)`` are known to match, and whose truth is known."""
        known = known_pairs(self._truth, images, texts)
        return np.asarray(self._truth(images, texts), bool) & known, known

    def _against_truth(self, output: StepOutput, direction: str) -> dict[str, float]:
        found = output[direction].host
        present = torch.nonzero(found.state != ABSENT).flatten().numpy()
        valid, known = self._truth_of(*_nominated(output, direction, present))
        called = (found.state.numpy() == POSITIVE)[present]
        # ITM's negatives: without converted and dropped candidates, with re-sampled ones.
        anchors, taken, labels = (x.numpy() for x in found.itm_pairs(self._rule))
        negative = 1.0 - labels  # soft labels count in part
        in_itm, known_in_itm = self._truth_of(*_samples_of(output, direction, anchors, taken))
        figures = {
            f"negatives_in_itm_{direction}": float((negative * known_in_itm).sum()),
            f"false_in_itm_{direction}": float((negative * in_itm).sum()),
            f"false_{direction}": float(valid.sum()),
            f"true_found_{direction}": float((valid & called).sum()),
        }
        if hasattr(self._truth, "known"):
            figures[f"picked_unknown_{direction}"] = float((~known).sum())
            judged = found.judged.numpy()[present]
            figures[f"judged_unknown_{direction}"] = float((~known & judged).sum())
            figures[f"found_unknown_{direction}"] = float((~known & called).sum())
        return figures


def _ratio(tally: Tally, part: str, whole: str, direction: str) -> float | None:
    """Return ``part / whole``, without the pairs of ``whole`` whose truth is unknown."""
    total = tally[f"{whole}_{direction}"]
    total -= tally[f"{whole}_unknown_{direction}"]
    return tally[f"{part}_{direction}"] / total if total else None


@registry.register_task("mafa_pretrain")
class MafaPretrainTask(StepFigures, MafaRetrievalTask):
    """Trains a ``*_mafa`` model and evaluates retrieval without fine-tuning."""


def _nominated(output: StepOutput, direction: str, rows: Array) -> tuple[Array, Array]:
    """Return the sample indices of the images and texts of some rows of a direction."""
    found = output[direction].host
    anchors, picked = (numbers.numpy()[rows] for numbers in (found.anchor, found.hard))
    return _samples_of(output, direction, anchors, picked)


def _samples_of(
    output: StepOutput, direction: str, anchors: Array, candidates: Array
) -> tuple[Array, Array]:
    """Return the sample indices of the images and texts of pairs of an anchor and a candidate."""
    loaded, own = output.samples_on_host
    anchor, picked = loaded[own[anchors]], loaded[candidates]
    return (anchor, picked) if direction == "i2t" else (picked, anchor)
