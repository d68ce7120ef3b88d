"""View a retrieval evaluation set as pairs: every caption with its image."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset
from torch.utils.data.dataloader import default_collate

from lavis_mafa.data.image_reading import read_rgb


class SplitAsPairs(Dataset[dict[str, Any]]):
    """The pairs of an evaluation set, one sample per caption, as in a training set.

    Items are ``image``, ``text_input`` and ``image_id``.

    Args:
        dataset: has ``text``, ``image`` and ``txt2img`` like LAVIS's ``RetrievalEvalDataset``.

    Attributes:
        image_ids: ``(N,)`` int64, index of every caption's image.
        truth: returns which images and captions match, if the set has ``truth_matrix()``.

    Raises:
        ValueError: if ``dataset`` is no retrieval set.
    """

    deterministic = False
    collater = staticmethod(default_collate)

    def __init__(self, dataset: Any) -> None:
        if not all(hasattr(dataset, name) for name in ("text", "image", "txt2img")):
            raise ValueError(
                f"{type(dataset).__name__} is no retrieval set (text, image, txt2img): use a "
                "retrieval split, or the training split"
            )
        self.dataset = dataset
        self.image_ids = np.array([dataset.txt2img[k] for k in range(len(dataset.text))], np.int64)
        if hasattr(dataset, "truth_matrix"):
            valid = dataset.truth_matrix()
            self.truth = lambda images, texts: valid[self.image_ids[images], texts]

    @property
    def vis_processor(self) -> Any:
        return self.dataset.vis_processor

    @vis_processor.setter
    def vis_processor(self, processor: Any) -> None:
        self.dataset.vis_processor = processor

    @property
    def vis_root(self) -> Any:
        return getattr(self.dataset, "vis_root", None)

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, number: int) -> dict[str, Any]:
        image = int(self.image_ids[number])
        return {
            "image": self.dataset[image]["image"],
            "text_input": self.dataset.text[number],
            "image_id": image,
        }

    def caption(self, number: int) -> str:
        """Return a caption, processed."""
        return str(self.dataset.text[number])

    def path(self, number: int) -> str | None:
        """Return the file of a sample's image; None if the set has no files."""
        index = int(self.image_ids[number])
        if hasattr(self.dataset, "path"):
            path: str | None = self.dataset.path(index)
            return path
        image = self.dataset.image[index]
        return None if self.vis_root is None else os.path.join(self.vis_root, image)

    def annotated(self, number: int) -> tuple[str | None, str]:
        """Return the name of a sample's image (None: it has no file) and its caption, as in the
        annotation file if the set has ``annotated``, else with the processed caption."""
        if hasattr(self.dataset, "annotated"):
            given: tuple[str, str] = self.dataset.annotated(number)
            return given
        name = self.dataset.image[int(self.image_ids[number])]
        return (None if self.vis_root is None else name), self.caption(number)

    def show(self, number: int) -> tuple[Image.Image, str]:
        """Return the unprocessed image (RGB) and the caption."""
        path = self.path(number)
        if path is None:
            return self.dataset.show_image(int(self.image_ids[number])), self.caption(number)
        return read_rgb(path), self.caption(number)
