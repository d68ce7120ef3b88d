"""The samples of a training set by number, with images as a model sees them in evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from lavis_mafa.data.data_identity import DataIdentity
from lavis_mafa.data.pair_table import PairTable
from lavis_mafa.training.termination import ignore_signals_to_job

if TYPE_CHECKING:  # it needs LAVIS
    from lavis_mafa.data.training_set import TrainingSet

_Processor = Callable[[Any], Any]


class Corpus:
    """Read the samples of a training set by number, with images processed as in evaluation.

    Args:
        pairs: the training set; its image processors are replaced.
        processor: converts an image to the model's input; data sets that create images without a
            processor (``toy_scenes``) ignore it.
        workers: number of loader processes.
    """

    def __init__(self, pairs: TrainingSet, processor: _Processor | None, workers: int = 0) -> None:
        self.pairs = pairs
        # Of each part that reads images with a processor of its own; None: it is not replaced.
        own = (getattr(part, "vis_processor", None) for part in pairs.parts)
        self._processors = [None if one is None else processor or one for one in own]
        self.workers = workers

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def image_ids(self) -> NDArray[Any]:
        """Image id of each sample, ``(N,)`` int64; samples with the same image have the same id."""
        return self.pairs.image_ids

    @property
    def group_ids(self) -> NDArray[Any] | None:
        """Group of each sample, ``(N,)`` int64, -1 for a sample in none; None without groups."""
        return getattr(self.pairs, "group_ids", None)

    def group_id(self, number: int) -> int | None:
        """Return the group of a sample; None if it is in none."""
        groups = self.group_ids
        return None if groups is None or groups[number] < 0 else int(groups[number])

    @property
    def truth(self) -> Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]] | None:
        """Function that says whether images and texts of samples match; None if unknown."""
        return self.pairs.truth

    def caption(self, number: int) -> str:
        """Return the caption of a sample without text processing."""
        return self.pairs.source(number)[1]

    def fingerprint(self) -> str:
        """Return a hash of the data and of how they are processed.

        It covers all image ids, image files and captions, and some processed samples, which depend
        on image size, augmentation and text processor.
        """
        found = hashlib.sha256(json.dumps(asdict(DataIdentity.of(self.pairs))).encode())
        if not all(map(_has_rows, self.pairs.parts)):
            for number in range(len(self)):
                found.update(json.dumps(self.pairs.source(number), default=str).encode())
        some = np.arange(0, len(self), max(1, len(self) // 16))
        for batch in self.batches([some]):
            found.update(np.ascontiguousarray(batch["image"].numpy()).tobytes())
            found.update(json.dumps(list(batch["text_input"])).encode())
        return found.hexdigest()[:16]

    def batches(
        self, batches: Sequence[NDArray[Any]], processor: _Processor | None = None
    ) -> Iterator[dict[str, Any]]:
        """Load mini-batches of the given samples.

        Args:
            batches: sample numbers of each mini-batch.
            processor: image processor to use instead of the model's.

        Yields:
            ``image`` ``(B, 3, H, W)``, ``text_input``, ``index``, ``load_error`` and whatever else
            the data set gives. ``load_error`` is a list of strings: "" for a sample that was read;
            a sample that cannot be read is replaced by another one.
        """
        for part, own in zip(self.pairs.parts, self._processors, strict=True):
            if own is not None:
                part.vis_processor = processor or own
        loader: Any = DataLoader(
            _Numbered(self.pairs),
            batch_sampler=[[int(i) for i in batch] for batch in batches],
            # Starting workers takes longer than reading a single mini-batch.
            num_workers=self.workers if len(batches) > 1 else 0,
            collate_fn=self.pairs.collater,
            worker_init_fn=ignore_signals_to_job,
            generator=torch.Generator(),  # must not draw from the global random stream
        )
        yield from loader


def _has_rows(part: Any) -> bool:
    """Return whether `DataIdentity` covers every row of a part of the data."""
    rows = getattr(part, "annotation", None)
    return isinstance(getattr(part, "table", None), PairTable) or isinstance(rows and rows[0], dict)


class _Numbered(Dataset[dict[str, Any]]):
    """The training set indexed by sample number only, as in epoch 0."""

    def __init__(self, pairs: TrainingSet) -> None:
        self.pairs = pairs

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.pairs[number, 0]
