"""The loss for other libraries and their trainers: ITC of pairs, with a judge and row numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from lavis_mafa.algorithm.features_step import PLAIN, FeaturesLoss
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.mining import ALL
from lavis_mafa.algorithm.options import suggest
from lavis_mafa.algorithm.rules import RULES, MiningRule
from lavis_mafa.algorithm.scores import SIMILARITY
from lavis_mafa.algorithm.settings import StepSettings, entries_with_settings
from lavis_mafa.integrations.cross_encoders import Guide, PairJudge
from lavis_mafa.integrations.rows import NO_NUMBERS
from lavis_mafa.io.processes import all_gather_objects

# What only ITM and the language loss read is no setting of a library's loss or trainer.
_RULE = {one.name for one in fields(MiningRule)} - {"resample", "use_in"}
_LABELS = {one.name for one in fields(SoftLabels)} - {"type"}
_STEP = {"itc_loss", "negatives", "same_image", "same_group", "detach_other"}
# Plain settings that our soft labels and rules do not read.
_UNREAD = {
    "one_hot": {"alpha", "weight", "start_epoch"},
    "smoothed": {"weight", "label_smoothing"},
    "consistency": {"alpha"},
    "pseudo_positives": {"alpha", "weight"},
    "softclip": {"alpha", "weight"},
    "margin": {"low", "high"},
    "global_threshold": {"low", "high"},
}


def settings_of(
    given: StepSettings | None,
    judge: Any,
    options: Mapping[str, Any],
    arguments: Collection[str] = (),
) -> StepSettings:
    """Return settings of the step from plain keyword arguments of a library's loss or trainer.

    Args:
        given: all settings; None: from ``options``.
        judge: what judges; without one, mining options compare by the similarities of the model.
        options: fields of `MiningRule` and `SoftLabels`, ``soft_labels`` (their name), some of
            `StepSettings`, and the own settings of registered entries by their names, such as
            ``margin=0.1``; a lone value is that of the entry's first field.
        arguments: names of the other arguments, which an unknown name may be meant for.

    Raises:
        TypeError: for an unknown name, other settings than `StepSettings`, both at once, or a
            setting that the chosen rule, labels and loss do not read.
        ValueError: for a value out of its range.
    """
    if given is not None:
        if not isinstance(given, StepSettings):
            raise TypeError(
                f"settings: got {given!r}, expected StepSettings; give other arguments by name"
            )
        if options:
            raise TypeError(f"got settings and {', '.join(options)}: give one or the other")
        return given
    entries = entries_with_settings()
    known = {*_RULE, *_LABELS, *_STEP, "soft_labels", *entries}
    for name in options:
        if name not in known:
            near = suggest(name, known.union(arguments) - {"self", "options", "named"})
            raise TypeError(f"unexpected keyword argument {name!r}; {near}")

    def given_of(names: Collection[str]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name in names}

    rule, labels, own = map(given_of, (_RULE, _LABELS, entries))
    for name, value in own.items():
        first = fields(entries[name].settings)[0].name
        own[name] = {first: value} if isinstance(value, int | float | str) else value
        if name in RULES:
            rule.setdefault("rule", name)
    if isinstance(judge, Guide):
        # GISTEmbed: what the guide finds more similar than the own pair is not a negative.
        rule = {"rule": "margin", "action": "drop", "top_k": ALL, **rule}
        own = {"margin": {"margin": 0.0}, **own}
    elif judge is None and (rule or own):
        rule = {"score": SIMILARITY, "top_k": ALL, **rule}
    smooths = {"alpha", "start_epoch"} & labels.keys()
    kind = options.get("soft_labels", "smoothed" if smooths else "one_hot")
    found = replace(
        PLAIN,
        **given_of(_STEP),
        soft_labels=SoftLabels(kind, **labels),
        connections=MiningRule(**rule),
        own=own,
    )
    unread = _unread(found, judge) & options.keys()
    if unread:
        raise TypeError(
            f"{', '.join(sorted(unread))}: no effect with rule={found.connections.rule!r}, "
            f"score={found.connections.score!r}, soft_labels={found.soft_labels.type!r}, "
            f"itc_loss={found.itc_loss!r} and {'a' if judge else 'no'} judge: leave it out, or "
            "choose what reads it"
        )
    return found


def _unread(settings: StepSettings, judge: Any) -> set[str]:
    """Return the names of plain settings that have no effect."""
    rule, label = settings.connections, settings.soft_labels.type
    used = {settings.itc_loss, label, settings.negatives, rule.score, rule.rule}
    found = entries_with_settings().keys() - used
    found |= _UNREAD.get(label, set()) | _UNREAD.get(rule.rule, set())
    if rule.by_con_d and judge is None:
        found |= {"negatives", *_RULE}
    return found


def _as_judge(judge: Any) -> Any:
    """Return a `lavis_mafa.Discriminator` of what users have.

    A CrossEncoder and a SentenceTransformer (a guide) read the texts of the mini-batch.
    """
    if hasattr(judge, "predict"):
        return PairJudge(judge)
    return Guide(judge) if hasattr(judge, "encode_document") else judge


class PairLoss(FeaturesLoss):
    """ITC of pairs whose features a library's trainer computes.

    Args:
        settings: all settings of the step; None: from ``options``.
        judge: judges hard negatives: a CrossEncoder, a SentenceTransformer (a guide, as
            GISTEmbed's), a `PairJudge`, or another `lavis_mafa.Discriminator`.
        grit: groups the mini-batches of the next epoch: a `Grit`, or a `lavis_mafa.GritSchedule` in
            a loop of one's own. The loss gives it the features of every mini-batch.
        all_ranks: candidates come from the mini-batches of all ranks.
        model_bias: the bias of the sigmoid is the model's.
        arguments, options: plain settings, see `settings_of`.

    Raises:
        TypeError, ValueError: see `settings_of`; if the rule needs ``grit``.
    """

    def __init__(
        self,
        settings: StepSettings | None = None,
        judge: Any = None,
        *,
        grit: Any = None,
        all_ranks: bool = False,
        model_bias: bool = False,
        arguments: Collection[str] = (),
        **options: Any,
    ) -> None:
        judge = _as_judge(judge)
        chosen = settings_of(settings, judge, options, {"judge", "grit", *arguments})
        if model_bias:
            unsaid = set() if "itc_loss" in options else {PLAIN.itc_loss}
            if chosen.itc_loss not in {"sigmoid", *unsaid}:
                raise ValueError(
                    f"got itc_loss={chosen.itc_loss!r}, but with the model's bias the loss is a "
                    "sigmoid: leave it out"
                )
            chosen = replace(chosen, itc_loss="sigmoid")
        super().__init__(replace(chosen, all_ranks=all_ranks or chosen.all_ranks), judge)
        if judge is not None and not hasattr(judge, "judge"):
            raise TypeError(
                f"judge: got {judge!r}, expected a CrossEncoder, a SentenceTransformer, a "
                "PairJudge or an object with the method judge of lavis_mafa.Discriminator"
            )
        score = chosen.connections.score
        if judge is not None and not chosen.connections.by_con_d:
            raise ValueError(f"got judge and score={score!r}, which judges in its place: give one")
        if grit is not None and not hasattr(grit, "collect"):
            raise TypeError(f"grit: got {grit!r}, expected Grit or lavis_mafa.GritSchedule")
        self.grit, self.model_bias = grit, model_bias
        # The texts of the mini-batch, and not rows of a data set.
        self.reads_texts = bool(getattr(judge, "reads_texts", False))
        if model_bias:
            del self.parts.form.relative_bias  # type: ignore[attr-defined]
        rows = getattr(judge, "rows", None)
        of_places = grit is not None and not hasattr(grit, "rows")
        if of_places and rows is not None and len(rows.numbers) != grit.size:
            raise ValueError(
                f"the judge has {len(rows.numbers)} rows and grit {grit.size}: give both the same"
            )
        if grit is not None:
            self.parts.allocate(grit.size)
        elif self.by_place:
            raise ValueError(
                f"connections.rule: {chosen.connections.rule} keeps state for each row of the "
                "training set: give grit; GritSettings() does not group"
            )

    def judges(self, numbers: Tensor | None, training: bool) -> bool:
        """Return whether the judge judges a mini-batch: always in training, and in evaluation if it
        can read the rows.

        Raises:
            ValueError: in training, if the judge needs numbers of rows and there are none.
        """
        judge = self.parts.con_d
        if judge is None:
            return False
        if not training:
            rows = judge.rows if isinstance(judge, PairJudge) else None
            known = rows is not None and numbers is not None and rows.known(numbers)
            reads = self.reads_texts or known
            return all(all_gather_objects(reads)) if self.parts.settings.all_ranks else reads
        if numbers is None and not self.reads_texts:
            raise ValueError(NO_NUMBERS)
        return True

    def itc(
        self,
        sides: tuple[Tensor, Tensor],
        scale: Tensor | float,
        samples: Mapping[str, Any],
        training: bool,
        mines: bool = True,
        bias: Tensor | None = None,
        negatives: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a mini-batch; in training, collect its features for GRIT.

        Args:
            sides: features ``(B, E)`` of both sides, normalised.
            scale: 1 / temperature.
            samples: keys of `lavis_mafa.run_step`; those that are None are left out;
                ``loaded_index`` has the numbers of the rows.
            training: whether the model is in training.
            mines: whether to judge, see `judges`.
            bias: of a model's logits.
            negatives: ``(M, E)``, see `FeaturesLoss.loss`.

        Raises:
            ValueError: if ``grit`` gets no numbers, or the loss needs a bias and gets none.
        """
        self.objects.train(training)
        samples = {name: one for name, one in samples.items() if one is not None}
        if self.grit is not None and training:
            if "loaded_index" not in samples:
                raise ValueError(NO_NUMBERS)
            numbers = samples["loaded_index"]
            self.grit.collect(numbers, *sides)
            schedule = getattr(self.grit, "schedule", self.grit)
            if schedule.plan is not None:
                samples |= {"epoch": schedule.epoch, "grouped": schedule.plan.grouped}
            if self.by_place and hasattr(self.grit, "rows"):
                samples["loaded_index"] = self.grit.rows.places(numbers)
            elif self.grit is schedule and (rows := getattr(self.parts.con_d, "rows", None)):
                # A schedule counts the rows of the data set from 0 on.
                own = torch.from_numpy(rows.numbers[numbers.cpu().numpy()])
                samples["loaded_index"] = own.to(numbers.device)
        if training and self.parts.settings.soft_labels.start_epoch and "epoch" not in samples:
            raise ValueError("start_epoch needs the number of the epoch: give grit, or epoch")
        scale, form = sides[0].new_tensor(1.0) * scale, cast(Any, self.parts.form)
        if self.model_bias:
            if bias is None:
                raise ValueError("SigLipLoss needs logit_bias, which SigLIP's models return")
            form.relative_bias = -bias / scale  # a logit is (cosine - bias) / temperature
        loss = self.loss(*sides, 1 / scale.reshape(()), samples, mines, negatives)
        if self.model_bias:
            form.relative_bias = form.relative_bias.detach()  # holds no graph, and can be copied
        elif bias is not None:
            # DDP waits for the gradients of all parameters, and this one changes no softmax.
            loss = loss + 0.0 * bias.sum()
        return loss


def numbers_of(labels: Tensor | None) -> Tensor | None:
    """Return the numbers of rows ``(B,)`` among a trainer's labels; others are the user's own."""
    is_number = labels is not None and labels.dtype == torch.int64 and labels.ndim == 1
    return labels if is_number else None
