"""Read any map-style LAVIS training set by index, and replace unreadable samples.

A sample is unreadable if `image_reading` refuses its image, or `caption_reading` its caption
(processed, but without the text processor's prompt). All other samples are trained on; captions
that the text processor or the tokenizer cuts, and those with only unknown words, are counted where
they are tokenised.
"""

from __future__ import annotations

import io
import os
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lavis.datasets.datasets.base_dataset import BaseDataset
from PIL import Image, ImageFile
from torch.utils.data import ConcatDataset as TorchConcatDataset
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from lavis_mafa.algorithm.context import NO_GROUP
from lavis_mafa.algorithm.tokens import TOKENS, Tokenizer, Tokens
from lavis_mafa.data.augmentation import ImageBytes, QuickAugmentation, quick
from lavis_mafa.data.caption_reading import require_readable, was_cut
from lavis_mafa.data.feature_folder import processed
from lavis_mafa.data.image_reading import read_file, read_rgb, require_below
from lavis_mafa.data.lavis_rows import read_here, read_sample
from lavis_mafa.data.pairs import PairSource, TrainPairs
from lavis_mafa.data.picture_identity import PictureFolder, warn_of_copies
from lavis_mafa.io.processes import is_main_process
from lavis_mafa.io.random_streams import unchanged_random_streams

UNREADABLE = (
    OSError,
    SyntaxError,  # raised by PIL for a broken PNG
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
Processor = Callable[[Any], Any]
ATTEMPTS = 20
_NUMBERS = ("index", "loaded_index", "image_id", "group_id")
_OWN_KEYS = (*_NUMBERS, "load_error", "was_cut")


class TrainingSet(Dataset[dict[str, Any]]):
    """Add to every sample the keys that GRIT and the step need.

    ``self[index, epoch]`` is the sample of the wrapped set plus ``index``, ``loaded_index`` (of the
    sample that was read: another one if ``index`` is unreadable), ``image_id`` (equal for samples
    of one image), ``group_id`` (only if the data have groups: equal for samples of one group, -1
    for a sample in none) and ``load_error`` (a message, empty without an error). Augmentation draws
    from generators seeded by (seed, epoch, index), so that it depends neither on the number of
    workers nor on where a run was resumed.

    Args:
        dataset: a map-style data set whose items have ``image`` and ``text_input``, such as LAVIS's
            concatenation of several.
        seed: of augmentation and replacement.
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        if isinstance(dataset, (tuple, list)) or isinstance(dataset, IterableDataset):
            raise TypeError(
                "training needs map-style data sets; webdataset pipelines (laion2B_multi) have no "
                "index. Use image_text_shards, image_text_json or one of LAVIS's map-style "
                "builders."
            )
        self.dataset = dataset
        self.seed = seed
        parts: list[Any] = (
            dataset.datasets if isinstance(dataset, TorchConcatDataset) else [dataset]
        )
        self.image_ids = _image_ids_of(parts)
        self.group_ids = _group_ids_of(parts)
        self._deterministic = all(getattr(part, "deterministic", False) for part in parts)
        only = parts[0] if len(parts) == 1 else None
        self.truth = getattr(only, "truth", None)
        self.parts = parts
        for part in parts:
            if hasattr(part, "vis_processor"):
                part.vis_processor = quick(part.vis_processor)
        self._ends = np.cumsum([len(part) for part in parts])
        self._tokenizers: dict[str, Tokenizer] = {}
        self._sent_as_bytes: dict[str, QuickAugmentation] = {}  # by the images' names

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        index, epoch = key
        loaded, error = index, ""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                sample = self._read(loaded, epoch)
                break
            except UNREADABLE as problem:
                error = error or _message(problem)
                draw = np.random.SeedSequence([self.seed, index, attempt]).generate_state(1)[0]
                loaded = int(draw) % len(self)
        else:
            raise OSError(
                f"sample {index} and {ATTEMPTS - 1} in its place cannot be read; first: {error}"
            )
        own = {"index": index, "loaded_index": loaded, "image_id": int(self.image_ids[loaded])}
        if self.group_ids is not None:
            own["group_id"] = int(self.group_ids[loaded])
        return {**sample, **own, "load_error": error}

    def _read(self, index: int, epoch: int) -> dict[str, Any]:
        part, local = self._part_of(index)
        if self._deterministic:
            sample = part[local]
        else:
            # For data sets that read images themselves; see `image_reading`.
            ImageFile.LOAD_TRUNCATED_IMAGES = False
            with _seeded([self.seed, epoch, index]):
                sample = read_sample(part, local)
        if sample is None:
            raise OSError(f"sample {index} is empty")
        if isinstance(sample.get("text_input"), str):
            processor = getattr(part, "text_processor", None)
            require_readable(sample["text_input"].removeprefix(getattr(processor, "prompt", "")))
            if was_cut(processor, lambda: self.source(index).caption, sample["text_input"]):
                sample = {**sample, "was_cut": True}
        if isinstance(sample.get("image"), dict):  # of `_Views`
            return {**sample, **sample["image"]}
        return sample

    def add_view(self, name: str, processor: Processor | None = None) -> bool:
        """Add another image ``name`` to every sample: its decoded picture after ``processor``.

        Args:
            processor: None: that of ``image``, with new random draws.

        Returns:
            False, with nothing added, if a part of the data creates images without a processor.
        """
        if any(getattr(part, "vis_processor", None) is None for part in self.parts):
            return False
        for part in self.parts:
            own = part.vis_processor
            views = own if isinstance(own, _Views) else _Views(own)
            others = {**views.others, name: processor or views.processor}
            part.vis_processor = _Views(views.processor, others)
        return True

    def send_bytes(self) -> None:
        """Let mini-batches have `ImageBytes` where normalising can wait until they are on a device.

        These are the images of data sets that leave them as a `QuickAugmentation` has made them.
        Call it after `add_view`.
        """
        if not all(_leaves_images(one) for one in self.parts):
            return
        made = [_processors_of(part.vis_processor) for part in self.parts]
        for name, first in made[0].items():
            alike = [own[name] for own in made]
            if all(isinstance(one, QuickAugmentation) and one.scales_as(first) for one in alike):
                for one in alike:
                    one.as_bytes = True
                self._sent_as_bytes[name] = first

    def add_tokens(self, name: str, tokenizer: Tokenizer) -> None:
        """Add the `Tokens` of the captions to every mini-batch as ``name``, computed by the data
        loader's workers."""
        # Workers are forked after the main process has used the tokenizer, and would warn of it.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._tokenizers[name] = tokenizer

    def show(self, index: int) -> tuple[Image.Image, str]:
        """Return the unprocessed picture and caption of a sample, for people to look at.

        Raises:
            OSError: if the picture cannot be read, or lies outside of the data's image folder: an
                annotation file must not bring any picture of the machine into a page.
        """
        dataset, local = self._part_of(index)
        if (root := getattr(dataset, "vis_root", None)) is not None:
            require_below(self.source(index).path, root)
        if hasattr(dataset, "show"):
            return dataset.show(local)
        source = self.source(index)
        assert source.path is not None
        return read_rgb(source.path), source.caption

    def source(self, index: int) -> PairSource:
        """Return what a sample was made from.

        A data set provides it by ``source(i)``, or by LAVIS's ``annotation``; of any other only the
        processed caption is known.
        """
        dataset, local = self._part_of(index)
        if hasattr(dataset, "source"):
            return PairSource(*dataset.source(local))
        row = dataset.annotation[local] if getattr(dataset, "annotation", None) else {}
        if "image" not in row or "caption" not in row:
            return PairSource(None, str(dataset[local]["text_input"]))
        path = os.path.join(dataset.vis_root, row["image"])
        return PairSource(path, row["caption"], row["image"], row.get("image_id"))

    def image_bytes(self, index: int) -> bytes:
        """Return a sample's image file; a PNG if it has no file."""
        dataset, local = self._part_of(index)
        if hasattr(dataset, "image_bytes"):
            return dataset.image_bytes(local)
        path = self.source(index).path
        if path is not None:
            return read_file(path, getattr(dataset, "vis_root", "/"))
        buffer = io.BytesIO()
        self.show(index)[0].save(buffer, "png")
        return buffer.getvalue()

    def _part_of(self, index: int) -> tuple[Any, int]:
        """Return the part of the data that contains a sample, and the sample's index in it."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[which], index - int(self._ends[which]) + len(self.parts[which])

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate as the wrapped set does, and add our own keys as int64 tensors and a list, the
        captions' tokens, and `COUNTS` of the tokens that the trained model reads."""
        theirs = [{k: v for k, v in s.items() if k not in _OWN_KEYS} for s in samples]
        collate = getattr(self.dataset, "collater", None) or torch.utils.data.default_collate
        batch = collate(theirs)
        for name, processor in self._sent_as_bytes.items():
            batch[name] = ImageBytes(batch[name], processor.mean, processor.std)
        # A data set's own `group_id`, which may be text, is not that of a sample.
        for key in _NUMBERS if self.group_ids is not None else _NUMBERS[:-1]:
            batch[key] = torch.tensor([s[key] for s in samples], dtype=torch.int64)
        batch["load_error"] = [s["load_error"] for s in samples]
        made: dict[int, Tokens] = {}  # shared by models with the same tokenizer
        for name, tokenizer in self._tokenizers.items():
            if id(tokenizer) not in made:
                made[id(tokenizer)], counts = tokenizer.counted(
                    batch["text_input"], [bool(s.get("was_cut")) for s in samples]
                )
                if name == TOKENS:
                    batch.update(counts)
            batch[name] = made[id(tokenizer)]
        return batch


def _message(problem: Exception) -> str:
    """Return an error's message for log files, with lone surrogates in file names escaped."""
    text = f"{type(problem).__name__}: {problem}"
    return text.encode("utf-8", "backslashreplace").decode()


class _Views:
    """Apply several processors to a picture that is decoded once.

    The original one comes first, so that further views do not change its random draws.
    """

    reads_features = True

    def __init__(self, processor: Processor, others: dict[str, Processor] | None = None) -> None:
        self.processor, self.others = processor, others or {}

    def __call__(self, picture: Any) -> dict[str, Any]:
        image = processed(self.processor, picture)
        others = {name: processed(other, picture) for name, other in self.others.items()}
        return {"image": image, **others}


def _processors_of(processor: Any) -> dict[str, Any]:
    """Return the processors of a data set's images by the images' names."""
    if isinstance(processor, _Views):
        return {"image": processor.processor, **processor.others}
    return {"image": processor}


def _leaves_images(dataset: Any) -> bool:
    """Return whether a data set returns images as its processor has made them, and stacks them."""
    kind = type(dataset)
    if getattr(kind, "collater", None) not in (TrainPairs.collater, BaseDataset.collater):
        return False
    return read_here(dataset) or kind.__getitem__ is TrainPairs.__getitem__


def _image_ids_of(parts: list[Any]) -> npt.NDArray[np.int64]:
    """Return ``(N,)`` int64 over concatenated data sets, equal for samples of one image.

    A part provides them by ``image_ids``, or by the image paths of LAVIS's ``annotation``; in a
    part without either every sample counts as a different image.

    Raises:
        ValueError: if a part's ``image_ids`` are not ``(N,)`` integers from 0 on.
    """
    own: npt.NDArray[np.int64]
    if len(parts) == 1 and hasattr(parts[0], "image_ids"):
        return _integers_of(parts[0], "image_ids", 0)  # not copied, as it may be a memory map
    ids, first_free = [], 0
    paths: dict[str, int] = {}
    for part in parts:
        if hasattr(part, "image_ids"):
            own = _integers_of(part, "image_ids", 0).astype(np.int64) + first_free
        elif any("image" in row for row in getattr(part, "annotation", None) or ()):
            folder = PictureFolder(getattr(part, "vis_root", ""))
            root = os.path.realpath(folder.root or "")
            names = [
                os.path.normpath(os.path.join(root, folder.identity(str(row.get("image")))))
                for row in part.annotation
            ]
            own = np.array(
                [paths.setdefault(n, first_free + i) for i, n in enumerate(names)], np.int64
            )
        else:
            own = np.arange(first_free, first_free + len(part))
        ids.append(own)
        first_free = max(first_free + len(part), int(own.max(initial=0)) + 1)
    if is_main_process():
        warn_of_copies(paths)
    return np.concatenate(ids)


def _integers_of(part: Any, name: str, least: int) -> npt.NDArray[Any]:
    """Return the integers of a data set's samples in an attribute.

    Raises:
        ValueError: if they are not ``(N,)`` integers from ``least`` on.
    """
    own = np.asarray(getattr(part, name))
    wanted = own.shape == (len(part),) and np.issubdtype(own.dtype, np.integer)
    if not wanted or own.min(initial=least) < least:
        raise ValueError(
            f"{name} of {type(part).__name__}: expected {len(part)} integers from {least} on, got "
            f"{own.dtype} of shape {own.shape}"
        )
    return own


def _group_ids_of(parts: list[Any]) -> npt.NDArray[np.int64] | None:
    """Return ``(N,)`` int64 over concatenated data sets, equal for samples of one group.

    A part provides them by ``group_ids``, `NO_GROUP` for samples in none. Groups of different parts
    are different groups, whatever they are called in their files.

    Returns:
        None if no sample is in a group.

    Raises:
        ValueError: if a part's ``group_ids`` are not ``(N,)`` integers from `NO_GROUP` on.
    """
    ids, first_free = [], 0
    for part in parts:
        if getattr(part, "group_ids", None) is None:
            own = np.full(len(part), NO_GROUP, np.int64)
        else:
            own = _integers_of(part, "group_ids", NO_GROUP)
        if first_free:
            own = np.where(own == NO_GROUP, NO_GROUP, own + first_free)
        ids.append(own.astype(np.int64, copy=False))
        first_free = max(first_free, int(own.max(initial=NO_GROUP)) + 1)
    if not first_free:
        return None
    return ids[0] if len(ids) == 1 else np.concatenate(ids)  # one may be a memory map


@contextmanager
def _seeded(entropy: list[int]) -> Iterator[None]:
    """Seed Python's, NumPy's and PyTorch's generators; restore them in the main process."""
    words = np.random.SeedSequence(entropy).generate_state(3)
    with nullcontext() if get_worker_info() else unchanged_random_streams():
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))
        # Not torch.manual_seed, which in the main process would reseed the GPU too.
        torch.default_generator.manual_seed(int(words[2]))
        yield
