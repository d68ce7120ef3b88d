"""Data set builders registered with LAVIS, and how training reads any data set."""

from lavis_mafa.datasets import augmentation  # noqa: F401  (mends LAVIS's)
from lavis_mafa.datasets.grounding import RefCocoPlusBuilder
from lavis_mafa.datasets.image_text_json import ImageTextJsonBuilder
from lavis_mafa.datasets.image_text_shards import ImageTextShardsBuilder
from lavis_mafa.datasets.nlvr import NlvrMafaBuilder
from lavis_mafa.datasets.toy_scenes import ToyScenesBuilder
from lavis_mafa.datasets.toy_scenes.entailment import ToyEntailmentBuilder
from lavis_mafa.datasets.toy_scenes.grounding import ToyGroundingBuilder
from lavis_mafa.datasets.toy_scenes.nlvr import ToyNlvrBuilder
from lavis_mafa.datasets.training_set import TrainingSet

__all__ = [
    "ImageTextJsonBuilder",
    "ImageTextShardsBuilder",
    "RefCocoPlusBuilder",
    "NlvrMafaBuilder",
    "ToyNlvrBuilder",
    "ToyEntailmentBuilder",
    "ToyScenesBuilder",
    "ToyGroundingBuilder",
    "TrainingSet",
]
