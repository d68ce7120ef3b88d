"""Settings of the training step: ``model.mafa`` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lavis_mafa.algorithm import global_threshold, posterior  # noqa: F401  register their entries
from lavis_mafa.algorithm.itc_forms import ITC_LOSSES
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.options import Checked, option, suggest
from lavis_mafa.algorithm.pickers import PICKERS
from lavis_mafa.algorithm.registry import MAFA, Entry
from lavis_mafa.algorithm.rules import MiningRule
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
class StepSettings(Checked):
    """Settings of `lavis_mafa.algorithm.step.run_step`.

    Attributes:
        all_ranks: candidates come from the mini-batches of all ranks, as in BLIP-2, instead of only
            the rank's own; ``model.negative_all_rank`` of a config.
        own: settings of registered pickers, soft labels, losses, scores and rules, by the entry's
            name; entries that are not listed have their defaults.
    """

    negatives: str = option(
        "hardest",
        "hard negatives: the hardest in the mini-batch, sampled by similarity (ALBEF; BLIP: "
        "sampled_blip), drawn with equal probabilities (lavis_mafa), or sampled by the posterior "
        "that they are false (FNE)",
        source="MAFA 4.1, ALBEF 3.2, LAVIS, FNE",
        choices=PICKERS,
    )
    warm_up_epochs: int = option(0, "number of first epochs that use warm_up_negatives", low=0)
    warm_up_negatives: str | None = option(
        None, "negatives of the first warm_up_epochs epochs, such as uniform", choices=PICKERS
    )
    negatives_by: str = option(
        SIMILARITY,
        "score by which hard negatives are picked: similarity of images and texts, or within each",
        choices=SCORES,
    )
    detach_other: bool | None = option(
        None,
        "image to text trains images only, text to image texts only; null: as MAFA in its own "
        "models, and as the library in other libraries' trainers",
        source="MAFA 4.2",
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
        super().__post_init__()
        if (self.warm_up_negatives is None) != (self.warm_up_epochs == 0):
            raise ValueError(
                "warm_up_negatives and warm_up_epochs go together, got "
                f"{self.warm_up_negatives} for {self.warm_up_epochs} epochs"
            )
        object.__setattr__(self, "own", {name: _own(name, one) for name, one in self.own.items()})

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any], all_ranks: bool = False) -> StepSettings:
        """Build from ``model.mafa`` and ``model.negative_all_rank``; missing keys keep defaults.

        Raises:
            ValueError: if a key is unknown or a value is out of its range. Names of losses are
                checked by `lavis_mafa.algorithm.parts.build_parts`.
        """
        for name in cfg:
            if name not in MAFA.keys:
                _own_entry(name)
        nested = {"soft_labels": SoftLabels, "connections": MiningRule}
        known = [one.name for one in fields(cls) if one.name not in ("own", "all_ranks")]
        given = {name: cfg[name] for name in known if name in cfg}
        given |= {name: _made(name, kind, cfg.get(name) or {}) for name, kind in nested.items()}
        given["loss_weights"] = {**asdict(LossWeights()), **(cfg.get("loss_weights") or {})}
        own = {
            name: _made(name, entry.settings, cfg.get(name) or {})
            for name, entry in entries_with_settings().items()
        }
        return cls(**given, all_ranks=all_ranks, own=own)

    def own_of(self, entry: Entry[Any]) -> Any:
        """Return the settings of a registered entry; None if it has its defaults or no settings."""
        given = self.own.get(entry.name)
        known = entry.settings is not None and isinstance(given, entry.settings)
        return given if known else None

    def make(self, entry: Entry[Any]) -> Any:
        """Return a registered function or object with its own settings, see `Entry.make`."""
        return entry.make(self.own_of(entry))


def entries_with_settings() -> dict[str, Any]:
    """Return the registered entries that have settings of their own, by name."""
    return {
        name: entry
        for registry in MAFA.registries
        for name, entry in registry.entries().items()
        if entry.settings is not None
    }


def _own_entry(name: str) -> Any:
    """Return the registered entry to which the settings of this name belong.

    Raises:
        ValueError: if there is no such entry.
    """
    found = entries_with_settings()
    if name not in found:
        raise ValueError(f"unknown setting {name!r}; {suggest(name, {*found, *MAFA.keys})}")
    return found[name]


def _made(name: str, kind: Any, given: Mapping[str, Any]) -> Any:
    """Return settings from a mapping of their fields.

    Raises:
        ValueError: for an unknown field, or a value out of its range.
    """
    known = [one.name for one in fields(kind)]
    for key in given.keys() - set(known):
        raise ValueError(f"unknown setting {name}.{key}; {suggest(key, known)}")
    return kind(**given)


def _own(name: str, given: Any) -> Any:
    """Return the settings of an entry, from an object or from a mapping of its fields."""
    kind = _own_entry(name).settings
    found = _made(name, kind, given) if isinstance(given, Mapping) else given
    if not isinstance(found, kind):
        raise ValueError(f"own: {name}: got {given!r}, expected {kind.__name__} or a dictionary")
    return found


MAFA.reserve(one.name for one in fields(StepSettings))
MAFA.reserve(("con_d", "negatives_encoder", "learn_temperature"))  # for models
