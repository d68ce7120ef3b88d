"""Processing of images and texts: LAVIS's augmentation, corrected and faster; the authors'."""

from lavis_mafa.processors import augmentation, texts  # noqa: F401  (patches LAVIS's processors)
