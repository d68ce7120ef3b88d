"""`toy_scenes`: a rendered world of shapes and captions whose truth is completely known."""

from lavis_mafa.datasets.toy_scenes.builder import (
    ToyScenesBuilder,
    ToyScenesEval,
    ToyScenesTrain,
    make_world,
)
from lavis_mafa.datasets.toy_scenes.render import render
from lavis_mafa.datasets.toy_scenes.world import (
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
    "ToyScenesTrain",
    "WorldConfig",
    "backgrounds",
    "cell_attributes",
    "make_captions",
    "make_scenes",
    "make_world",
    "render",
    "valid",
    "valid_matrix",
    "vocabulary",
]
