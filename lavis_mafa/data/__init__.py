"""Data set builders registered with LAVIS, and how training reads any data set."""

from lavis_mafa.datasets.image_text_json import ImageTextJsonBuilder
from lavis_mafa.datasets.image_text_shards import ImageTextShardsBuilder
from lavis_mafa.datasets.training_set import TrainingSet

__all__ = ["ImageTextJsonBuilder", "ImageTextShardsBuilder", "TrainingSet"]
