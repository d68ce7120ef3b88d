"""Any map-style LAVIS training set, read by index, with unreadable samples replaced.

Unreadable is a sample whose image `image_reading` refuses, or whose caption, as the text processor
leaves it and without the processor's prompt, `caption_reading` refuses. Everything else is trained
on; captions that are cut or have only unknown words are counted where they are tokenised.
"""

from __future__ import annotations

import os
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile
from torch.utils.data import ConcatDataset as TorchConcatDataset
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from lavis_mafa.algorithm.tokens import TOKENS, Tokenizer, Tokens
from lavis_mafa.datasets.caption_reading import require_readable
from lavis_mafa.datasets.image_reading import as_png, read_rgb
from lavis_mafa.datasets.lavis_pairs import read_sample
from lavis_mafa.processors.augmentation import quick

UNREADABLE = (
    OSError,
    SyntaxError,  # PIL's answer to a broken PNG
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
Processor = Callable[[Any], Any]
ATTEMPTS = 20
OWN_KEYS = ("index", "loaded_index", "image_id", "load_error")


class TrainingSet(Dataset):
    """Adds to every sample what GRIT and the step need to know of it.

    ``self[index, epoch]`` gives the sample of the wrapped set plus ``index`` (as asked),
    ``loaded_index`` (what was read; another one if ``index`` is unreadable), ``image_id`` (equal
    for samples of one image) and ``load_error`` (a message, empty if all is well). Augmentation
    draws from generators seeded by (seed, epoch, index), so that neither the number of workers nor
    a resumed run changes it.

    Args:
        dataset: a map-style data set giving dictionaries with ``image`` and ``text_input``, such as
            LAVIS's concatenation of several.
        seed: of augmentation and replacement.
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        if isinstance(dataset, (tuple, list)) or isinstance(dataset, IterableDataset):
            raise TypeError(
                "training by index needs map-style data sets; webdataset pipelines (laion2B_multi) "
                "have no index. Use image_text_shards, image_text_json or one of LAVIS's map-style "
                "builders."
            )
        self.dataset = dataset
        self.seed = seed
        parts: list[Any] = (
            dataset.datasets if isinstance(dataset, TorchConcatDataset) else [dataset]
        )
        self.image_ids = image_ids_of(parts)
        self._deterministic = all(getattr(part, "deterministic", False) for part in parts)
        only = parts[0] if len(parts) == 1 else None
        self.truth = getattr(only, "truth", None)
        self.parts = parts
        for part in parts:
            if hasattr(part, "vis_processor"):
                part.vis_processor = quick(part.vis_processor)
        self._ends = np.cumsum([len(part) for part in parts])
        self._tokenizers: dict[str, Tokenizer] = {}

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
                error = error or _told(problem)
                draw = np.random.SeedSequence([self.seed, index, attempt]).generate_state(1)[0]
                loaded = int(draw) % len(self)
        else:
            raise OSError(
                f"sample {index} and {ATTEMPTS - 1} in its place cannot be read; first: {error}"
            )
        return {
            **sample,
            "index": index,
            "loaded_index": loaded,
            "image_id": int(self.image_ids[loaded]),
            "load_error": error,
        }

    def _read(self, index: int, epoch: int) -> dict[str, Any]:
        part, local = self._part_of(index)
        if self._deterministic:
            sample = part[local]
        else:
            # LAVIS has PIL fill up half images with grey; here they count as unreadable.
            ImageFile.LOAD_TRUNCATED_IMAGES = False
            with _seeded([self.seed, epoch, index]):
                sample = read_sample(part, local)
        if sample is None:
            raise OSError(f"sample {index} is empty")
        if isinstance(sample.get("text_input"), str):
            prompt = getattr(getattr(part, "text_processor", None), "prompt", "")
            require_readable(sample["text_input"].removeprefix(prompt))
        if isinstance(sample.get("image"), dict):  # of `_Views`
            return {**sample, **sample["image"]}
        return sample

    def add_view(self, name: str, processor: Processor | None = None) -> bool:
        """Give every sample a further image, ``name``: its decoded picture through ``processor``.

        Args:
            processor: None: the one that makes ``image``, which draws anew for this view.

        Returns:
            False, and nothing is added, if a part of the data makes its images without a processor.
        """
        if any(getattr(part, "vis_processor", None) is None for part in self.parts):
            return False
        for part in self.parts:
            own = part.vis_processor
            views = own if isinstance(own, _Views) else _Views(own)
            part.vis_processor = views.with_one_more(name, processor or views.processor)
        return True

    def add_tokens(self, name: str, tokenizer: Tokenizer) -> None:
        """Give every mini-batch the `Tokens` of its captions, ``name``, as `collater` makes them:
        in the data loader's workers."""
        # Workers are forked after the main process has used the tokenizer, and would say so.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._tokenizers[name] = tokenizer

    def show(self, index: int) -> tuple[Image.Image, str]:
        """Picture and caption of a sample as they are in the data, for people to look at."""
        dataset, local = self._part_of(index)
        if hasattr(dataset, "show"):
            return dataset.show(local)
        path, caption = self.source(index)
        assert path is not None
        return read_rgb(path), caption

    def source(self, index: int) -> tuple[str | None, str]:
        """The file of a sample's image, None if it is in no file of its own, and its caption as it
        is in the data.

        A part of the data tells them by ``path(i)`` and ``caption(i)``, or by LAVIS's
        ``annotation``.
        """
        dataset, local = self._part_of(index)
        if hasattr(dataset, "caption"):
            path = dataset.path(local) if hasattr(dataset, "path") else None
            return path, dataset.caption(local)
        annotation = dataset.annotation[local]
        return os.path.join(dataset.vis_root, annotation["image"]), str(annotation["caption"])

    def image_bytes(self, index: int) -> tuple[bytes, str]:
        """A sample's image file and its kind, such as ``jpg``: as it is, or as PNG if the data hold
        no file."""
        dataset, local = self._part_of(index)
        if hasattr(dataset, "image_bytes"):
            return dataset.image_bytes(local)
        path, _ = self.source(index)
        if path is not None:
            return Path(path).read_bytes(), os.path.splitext(path)[1].lower().lstrip(".") or "jpg"
        return as_png(self.show(index)[0])

    def _part_of(self, index: int) -> tuple[Any, int]:
        """The part of the data that has a sample, and the sample's number in it."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[which], index - int(self._ends[which]) + len(self.parts[which])

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate as the wrapped set does; our own keys become int64 tensors and a list, captions
        also tokens, and of those that the model in training reads the mini-batch has `COUNTS`."""
        theirs = [{k: v for k, v in s.items() if k not in OWN_KEYS} for s in samples]
        collate = getattr(self.dataset, "collater", None) or torch.utils.data.default_collate
        batch = collate(theirs)
        for key in ("index", "loaded_index", "image_id"):
            batch[key] = torch.tensor([s[key] for s in samples], dtype=torch.int64)
        batch["load_error"] = [s["load_error"] for s in samples]
        made: dict[int, Tokens] = {}  # models that read alike share them
        for name, tokenizer in self._tokenizers.items():
            if id(tokenizer) not in made:
                made[id(tokenizer)], counts = tokenizer.counted(batch["text_input"])
                if name == TOKENS:
                    batch.update(counts)
            batch[name] = made[id(tokenizer)]
        return batch


def _told(problem: Exception) -> str:
    """An error for log files: names that are no text (lone surrogates) are written as codes."""
    text = f"{type(problem).__name__}: {problem}"
    return text.encode("utf-8", "backslashreplace").decode()


class _Views:
    """Several processors in the place of one, so that a picture is decoded once.

    The own one comes first, so that further views leave its draws as they were.
    """

    def __init__(self, processor: Processor, others: dict[str, Processor] | None = None) -> None:
        self.processor, self.others = processor, others or {}

    def with_one_more(self, name: str, processor: Processor) -> _Views:
        return _Views(self.processor, {**self.others, name: processor})

    def __call__(self, picture: Any) -> dict[str, Any]:
        image = self.processor(picture)
        return {"image": image, **{name: other(picture) for name, other in self.others.items()}}


def image_ids_of(parts: list[Any]) -> np.ndarray:
    """``(N,)`` int64 over concatenated data sets, equal where samples show one image.

    A part says so by ``image_ids``, or by the image paths of LAVIS's ``annotation``; a part that
    does neither counts every sample as an image of its own.
    """
    if len(parts) == 1 and hasattr(parts[0], "image_ids"):
        return parts[0].image_ids  # perhaps a memory map: no copy
    ids, first_free = [], 0
    paths: dict[str, int] = {}
    for part in parts:
        if hasattr(part, "image_ids"):
            own = np.asarray(part.image_ids, np.int64) + first_free
        elif getattr(part, "annotation", None) and "image" in part.annotation[0]:
            root = str(getattr(part, "vis_root", ""))
            names = [os.path.normpath(os.path.join(root, a["image"])) for a in part.annotation]
            own = np.array(
                [paths.setdefault(n, first_free + i) for i, n in enumerate(names)], np.int64
            )
        else:
            own = np.arange(first_free, first_free + len(part))
        ids.append(own)
        first_free = max(first_free + len(part), int(own.max(initial=0)) + 1)
    return np.concatenate(ids)


@contextmanager
def _seeded(entropy: list[int]) -> Iterator[None]:
    """Seed Python's, NumPy's and PyTorch's generators; the main process gets its own back."""
    in_worker = get_worker_info() is not None
    if not in_worker:
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    words = np.random.SeedSequence(entropy).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    # Not torch.manual_seed: in the main process that would reseed the GPU as well.
    torch.default_generator.manual_seed(int(words[2]))
    try:
        yield
    finally:
        if not in_worker:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])
