"""MAFA, GRIT-VLP and ALBEF-base for LAVIS.

Importing this package is cheap: neither LAVIS nor torch is imported. The models, tasks, runners and
data sets are registered with LAVIS as soon as LAVIS is imported, before or after this package.
The names below are imported on first use. Those of the algorithm (`run_step`, `MiningRule`,
`GritSchedule`, ...) work in any PyTorch program and import no LAVIS.
"""

# ruff: noqa: F401  (imports for type checkers)

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lavis_mafa._version import __version__
from lavis_mafa.algorithm import EXPORTS
from lavis_mafa.compat import registration
from lavis_mafa.compat.registration import register
from lavis_mafa.compat.versions import check_versions

if TYPE_CHECKING:  # for type checkers; at run time `__getattr__` below imports them
    from lavis_mafa import data, families, tasks, toyworld, training
    from lavis_mafa.algorithm.backbone import Backbone, Images, Texts
    from lavis_mafa.algorithm.context import MiniBatch, known_positives
    from lavis_mafa.algorithm.corpus_mining import MinedCorpus, mine_corpus
    from lavis_mafa.algorithm.discriminator import Discriminator, NegativesEncoder
    from lavis_mafa.algorithm.features_step import FeaturesLoss
    from lavis_mafa.algorithm.grit import (
        HARDNESS,
        EpochBatches,
        EpochPlan,
        GritCollector,
        GritSchedule,
        GritSettings,
        group,
    )
    from lavis_mafa.algorithm.itc_forms import ITC_LOSSES
    from lavis_mafa.algorithm.labels import (
        SOFT_LABELS,
        SoftLabels,
        distilled_labels,
        labels_from_positives,
        mix,
        smooth,
    )
    from lavis_mafa.algorithm.losses import (
        LOSSES,
        consistency_loss,
        contrastive_loss,
        matching_losses,
    )
    from lavis_mafa.algorithm.losses.language import mask_tokens
    from lavis_mafa.algorithm.mining import Connections, find_connections
    from lavis_mafa.algorithm.momentum import Momentum
    from lavis_mafa.algorithm.options import option
    from lavis_mafa.algorithm.output import StepOutput
    from lavis_mafa.algorithm.pair_memory import MovingCopies, PairMemory
    from lavis_mafa.algorithm.parts import StepParts, build_parts
    from lavis_mafa.algorithm.pickers import NONE, PICKERS, hardest, sampled
    from lavis_mafa.algorithm.posterior import PosteriorPicker, PosteriorRule
    from lavis_mafa.algorithm.ranks import Ranks
    from lavis_mafa.algorithm.registry import Registry
    from lavis_mafa.algorithm.rules import RULES, MiningRule, ScoredPairs
    from lavis_mafa.algorithm.scores import SCORES, PairView
    from lavis_mafa.algorithm.settings import LossWeights, StepSettings
    from lavis_mafa.algorithm.step import run_step
    from lavis_mafa.algorithm.step_context import StepContext
    from lavis_mafa.algorithm.tokens import Tokens
    from lavis_mafa.checkpoints.loading import load_model

# Where each name is defined that is imported on first use.
_MODULE_OF = {"load_model": "lavis_mafa.checkpoints.loading", **EXPORTS}
_NEED_LAVIS = ["data", "load_model", "families", "training", "tasks", "toyworld"]

# `from lavis_mafa import *` imports all of these, so without LAVIS they are fewer.
__all__ = ["__version__", "register", *EXPORTS]
__all__ += _NEED_LAVIS if find_spec("lavis") is not None else []


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value  # the next access does not come here
        return value
    if name in _NEED_LAVIS:
        check_versions()
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


registration.register_with_lavis()
