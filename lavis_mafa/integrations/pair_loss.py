"""The loss that all doors share: ITC of pairs, with a judge and rows of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from lavis_mafa.algorithm.features_step import PLAIN, FeaturesLoss
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.mining import ALL
from lavis_mafa.algorithm.rules import RULES, MiningRule
from lavis_mafa.algorithm.scores import SIMILARITY
from lavis_mafa.algorithm.settings import StepSettings, entries_with_settings
from lavis_mafa.integrations.cross_encoders import PairJudge, can_read, reads_texts
from lavis_mafa.integrations.grit_callback import Grit
from lavis_mafa.integrations.guide import Guide
from lavis_mafa.integrations.rows import ROW

_RULE = {one.name for one in fields(MiningRule)}
_LABELS = {one.name for one in fields(SoftLabels)} - {"type"}
_STEP = {"itc_loss", "negatives", "same_image", "same_group", "detach_other"}


def as_judge(judge: Any) -> Any:
    """Return a `lavis_mafa.Discriminator` from what users have.

    A CrossEncoder reads the texts of the mini-batch, and so does a SentenceTransformer, as a guide.
    """
    if hasattr(judge, "predict"):
        return PairJudge(judge)
    return Guide(judge) if hasattr(judge, "encode_document") else judge


def settings_of(given: StepSettings | None, judge: Any, options: Mapping[str, Any]) -> StepSettings:
    """Return settings of the step from plain keyword arguments of a door.

    Args:
        given: all settings; None: from ``options``.
        judge: what judges; without one, mining options compare by the similarities of the model.
        options: fields of `MiningRule` and `SoftLabels`, ``soft_labels`` (a name or `SoftLabels`),
            some of `StepSettings`, and the own settings of registered entries by their names, such
            as ``margin=0.1``.

    Raises:
        TypeError: for an unknown name, or both settings and options.
        ValueError: for a value out of its range.
    """
    if given is not None:
        if options:
            raise TypeError(f"got settings and {', '.join(options)}: give one or the other")
        return given
    rule: dict[str, Any] = {}
    labels: dict[str, Any] = {}
    step: dict[str, Any] = {}
    own: dict[str, Any] = {}
    entries = entries_with_settings()
    for name, value in options.items():
        if name in _RULE:
            rule[name] = value
        elif name in _LABELS:
            labels[name] = value
        elif name == "soft_labels" and isinstance(value, str):
            labels["type"] = value
        elif name in _STEP or name == "soft_labels":
            step[name] = value
        elif name in entries:
            plain = isinstance(value, int | float)
            own[name] = {name: value} if plain else value
            if name in RULES:
                rule.setdefault("rule", name)
        else:
            known = [*_RULE, *_LABELS, *_STEP, "soft_labels", *entries]
            near = get_close_matches(name, known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise TypeError(f"unexpected keyword argument {name!r}{hint}")
    if isinstance(judge, Guide):
        # GISTEmbed: what the guide finds more similar than the own pair is no negative.
        rule = {"rule": "margin", "action": "drop", "top_k": ALL, **rule}
        own = {"margin": {"margin": 0.0}, **own}
    elif judge is None and (rule or own):
        rule = {"score": SIMILARITY, "top_k": ALL, **rule}
    if "soft_labels" not in step:
        smooths = {"alpha", "start_epoch"} & labels.keys()
        step["soft_labels"] = SoftLabels(**{"type": "smoothed" if smooths else "one_hot", **labels})
    return replace(PLAIN, **step, connections=MiningRule(**rule), own=own)


class PairLoss(FeaturesLoss):
    """ITC of pairs whose features a library's trainer computes.

    Args:
        judge: judges hard negatives: a CrossEncoder, a SentenceTransformer (a guide, as
            GISTEmbed's), a `PairJudge`, or another `lavis_mafa.Discriminator`.
        grit: collects the features of the mini-batches, from which the next epoch is grouped.
        settings: all settings of the step; None: from ``options``.
        all_ranks: candidates come from the mini-batches of all ranks.
        options: plain settings, see `settings_of`.
    """

    def __init__(
        self,
        judge: Any = None,
        grit: Any = None,
        settings: StepSettings | None = None,
        all_ranks: bool = False,
        **options: Any,
    ) -> None:
        judge = as_judge(judge)
        chosen = settings_of(settings, judge, options)
        super().__init__(replace(chosen, all_ranks=all_ranks or chosen.all_ranks), judge)
        self.grit = grit

    def samples_of(
        self, labels: Tensor | None, sides: tuple[Tensor, Tensor], training: bool
    ) -> tuple[dict[str, Any], bool]:
        """Return the samples of the step, and whether the judge judges; collect what GRIT groups.

        Args:
            labels: ``(B,)`` numbers of rows, see `numbered`; anything else is the user's own.
            sides: features ``(B, E)`` of both sides.
            training: whether the model is in training.

        Raises:
            ValueError: if numbers are needed and missing.
        """
        judge, grit = self.parts.con_d, self.grit
        is_number = labels is not None and labels.dtype == torch.int64 and labels.ndim == 1
        numbers = labels if is_number else None
        self.objects.train(training)
        mines = judge is not None and (training or self.on_all(can_read(judge, numbers)))
        needed = grit is not None or (judge is not None and not reads_texts(judge))
        if numbers is None and training and needed:
            raise ValueError(f"no numbers of rows; train on numbered(dataset), column {ROW!r}")
        samples: dict[str, Any] = {} if numbers is None else {"loaded_index": numbers}
        if isinstance(grit, Grit) and training and numbers is not None:
            grit.collect(numbers, *sides)
            samples |= grit.of_epoch()
            if self.by_place:
                samples["loaded_index"] = grit.rows.places(numbers)
        return samples, mines
