"""Settings of the training step: ``model.mafa`` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

from lavis_mafa.algorithm.labels import SOFT_LABELS, SoftLabels
from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.algorithm.options import check_options, option
from lavis_mafa.algorithm.pickers import PICKERS, Picker, PickerByEpoch
from lavis_mafa.algorithm.posterior import PosteriorRule
from lavis_mafa.algorithm.registry import LOSSES, Entry


@dataclass(frozen=True)
class LossWeights:
    """Default weights of the losses; a loss of weight 0 is not computed."""

    itc: float = option(1.0, "image-text contrastive", low=0)
    imc: float = option(
        0.0, "intra-modal contrastive (TCL: itc, imc and lmi 1/3 each)", source="TCL", low=0
    )
    lmi: float = option(0.0, "local mutual information", source="TCL", low=0)
    itm: float = option(1.0, "image-text matching", low=0)
    lm: float = option(1.0, "masked or causal language modelling", low=0, also=("mlm",))


@dataclass(frozen=True)
class StepSettings:
    """Settings of `lavis_mafa.algorithm.step.run_step`.

    Attributes:
        all_ranks: candidates come from the mini-batches of all ranks, as in BLIP-2, instead of only
            the rank's own; ``model.negative_all_rank`` of a config.
        own: settings of registered pickers, soft labels and losses that have some, by the entry's
            name; an entry that is not listed has its defaults.
    """

    negatives: str = option(
        "hardest",
        "hard negatives: the hardest in the mini-batch, sampled by similarity (ALBEF), drawn with "
        "equal probabilities (lavis_mafa), or sampled by the posterior that they are false (FNE)",
        source="MAFA 4.1, ALBEF 3.2, FNE",
        choices=PICKERS,
    )
    warm_up_epochs: int = option(
        0, "first epochs, which use warm_up_negatives instead of negatives", low=0
    )
    warm_up_negatives: str | None = option(
        None, "negatives of the first warm_up_epochs epochs, such as uniform", choices=PICKERS
    )
    posterior: PosteriorRule = option(
        factory=PosteriorRule, doc="settings of negatives: posterior", source="FNE"
    )
    detach_other: bool = option(
        True, "image to text trains images only, text to image texts only", source="MAFA 4.2"
    )
    same_image: str = option(
        "positive",
        "captions of one image: positives of each other, or negatives as in the papers",
        choices=("positive", "negative"),
    )
    all_ranks: bool = False
    loss_weights: Mapping[str, float] = option(
        factory=lambda: asdict(LossWeights()), doc="weights of the losses; 0: off", keys=LossWeights
    )
    soft_labels: SoftLabels = option(
        factory=SoftLabels, doc="soft labels of ITC", source="MAFA 4.2"
    )
    connections: MiningRule = option(
        factory=MiningRule,
        doc="what happens to hard negatives that Con-D judged",
        source="MAFA 4.1",
    )
    own: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_options(self)
        if (self.warm_up_negatives is None) != (self.warm_up_epochs == 0):
            raise ValueError(
                "warm_up_negatives and warm_up_epochs go together, got "
                f"{self.warm_up_negatives} for {self.warm_up_epochs} epochs"
            )

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any], all_ranks: bool = False) -> StepSettings:
        """Build from ``model.mafa`` and ``model.negative_all_rank``; missing keys keep defaults."""
        simple = ("negatives", "warm_up_epochs", "warm_up_negatives", "detach_other", "same_image")
        known = {key: cfg[key] for key in simple if key in cfg}
        rule = dict(cfg.get("connections") or {})
        if "use_in" in rule:
            rule["use_in"] = tuple(rule["use_in"])
        built_in = {one.name for one in fields(cls)}
        own = {
            name: entry.settings(**(cfg.get(name) or {}))
            for registry in (PICKERS, SOFT_LABELS, LOSSES)
            for name, entry in registry.entries().items()
            if entry.settings is not None and name not in built_in
        }
        return cls(
            **known,
            all_ranks=all_ranks,
            loss_weights={**asdict(LossWeights()), **(cfg.get("loss_weights") or {})},
            posterior=PosteriorRule(**(cfg.get("posterior") or {})),
            soft_labels=SoftLabels(**(cfg.get("soft_labels") or {})),
            connections=MiningRule(**rule),
            own=own,
        )

    def own_of(self, entry: Entry[Any]) -> Any:
        """Return the own settings of a registered entry; None if it has none."""
        if entry.settings is None:
            return None
        # The settings of `posterior` are a field of `StepSettings`, not an entry of `own`.
        given = self.own.get(entry.name, getattr(self, entry.name, None))
        return given if isinstance(given, entry.settings) else entry.settings()


def build_picker(settings: StepSettings) -> Any:
    """Build the settings' picker of hard negatives, if it is an object; None for a function.

    It is one where ``settings.negatives`` names a class or ``settings.warm_up_epochs`` is not 0.
    """
    if settings.warm_up_epochs and settings.warm_up_negatives is not None:
        first, later = settings.warm_up_negatives, settings.negatives
        return PickerByEpoch(
            _picker(settings, first), _picker(settings, later), settings.warm_up_epochs
        )
    return None if function_of(settings) is not None else _picker(settings, settings.negatives)


def needs_object(settings: StepSettings) -> bool:
    """Return whether the step needs what `build_picker` builds."""
    return bool(settings.warm_up_epochs) or function_of(settings) is None


def function_of(settings: StepSettings) -> Picker | None:
    """Return the function that ``settings.negatives`` names; None for a class."""
    if isinstance(PICKERS.entry(settings.negatives).value, type):
        return None
    function: Picker = _picker(settings, settings.negatives)
    return function


def _picker(settings: StepSettings, name: str) -> Any:
    """Return a registered picker with its own settings: a function or a new object."""
    entry = PICKERS.entry(name)
    own = settings.own_of(entry)
    if isinstance(entry.value, type):
        return entry.value() if own is None else entry.value(own)
    return entry.value if own is None else partial(entry.value, own=own)
