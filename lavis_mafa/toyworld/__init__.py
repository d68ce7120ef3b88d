"""A rendered world of shapes and captions whose ground truth is known for every pair."""

from lavis_mafa.toyworld.builder import ToyScenesBuilder, ToyScenesEval
from lavis_mafa.toyworld.downstream import ToyCaptionBuilder, ToyVqaBuilder
from lavis_mafa.toyworld.entailment import ToyEntailmentBuilder
from lavis_mafa.toyworld.grounding import ToyGroundingBuilder
from lavis_mafa.toyworld.nlvr import ToyNlvrBuilder
from lavis_mafa.toyworld.questions import QUESTION_TYPES, make_questions, possible_answers
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
    "QUESTION_TYPES",
    "SHAPES",
    "SIZES",
    "SYNONYMS",
    "ToyCaptionBuilder",
    "ToyEntailmentBuilder",
    "ToyGroundingBuilder",
    "ToyNlvrBuilder",
    "ToyScenesBuilder",
    "ToyScenesEval",
    "ToyVqaBuilder",
    "WorldConfig",
    "backgrounds",
    "cell_attributes",
    "make_captions",
    "make_questions",
    "make_scenes",
    "possible_answers",
    "render",
    "valid",
    "valid_matrix",
    "vocabulary",
]
