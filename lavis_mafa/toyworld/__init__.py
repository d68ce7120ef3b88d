"""A rendered world of shapes and captions whose ground truth is known for every pair.

Only the data sets of LAVIS, `ToyScenesBuilder` and `ToyScenesEval`, need LAVIS.
"""

# ruff: noqa: F401  (imports for type checkers)

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lavis_mafa.toyworld.render import render
from lavis_mafa.toyworld.world import (
    BACKGROUNDS,
    COLOURS,
    PRESETS,
    SHAPES,
    SIZES,
    SYNONYMS,
    WorldConfig,
    backgrounds,
    cell_attributes,
    make_captions,
    make_scenes,
    valid,
    valid_matrix,
    vocabulary,
)

if TYPE_CHECKING:
    from lavis_mafa.toyworld.builder import ToyScenesBuilder, ToyScenesEval

__all__ = [
    "BACKGROUNDS",
    "COLOURS",
    "PRESETS",
    "SHAPES",
    "SIZES",
    "SYNONYMS",
    "ToyScenesBuilder",
    "ToyScenesEval",
    "WorldConfig",
    "backgrounds",
    "cell_attributes",
    "make_captions",
    "make_scenes",
    "render",
    "valid",
    "valid_matrix",
    "vocabulary",
]


def __getattr__(name: str) -> Any:
    if name in ("ToyScenesBuilder", "ToyScenesEval"):
        return getattr(importlib.import_module(f"{__name__}.builder"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
