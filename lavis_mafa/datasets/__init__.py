"""Data set builders registered with LAVIS, and how training reads any data set."""

from lavis_mafa.datasets.image_text_json import ImageTextJsonBuilder
from lavis_mafa.datasets.toy_scenes import ToyScenesBuilder
from lavis_mafa.datasets.training_set import TrainingSet

__all__ = ["ImageTextJsonBuilder", "ToyScenesBuilder", "TrainingSet"]
