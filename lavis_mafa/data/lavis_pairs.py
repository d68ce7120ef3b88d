"""Read samples of LAVIS's image-caption data sets with our image reader."""

from __future__ import annotations

import os
from typing import Any

from lavis.datasets.datasets.caption_datasets import CaptionDataset
from lavis.datasets.datasets.image_text_pair_datasets import ImageTextPairDataset
from lavis.datasets.datasets.retrieval_datasets import RetrievalDataset

from lavis_mafa.data.image_reading import read_rgb

# coco_caption; vg_caption, sbu_caption, conceptual_caption_*; coco_retrieval, flickr30k.
_REPLACED = (
    CaptionDataset.__getitem__,
    ImageTextPairDataset.__getitem__,
    RetrievalDataset.__getitem__,
)


def read_here(dataset: Any) -> bool:
    """Return whether `read_sample` reads a data set's images itself."""
    return type(dataset).__getitem__ in _REPLACED


def read_sample(dataset: Any, index: int) -> dict[str, Any]:
    """Return ``dataset[index]``; in LAVIS's image-caption sets the image is read by `read_rgb`.

    LAVIS reads by ``Image.open(path).convert("RGB")``, which waits forever for a pipe, clips 16-bit
    grey to white, shows transparent parts in arbitrary colours, ignores the EXIF orientation and
    decodes decompression bombs of up to 178,956,970 pixels.

    Raises:
        ValueError: if the row of such a set cannot be used.
        OSError: see `read_rgb`.
        Others: those of ``dataset[index]`` for any other data set.
    """
    if not read_here(dataset):
        return dataset[index]
    row = dataset.annotation[index]
    for key in ("image", "caption"):
        if not isinstance(row.get(key), str):
            raise ValueError(f"row {index}: expected text as {key!r}, got {row.get(key)!r:.60}")
    sample = {
        "image": dataset.vis_processor(read_rgb(os.path.join(dataset.vis_root, row["image"]))),
        "text_input": dataset.text_processor(row["caption"]),
    }
    if hasattr(dataset, "img_ids"):
        sample["image_id"] = dataset.img_ids[row["image_id"]]
    if type(dataset).__getitem__ is RetrievalDataset.__getitem__:
        sample["instance_id"] = row["instance_id"]
    return sample
