"""One training step, the same for every family and every system.

ALBEF-base, GRIT-VLP and MAFA are settings of it. It is a function of a backbone, a mini-batch and
settings, so it can be called from any trainer.

FNE (`lavis_mafa.models.families.dual.fne_retrieval`) has a step of its own: its negatives may come
from a memory of earlier pairs, of which only features are left. ITM, the language loss and Con-D
need the pair itself, so this step picks among mini-batches only. FNE has none of the three; what
both need (pickers, the posterior, ranks, memories) are the same modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lavis_mafa.algorithm import global_threshold  # noqa: F401  registers its rule
from lavis_mafa.algorithm.backbone import Backbone
from lavis_mafa.algorithm.context import MiniBatch, StepContext
from lavis_mafa.algorithm.discriminator import Discriminator
from lavis_mafa.algorithm.losses import LOSSES
from lavis_mafa.algorithm.mining import Judge, find_connections
from lavis_mafa.algorithm.momentum import Momentum
from lavis_mafa.algorithm.negatives_encoder import EncodedByFrozen, NegativesEncoder
from lavis_mafa.algorithm.output import StepOutput, counts_of
from lavis_mafa.algorithm.pickers import Picker, WithPreparation
from lavis_mafa.algorithm.rules import RULES
from lavis_mafa.algorithm.scores import SCORES, SIMILARITY, PairView, Score
from lavis_mafa.algorithm.settings import (
    StepSettings,
    function_of,
    function_or_object,
    needs_object,
    object_names,
    picker_name,
)


def run_step(
    backbone: Backbone,
    samples: Mapping[str, Any],
    settings: StepSettings,
    con_d: Discriminator | None = None,
    momentum: Momentum | None = None,
    picker: Any = None,
    negatives_encoder: NegativesEncoder | None = None,
    objects: Mapping[str, Any] | None = None,
) -> StepOutput:
    """Encode, compare, pick, judge, mine and compute the losses of one mini-batch (MAFA Figure 3).

    Args:
        backbone: the model in training.
        samples: ``image`` ``(B, 3, H, W)``, ``text_input`` (B captions); optional ``image_id``
            ``(B,)`` (equal for captions of one image), ``group_id`` ``(B,)`` (equal for pairs that
            are never negatives of each other, -1 for a pair in no group), ``loaded_index`` ``(B,)``
            (numbers of the samples in their data set), `TOKENS` (the captions tokenised),
            `SECOND_VIEW` ``(B, 3, H, W)`` (input of momentum encoders, instead of ``image``),
            ``epoch`` (int) and ``grouped`` (bool, whether the mini-batch was grouped by
            similarity). With ``settings.all_ranks`` B must be the same on all ranks, and optional
            keys must be present on all ranks or on none.
        settings: see `StepSettings`.
        con_d: the discriminator; None leaves every hard negative a negative (GRIT-VLP, ALBEF),
            unless ``settings.connections.score`` judges them. With such a score it is not used.
        momentum: momentum encoders and queue, for soft labels that need them, such as ``momentum``.
        picker: made by `lavis_mafa.algorithm.settings.build_picker`, where that builds one; it may
            hold state from step to step. None: that of ``objects``.
        negatives_encoder: a frozen model whose similarities hard negatives are picked by, and whose
            features GRIT groups by; None: those of ``backbone``.
        objects: made by `lavis_mafa.algorithm.settings.build_objects`, which builds the picker as
            well; they may hold parameters and state. Not needed where the settings name functions
            only.

    Raises:
        ValueError: if all losses are off, or ``momentum``, ``picker`` or ``objects`` does not fit
            the settings.
        KeyError: if a loss with a weight is not registered.
    """
    objects = objects or {}
    picker = objects.get(picker_name(settings)) if picker is None else picker
    _check_parts(settings, momentum, picker, objects)
    batch = MiniBatch.encode(backbone, samples, settings)
    compared = batch.compare() if momentum is None else momentum.compare(batch)
    with torch.no_grad():
        # Only candidates of mini-batches: the queue holds features without an image or a text
        # that ITM could match.
        frozen = _encoded_by_frozen(batch, negatives_encoder)
        if frozen is None:
            sims = compared.i2t[:, : batch.count], compared.t2i[:, : batch.count]
        else:
            sims = frozen.i2t, frozen.t2i
        temperature = batch.temperature if frozen is None else frozen.temperature
        vectors = batch.vectors if frozen is None else (frozen.image_vectors, frozen.text_vectors)

        @cache  # one score may both pick and judge; it may gather over ranks, or hold state
        def scores_of(name: str) -> tuple[Tensor, Tensor]:
            i2t, t2i = (sim.detach() * temperature for sim in sims)
            view = PairView(i2t, t2i, *vectors, batch)
            score: Score = function_or_object(SCORES.entry(name), settings, objects)
            found = score(view)
            _check_scores(name, found, batch)
            return found

        by = sims
        if settings.negatives_by != SIMILARITY:
            by_i2t, by_t2i = scores_of(settings.negatives_by)
            by = by_i2t / temperature, by_t2i / temperature
        rule = settings.connections
        scores = None if rule.by_con_d else scores_of(rule.score)
        entry = RULES.entry(rule.rule)
        verdict = function_or_object(entry, settings, objects)
        if entry.traits.needs_all:
            _observe(verdict, scores, batch)
        i2t, t2i, judged = find_connections(
            *by,
            batch.positives,
            batch.own,
            _pickers(batch, by, temperature, picker),
            rule,
            _judge(batch, con_d) if rule.by_con_d else None,
            judge_none=batch.ranks.world > 1,
            scores=scores,
            verdict=verdict,
            dropped=batch.dropped,
        )
    judges = con_d is not None or not rule.by_con_d
    losses = _losses(StepContext(batch, compared, i2t, t2i, objects))
    weights = settings.loss_weights
    loss = torch.stack([weights[name] * value for name, value in losses.items()]).sum()
    return StepOutput(
        loss=loss + batch.zero_of_gathered() + _zero_of(objects),
        losses=losses,
        temperature=backbone.temperature.detach(),
        # Grouping looks for mini-batches with hard negatives: by the model that picks them.
        image_features=vectors[0],
        text_features=vectors[1],
        own=batch.own,
        candidates=batch.numbers.get("loaded_index"),
        i2t=i2t,
        t2i=t2i,
        counts=torch.stack([counts_of(found, judges) for found in (i2t, t2i)]),
        judged_pairs=judged,
    )


def _check_parts(
    settings: StepSettings, momentum: Momentum | None, picker: Any, objects: Mapping[str, Any]
) -> None:
    """Refuse settings and parts that do not fit each other."""
    for name, weight in settings.loss_weights.items():
        if weight:
            LOSSES.entry(name)
    if settings.soft_labels.needs_momentum != (momentum is not None):
        raise ValueError(
            "momentum encoders go with soft labels that need them, such as momentum; got "
            f"{settings.soft_labels.type} {'without' if momentum is None else 'with'} them"
        )
    if momentum is None and any(settings.loss_weights.get(name) for name in ("imc", "lmi")):
        raise ValueError("loss_weights imc and lmi (TCL) need soft_labels.type: momentum")
    if needs_object(settings) != (picker is not None):
        name = settings.negatives + (" after a warm-up" if settings.warm_up_epochs else "")
        raise ValueError(
            f"negatives: {name} {'needs a' if picker is None else 'takes no'} picker built from "
            "the settings; give run_step what build_picker(settings) returns"
        )
    needed = {name for name in object_names(settings) if name != picker_name(settings)}
    if missing := sorted(needed - objects.keys()):
        raise ValueError(
            f"the settings name classes of which no object is given: {', '.join(missing)}; give "
            "run_step objects=build_objects(settings), built once before training"
        )


def _zero_of(objects: Mapping[str, Any]) -> Tensor | float:
    """Return 0 that depends on all trained parameters of the objects.

    DDP waits for the gradients of all parameters, also of soft labels that have not begun.
    """
    modules = [one for one in objects.values() if isinstance(one, nn.Module)]
    trained = [p for one in modules for p in one.parameters() if p.requires_grad]
    return sum((0.0 * p.float().sum() for p in trained), start=0.0)


def _encoded_by_frozen(
    batch: MiniBatch, encoder: NegativesEncoder | None
) -> EncodedByFrozen | None:
    """Return the mini-batch as the frozen encoder sees it; None without one."""
    if encoder is None:
        return None
    return encoder.compare(dict(batch.samples), batch.ranks, batch.own_images.seen)


def _check_scores(name: str, scores: tuple[Tensor, Tensor], batch: MiniBatch) -> None:
    expected = (len(batch.own), batch.count)
    for given in scores:
        if given.shape != expected:
            raise ValueError(
                f"score {name} returned an array of shape {tuple(given.shape)}, expected "
                f"{expected}: this rank's {expected[0]} anchors, the {expected[1]} candidates of "
                "the mini-batches of all ranks"
            )


def _observe(rule: Any, scores: tuple[Tensor, Tensor] | None, batch: MiniBatch) -> None:
    """Let a rule learn from the scores of all candidates."""
    if scores is None:
        raise ValueError(
            f"connections.rule: {batch.settings.connections.rule} needs the scores of all "
            "candidates, and Con-D judges only some; use score: similarity"
        )
    index, epoch = batch.numbers.get("loaded_index"), batch.samples.get("epoch")
    rule.observe(scores, batch.never_negative, None if index is None else index[batch.own], epoch)


def _pickers(
    batch: MiniBatch, sims: tuple[Tensor, Tensor], temperature: Tensor, picker: Any
) -> tuple[Picker, Picker]:
    """Return the pickers of images and of texts for this mini-batch."""
    if isinstance(picker, WithPreparation):
        epoch = batch.samples.get("epoch")
        return picker.prepare(*sims, batch.never_negative, batch.own, temperature, epoch)
    chosen: Any = function_of(batch.settings) if picker is None else picker
    return chosen, chosen


def _judge(batch: MiniBatch, con_d: Discriminator | None) -> Judge | None:
    """Return Con-D's verdict as a function of pairs of candidates; None without Con-D."""
    if con_d is None:
        return None
    candidates = {**batch.samples, **batch.numbers}
    # `seen`: a Con-D with the same frozen image encoder need not run it a second time.
    return partial(con_d.judge, candidates, ranks=batch.ranks, seen=batch.own_images.seen)


def _losses(step: StepContext) -> dict[str, Tensor]:
    """Compute every registered loss that has a weight."""
    losses = {}
    for name, entry in LOSSES.entries().items():
        if not step.settings.loss_weights.get(name):
            continue
        value = step.function_or_object(entry)(step)
        if value is not None:
            losses[name] = value
    if not losses:
        raise ValueError("all of loss_weights are 0: nothing to train")
    return losses
