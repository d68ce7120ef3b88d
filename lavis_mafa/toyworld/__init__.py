"""A rendered world of shapes and captions whose ground truth is known for every pair."""

from lavis_mafa.toyworld.builder import ToyScenesBuilder, ToyScenesEval, ToyScenesTrain, make_world
from lavis_mafa.toyworld.downstream import ToyCaptionBuilder, ToyCaptionEval, ToyVqa, ToyVqaBuilder
from lavis_mafa.toyworld.entailment import ToyEntailmentBuilder
from lavis_mafa.toyworld.grounding import ToyGroundingBuilder
from lavis_mafa.toyworld.nlvr import ToyNlvrBuilder
from lavis_mafa.toyworld.questions import QUESTION_TYPES, Question, make_questions, possible_answers
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
    "Question",
    "SHAPES",
    "SIZES",
    "SYNONYMS",
    "ToyCaptionBuilder",
    "ToyCaptionEval",
    "ToyEntailmentBuilder",
    "ToyGroundingBuilder",
    "ToyNlvrBuilder",
    "ToyScenesBuilder",
    "ToyScenesEval",
    "ToyScenesTrain",
    "ToyVqa",
    "ToyVqaBuilder",
    "WorldConfig",
    "backgrounds",
    "cell_attributes",
    "make_captions",
    "make_questions",
    "make_scenes",
    "make_world",
    "possible_answers",
    "render",
    "valid",
    "valid_matrix",
    "vocabulary",
]
