"""Data set builders registered with LAVIS, and how training reads any data set."""

from lavis_mafa.datasets.grounding import RefCocoPlusBuilder
from lavis_mafa.datasets.image_text_json import ImageTextJsonBuilder
from lavis_mafa.datasets.image_text_shards import ImageTextShardsBuilder
from lavis_mafa.datasets.nlvr import NlvrMafaBuilder
from lavis_mafa.datasets.training_set import TrainingSet
from lavis_mafa.datasets.vg_vqa import VgVqaMafaBuilder

__all__ = [
    "ImageTextJsonBuilder",
    "ImageTextShardsBuilder",
    "RefCocoPlusBuilder",
    "NlvrMafaBuilder",
    "TrainingSet",
    "VgVqaMafaBuilder",
]
