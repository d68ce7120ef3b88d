"""Data set builders registered with LAVIS, and how training reads any data set."""

from importlib.util import find_spec

if find_spec("lavis") is not None:  # the readers of files work without it
    # Patches LAVIS's processors.
    from lavis_mafa.data import augmentation, texts  # noqa: F401
    from lavis_mafa.data.image_text_json import ImageTextJsonBuilder
    from lavis_mafa.data.image_text_shards import ImageTextShardsBuilder
    from lavis_mafa.data.training_set import TrainingSet

    __all__ = ["ImageTextJsonBuilder", "ImageTextShardsBuilder", "TrainingSet"]
