"""The parts of a training step, built once from its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lavis_mafa.algorithm.discriminator import Discriminator, NegativesEncoder
from lavis_mafa.algorithm.itc_forms import ITC_LOSSES
from lavis_mafa.algorithm.labels import SOFT_LABELS
from lavis_mafa.algorithm.losses import LOSSES
from lavis_mafa.algorithm.momentum import Momentum
from lavis_mafa.algorithm.pickers import PICKERS, Picker, WithPreparation
from lavis_mafa.algorithm.registry import Entry
from lavis_mafa.algorithm.rules import RULES, Rule
from lavis_mafa.algorithm.scores import SCORES, Score
from lavis_mafa.algorithm.settings import StepSettings


@dataclass
class StepParts:
    """The parts of `lavis_mafa.algorithm.step.run_step`; use `build_parts` to make them.

    A part is a function with its settings bound, or the object of a registered class.

    Attributes:
        settings: the settings from which the parts were built.
        picker: the picker of hard negatives, see `lavis_mafa.algorithm.pickers`.
        soft_label: the labels of ITC from `SoftLabels.start_epoch` on; one-hot before.
        extra_loss: the term that ITC adds with these labels; None: there is none.
        form: the form of ITC.
        losses: the losses with a weight above 0, by name, in the order of computation.
        rule: the rule that turns scores into verdicts.
        scores: the scores that pick or judge hard negatives, by name.
        objects: instances of registered classes, by registered name. Modules among them may hold
            parameters and state, which must be saved in the model's checkpoints.
        con_d: the discriminator, which is not used if ``connections.score`` names another score. If
            it is None and there is no such score, every hard negative stays a negative (GRIT-VLP,
            ALBEF).
        momentum: momentum encoders and queue, for soft labels that need them.
        negatives_encoder: a frozen model whose similarities pick hard negatives and whose features
            GRIT uses for grouping; None: the model in training.
    """

    settings: StepSettings
    picker: Any
    soft_label: Callable[..., Tensor]
    extra_loss: Callable[..., Tensor] | None
    form: Callable[..., Tensor]
    losses: dict[str, Callable[..., Tensor | None]]
    rule: Rule
    scores: dict[str, Score]
    objects: dict[str, Any] = field(default_factory=dict)
    con_d: Discriminator | None = None
    momentum: Momentum | None = None
    negatives_encoder: NegativesEncoder | None = None

    def zero(self) -> Tensor | None:
        """Return 0 that depends on all trained parameters of the objects; None if there are none.

        DDP waits for the gradients of all parameters, even those of soft labels that start later.
        """
        modules = [one for one in self.objects.values() if isinstance(one, nn.Module)]
        trained = [p for one in modules for p in one.parameters() if p.requires_grad]
        return torch.stack([0.0 * p.float().sum() for p in trained]).sum() if trained else None

    @torch.no_grad()
    def allocate(self, size: int) -> None:
        """Prepare the objects for training data of ``size`` samples, before state is resumed.

        Objects with state for each sample have a method ``allocate(size)``, which registers buffers
        for ``loaded_index`` from 0 to size - 1 (not parameters, which the optimizer would not
        know).
        """
        for one in self.objects.values():
            if hasattr(one, "allocate"):
                one.allocate(size)


def build_parts(
    settings: StepSettings,
    con_d: Discriminator | None = None,
    momentum: Momentum | None = None,
    negatives_encoder: NegativesEncoder | None = None,
) -> StepParts:
    """Build the parts of the step, with one instance of every registered class in use.

    Args:
        settings: see `StepSettings`.
        con_d, momentum, negatives_encoder: see `StepParts`.

    Raises:
        ValueError: if two objects have the same name, or the rule needs scores that Con-D does not
            give.
        KeyError: if a loss with a weight above 0 is not registered.
    """
    classes: dict[str, Entry[Any]] = {}
    objects: dict[str, Any] = {}

    def part(entry: Entry[Any]) -> Any:
        if not isinstance(entry.value, type):
            return settings.make(entry)
        if (known := classes.setdefault(entry.name, entry)) is not entry:
            raise ValueError(
                f"two classes that the step needs are registered as {entry.name!r}, "
                f"{known.value.__qualname__} and {entry.value.__qualname__}; register one of them "
                "under another name"
            )
        if entry.name not in objects:  # the same score may pick and judge
            objects[entry.name] = settings.make(entry)
        return objects[entry.name]

    # The order here decides the order of the objects' parameters in a model and its optimizer.
    label = SOFT_LABELS.entry(settings.soft_labels.type)
    soft_label, extra_loss = part(label), label.traits.extra_loss
    if extra_loss is not None and label.settings is not None:
        extra_loss = partial(extra_loss, own=settings.own_of(label) or label.settings())
    with_itc = settings.loss_weights.get("itc")
    form = part(ITC_LOSSES.entry(settings.itc_loss if with_itc else "softmax"))
    weighted = [name for name, weight in settings.loss_weights.items() if weight]
    losses = {name: part(LOSSES.entry(name)) for name in weighted}
    rule = settings.connections
    scores = {settings.negatives_by: part(SCORES.entry(settings.negatives_by))}
    verdict = part(RULES.entry(rule.rule))
    if not rule.by_con_d:
        scores[rule.score] = part(SCORES.entry(rule.score))
    elif RULES.entry(rule.rule).traits.needs_all:
        raise ValueError(
            f"connections.rule: {rule.rule} needs the scores of all candidates, and Con-D judges "
            "only some; use score: similarity"
        )
    if settings.warm_up_epochs and settings.warm_up_negatives:
        names = settings.warm_up_negatives, settings.negatives
        first, later = (settings.make(PICKERS.entry(name)) for name in names)
        picker = objects["picker_by_epoch"] = _PickerByEpoch(first, later, settings.warm_up_epochs)
    else:
        picker = part(PICKERS.entry(settings.negatives))
    return StepParts(
        settings,
        picker,
        soft_label,
        extra_loss,
        form,
        # In the order of registration, since the order of computation decides the random draws.
        {name: losses[name] for name in LOSSES if name in losses},
        verdict,
        scores,
        objects,
        con_d,
        momentum,
        negatives_encoder,
    )


class _PickerByEpoch(nn.Module):
    """Pick by one picker in the first epochs and by another from then on.

    It is a `WithPreparation`, and a module, so that checkpoints hold the state of both pickers.
    Each picker observes only the epochs in which it picks.

    Args:
        first, later: two pickers, functions or objects.
        epochs: number of epochs in which ``first`` picks.
    """

    def __init__(self, first: Any, later: Any, epochs: int) -> None:
        super().__init__()
        self.first: Any = first
        self.later: Any = later
        self.epochs = epochs

    def prepare(
        self,
        sim_i2t: Tensor,
        sim_t2i: Tensor,
        positives: Tensor,
        own: Tensor,
        temperature: Tensor | float,
        epoch: int | None,
    ) -> tuple[Picker, Picker]:
        """Return the epoch's pickers of images and of texts, see `WithPreparation`.

        Raises:
            ValueError: if the epoch is unknown.
        """
        if epoch is None:
            raise ValueError(
                "negatives that change by epoch (warm_up_epochs) need the epoch: give its number, "
                "from 0 on, as samples['epoch']"
            )
        chosen = self.first if epoch < self.epochs else self.later
        if isinstance(chosen, WithPreparation):
            return chosen.prepare(sim_i2t, sim_t2i, positives, own, temperature, epoch)
        return chosen, chosen
