"""One training step, the same for every family and every system.

ALBEF-base, GRIT-VLP and MAFA differ only in its settings. The step is a function of a backbone, a
mini-batch and the step's parts, so that any trainer can call it.

FNE (`lavis_mafa.families.fne_retrieval`) has a step of its own, as its negatives may come from a
memory that holds only features of earlier pairs. ITM, the language loss and Con-D, which FNE does
not have, need the pairs themselves, so this step picks from mini-batches only. Both steps share
pickers, posterior, ranks and memories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lavis_mafa.algorithm.backbone import Backbone
from lavis_mafa.algorithm.context import Compared, MiniBatch
from lavis_mafa.algorithm.discriminator import Discriminator, judge_in_turn
from lavis_mafa.algorithm.mining import Connections, Judge, find_connections
from lavis_mafa.algorithm.momentum import Momentum
from lavis_mafa.algorithm.output import StepOutput, counts_of
from lavis_mafa.algorithm.parts import StepParts, build_parts
from lavis_mafa.algorithm.pickers import Picker, WithPreparation
from lavis_mafa.algorithm.rules import RULES
from lavis_mafa.algorithm.scores import SIMILARITY, PairView
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step_context import StepContext


def run_step(
    backbone: Backbone,
    samples: Mapping[str, Any],
    parts: StepParts | StepSettings,
    con_d: Discriminator | None = None,
    momentum: Momentum | None = None,
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
        parts: the parts, made once before training by `build_parts`; or only the settings, if they
            name no classes, with
        con_d, momentum: see `StepParts`; None if ``parts`` holds them.

    Raises:
        ValueError: if all losses are off, or the parts do not fit each other.
    """
    parts = _parts(parts, con_d, momentum)
    batch = MiniBatch.encode(backbone, samples, parts.settings)
    compared = batch.compare() if parts.momentum is None else parts.momentum.compare(batch)
    with torch.no_grad():
        view, temperature = _view(batch, compared, parts)
        i2t, t2i, judged = _connections(batch, view, temperature, parts)
    step = StepContext(batch, compared, i2t, t2i, parts.soft_label, parts.extra_loss, parts.form)
    found = {name: loss(step) for name, loss in parts.losses.items()}
    losses = {name: value for name, value in found.items() if value is not None}
    if not losses:
        raise ValueError("all of loss_weights are 0: nothing to train")
    weights = parts.settings.loss_weights
    terms = [
        value if weights[name] == 1 else weights[name] * value for name, value in losses.items()
    ]
    zeros = batch.zero_of_gathered(), parts.zero()
    judges = parts.con_d is not None or not parts.settings.connections.by_con_d
    return StepOutput(
        loss=torch.stack([*terms, *(zero for zero in zeros if zero is not None)]).sum(),
        losses=losses,
        temperature=backbone.temperature.detach(),
        # Grouping uses the model that picks hard negatives, so that grouped pairs are hard for it.
        image_features=view.image_vectors,
        text_features=view.text_vectors,
        own=batch.own,
        candidates=batch.numbers.get("loaded_index"),
        i2t=i2t,
        t2i=t2i,
        counts=torch.stack([counts_of(found, judges) for found in (i2t, t2i)]),
        judged_pairs=judged,
    )


def _parts(
    given: StepParts | StepSettings, con_d: Discriminator | None, momentum: Momentum | None
) -> StepParts:
    """Return the parts; raise an error for classes that were not built, and missing encoders."""
    if isinstance(given, StepSettings):
        parts = build_parts(given, con_d, momentum)
        if parts.objects:
            raise ValueError(
                f"the settings name classes ({', '.join(parts.objects)}), which must be "
                "built once; give run_step what build_parts(settings) returned before training"
            )
    elif con_d is not None or momentum is not None:
        raise ValueError("give con_d and momentum to build_parts, not to run_step with its parts")
    else:
        parts = given
    soft = parts.settings.soft_labels
    if soft.needs_momentum != (parts.momentum is not None):
        raise ValueError(
            "momentum encoders go with soft labels that need them, such as momentum; got "
            f"{soft.type} {'without' if parts.momentum is None else 'with'} them"
        )
    return parts


def _view(batch: MiniBatch, compared: Compared, parts: StepParts) -> tuple[PairView, Tensor]:
    """Return the mini-batch as seen by the model that picks hard negatives, and its temperature.

    The similarities of the view are divided by this temperature.
    """
    if parts.negatives_encoder is None:
        # The queue is left out, since it has no images and texts that ITM could match.
        sims = compared.i2t[:, : batch.count], compared.t2i[:, : batch.count]
        return PairView(*sims, *batch.vectors, batch), batch.temperature
    frozen = parts.negatives_encoder.compare(
        dict(batch.samples), batch.ranks, batch.own_images.seen
    )
    vectors = frozen.image_vectors, frozen.text_vectors
    return PairView(frozen.i2t, frozen.t2i, *vectors, batch), frozen.temperature


def _connections(
    batch: MiniBatch, view: PairView, temperature: Tensor, parts: StepParts
) -> tuple[Connections, Connections, int]:
    """Pick, judge and mine as the settings say, see `find_connections`."""
    settings, rule = parts.settings, parts.settings.connections
    scores_of = _scores(batch, view, temperature, parts)
    by = view.i2t, view.t2i
    if settings.negatives_by != SIMILARITY:
        by_i2t, by_t2i = scores_of(settings.negatives_by)
        by = by_i2t / temperature, by_t2i / temperature
    scores = None if rule.by_con_d else scores_of(rule.score)
    if RULES.entry(rule.rule).traits.needs_all:
        index, observer = batch.numbers.get("loaded_index"), parts.rule
        index = None if index is None else index[batch.own]
        observer.observe(  # type: ignore[attr-defined]
            scores, batch.never_negative, index, batch.samples.get("epoch")
        )
    return find_connections(
        *by,
        batch.positives,
        batch.own,
        _pickers(batch, by, temperature, parts.picker),
        rule,
        _judge(batch, parts.con_d) if rule.by_con_d else None,
        judge_none=batch.ranks.world > 1,
        scores=scores,
        verdict=parts.rule,
        dropped=batch.dropped,
        by_hardness=parts.losses.keys() != {"itc"},
    )


def _scores(
    batch: MiniBatch, view: PairView, temperature: Tensor, parts: StepParts
) -> Callable[[str], tuple[Tensor, Tensor]]:
    """Return a function from a score's name to its scores ``(B, C)`` of both directions."""

    @cache  # called once, even if it picks and judges: it may gather over ranks, or hold state
    def scores_of(name: str) -> tuple[Tensor, Tensor]:
        i2t, t2i = (sim.detach() * temperature for sim in (view.i2t, view.t2i))
        found = parts.scores[name](PairView(i2t, t2i, view.image_vectors, view.text_vectors, batch))
        expected = (len(batch.own), batch.count)
        for given in found:
            if given.shape != expected:
                raise ValueError(
                    f"score {name} returned an array of shape {tuple(given.shape)}, expected "
                    f"{expected}: this rank's {expected[0]} anchors, the {expected[1]} candidates "
                    "of the mini-batches of all ranks"
                )
        return found

    return scores_of


def _pickers(
    batch: MiniBatch, sims: tuple[Tensor, Tensor], temperature: Tensor, picker: Any
) -> tuple[Picker, Picker]:
    """Return the pickers of images and of texts for this mini-batch."""
    if isinstance(picker, WithPreparation):
        epoch = batch.samples.get("epoch")
        return picker.prepare(*sims, batch.never_negative, batch.own, temperature, epoch)
    return picker, picker


def _judge(batch: MiniBatch, con_d: Discriminator | None) -> Judge | None:
    """Return a function from pairs of candidates to Con-D's probabilities; None without Con-D."""
    if con_d is None:
        return None
    candidates = {**batch.samples, **batch.numbers}
    # With `seen`, a Con-D that shares the frozen image encoder need not run it again.
    return partial(judge_in_turn, con_d, candidates, ranks=batch.ranks, seen=batch.own_images.seen)
