"""Settings of the training step: ``model.mafa`` of a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

from lavis_mafa.algorithm.itc_forms import ITC_LOSSES
from lavis_mafa.algorithm.labels import SOFT_LABELS, SoftLabels
from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.algorithm.options import check_options, option
from lavis_mafa.algorithm.pickers import PICKERS, Picker, PickerByEpoch
from lavis_mafa.algorithm.posterior import PosteriorRule
from lavis_mafa.algorithm.registry import LOSSES, MAFA, Entry
from lavis_mafa.algorithm.rules import RULES
from lavis_mafa.algorithm.scores import SCORES, SIMILARITY


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
        own: settings of registered pickers, soft labels, losses, scores and rules that have some,
            by the entry's name; an entry that is not listed has its defaults.
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
    negatives_by: str = option(
        SIMILARITY,
        "score by which hard negatives are picked: similarity of images and texts, or within each",
        choices=SCORES,
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
    same_group: str = option(
        "dropped",
        "pairs of one group of the data (group_id_key): left out of each other's losses, positives "
        "of each other, or negatives as without groups; never picked in the first two",
        source="NVIDIA TAO, SigLIP",
        choices=("dropped", "positive", "negative"),
    )
    itc_loss: str = option(
        "softmax",
        "form of ITC: InfoNCE, SigLIP's sigmoid, debiased (DCL), or robust to false positives "
        "(RINCE)",
        source="MAFA eq. 1, SigLIP, DCL, RINCE",
        choices=ITC_LOSSES,
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
        simple = (
            *("negatives", "warm_up_epochs", "warm_up_negatives", "negatives_by"),
            *("detach_other", "same_image", "same_group", "itc_loss"),
        )
        known = {key: cfg[key] for key in simple if key in cfg}
        rule = dict(cfg.get("connections") or {})
        if "use_in" in rule:
            rule["use_in"] = tuple(rule["use_in"])
        built_in = {one.name for one in fields(cls)}
        own = {
            name: entry.settings(**(cfg.get(name) or {}))
            for registry in MAFA.registries
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


def classes_in_use(settings: StepSettings) -> dict[str, Entry[Any]]:
    """Return the registered classes, other than pickers, that the settings name.

    Raises:
        ValueError: if two of them have the same name.
    """
    named: list[Entry[Any]] = [SOFT_LABELS.entry(settings.soft_labels.type)]
    if settings.loss_weights.get("itc"):
        named.append(ITC_LOSSES.entry(settings.itc_loss))
    named += [LOSSES.entry(one) for one, weight in settings.loss_weights.items() if weight]
    rule = settings.connections
    named += [SCORES.entry(settings.negatives_by), RULES.entry(rule.rule)]
    named += [] if rule.by_con_d else [SCORES.entry(rule.score)]
    found: dict[str, Entry[Any]] = {}
    for entry in named:
        if not isinstance(entry.value, type):
            continue
        if found.setdefault(entry.name, entry) is not entry:
            raise ValueError(
                f"two classes that the step needs are registered as {entry.name!r}, "
                f"{found[entry.name].value.__qualname__} and {entry.value.__qualname__}; "
                "register one of them under another name"
            )
    return found


def build_objects(settings: StepSettings) -> dict[str, Any]:
    """Build the objects that the step needs: one of every registered class that is in use.

    Each is constructed from its own settings, or without arguments if it has none. Parameters and
    state of those that are modules belong in the checkpoints of the model that is trained.

    Returns:
        Objects by registered name; `picker_name` is that of the picker.

    Raises:
        ValueError: if two objects have the same name.
    """
    objects = {
        name: _construct(entry, settings) for name, entry in classes_in_use(settings).items()
    }
    if needs_object(settings):
        if picker_name(settings) in objects:
            raise ValueError(
                f"negatives: {picker_name(settings)} is also the name of "
                f"{type(objects[picker_name(settings)]).__qualname__}, which the step needs as "
                "well; register one of them under another name"
            )
        objects[picker_name(settings)] = build_picker(settings)
    return objects


def object_names(settings: StepSettings) -> list[str]:
    """Return the names of what `build_objects` builds."""
    names = list(classes_in_use(settings))
    return [*names, picker_name(settings)] if needs_object(settings) else names


def function_or_object(
    entry: Entry[Any], settings: StepSettings, objects: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return what an entry names, ready to be called.

    This is a function with its own settings bound, or the object of a class.

    Args:
        entry: of a soft label, a loss or the like.
        settings: of the step.
        objects: see `build_objects`.

    Raises:
        ValueError: if the entry is a class, but there is no object of it.
    """
    if isinstance(entry.value, type):
        if entry.name not in objects:
            raise ValueError(
                f"{entry.name} is a class, and no object of it is given; give run_step "
                "objects=build_objects(settings), built once before training"
            )
        made: Callable[..., Any] = objects[entry.name]
        return made
    own = settings.own_of(entry)
    function: Callable[..., Any] = entry.value
    return function if own is None else partial(function, own=own)


def picker_name(settings: StepSettings) -> str:
    """Return the name of the picker among the objects of the step, and in checkpoints."""
    return "picker_by_epoch" if settings.warm_up_epochs else settings.negatives


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
    if isinstance(entry.value, type):
        return _construct(entry, settings)
    return function_or_object(entry, settings, {})


def _construct(entry: Entry[Any], settings: StepSettings) -> Any:
    own = settings.own_of(entry)
    return entry.value() if own is None else entry.value(own)
