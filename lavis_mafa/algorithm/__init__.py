"""The method on tensors: imports torch and NumPy only, so that any trainer can use it.

All names of `EXPORTS` can be imported from here; their modules are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "features_step": ("FeaturesLoss",),
    "step": ("run_step",),
    "parts": ("StepParts", "build_parts"),
    "settings": ("LossWeights", "StepSettings"),
    "output": ("StepOutput",),
    "backbone": ("Backbone", "Images", "Texts"),
    "tokens": ("Tokens",),
    "discriminator": ("Discriminator", "NegativesEncoder"),
    "context": ("MiniBatch", "known_positives"),
    "step_context": ("StepContext",),
    "mining": ("Connections", "find_connections"),
    "corpus_mining": ("MinedCorpus", "mine_corpus"),
    "scores": ("SCORES", "PairView"),
    "rules": ("RULES", "MiningRule", "ScoredPairs"),
    "pickers": ("NONE", "PICKERS", "hardest", "sampled"),
    "posterior": ("PosteriorPicker", "PosteriorRule"),
    "labels": (
        "SOFT_LABELS",
        "SoftLabels",
        "distilled_labels",
        "labels_from_positives",
        "mix",
        "smooth",
    ),
    "itc_forms": ("ITC_LOSSES",),
    "losses": ("LOSSES", "consistency_loss", "contrastive_loss", "matching_losses"),
    "losses.language": ("mask_tokens",),
    "grit": (
        "HARDNESS",
        "EpochBatches",
        "EpochPlan",
        "GritCollector",
        "GritSchedule",
        "GritSettings",
        "group",
    ),
    "momentum": ("Momentum",),
    "pair_memory": ("MovingCopies", "PairMemory"),
    "ranks": ("Ranks",),
    "options": ("option",),
    "registry": ("Registry",),
}
# Short name: its module.
EXPORTS = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(EXPORTS[name]), name)
