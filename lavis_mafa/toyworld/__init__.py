"""A rendered world of shapes and captions whose ground truth is known for every pair."""

from lavis_mafa.toyworld.builder import ToyScenesBuilder, ToyScenesEval
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
