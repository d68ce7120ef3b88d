"""Image processing: LAVIS's augmentation, corrected and faster."""

from lavis_mafa.processors import augmentation  # noqa: F401  (patches LAVIS's processors)
