"""Encode samples with a model and cache their features and captions in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import get_rank, get_world_size
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from lavis_mafa.io.files import atomic_write
from lavis_mafa.io.identity import claim_folder, digest, fingerprint
from lavis_mafa.io.processes import barrier, progress
from lavis_mafa.mining.feature_files import (
    is_complete,
    join_blocks,
    packed,
    read_arrays,
    read_captions,
    read_numbers,
    read_unreadable,
)
from lavis_mafa.mining.model_and_data import ModelAndData, log_on_main
from lavis_mafa.models.con_d.self_check import random_partners
from lavis_mafa.models.families import backbone_of
from lavis_mafa.pages.tables import one_line
from lavis_mafa.runners.loaders import to_device

_COMPARED = 1000  # samples of which own and other images are compared
_BLOCK = 2048  # samples in a file: an interruption loses at most this many


@dataclass
class Features:
    """Features of S samples; positions 0 to S - 1 index them here.

    Those of `make_features` are memory-mapped files: a slice is read when it is used.

    Attributes:
        numbers: ``(S,)`` int64, ascending, the sample numbers in the training set.
        images, texts: normalised features ``(S, E)``; images ``(S, Q, E)`` in half precision if
            the model has Q queries for an image.
        vectors: ``(S, E)``, the single vector of each image that GRIT groups by.
        captions: S processed captions.
        unreadable: number and error of each requested sample that could not be read.
        identity: model, data and samples that the features were made from.
    """

    numbers: NDArray[Any]
    images: Tensor
    texts: Tensor
    vectors: Tensor
    captions: Sequence[str]
    unreadable: list[tuple[int, str]]
    identity: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers)

    def own_auc(self, image_ids: NDArray[Any], seed: int) -> float:
        """Return how often a text is more similar to its own image than to another, 0 to 1.

        Args:
            image_ids: ``(N,)`` of all samples, by number; 1 is returned if all are of one image.
        """
        generator = np.random.default_rng((seed, 7))
        some = generator.choice(len(self), min(len(self), _COMPARED), replace=False)
        rows, others = random_partners(image_ids[self.numbers[some]], generator)
        images, texts = (one[torch.from_numpy(some)].float() for one in (self.vectors, self.texts))
        own, other = ((images[of] * texts[rows]).sum(1) for of in (rows, others))
        # NaN is never more similar.
        found = (own > other).float() + (own == other).float() / 2
        return float(found.mean()) if len(rows) else 1.0

    def positions(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return the positions 0 to S - 1 of sample numbers; all must be in ``numbers``."""
        return np.searchsorted(self.numbers, numbers)


def make_features(loaded: ModelAndData, numbers: NDArray[Any], folder: Path) -> Features:
    """Encode samples; blocks that are in ``folder`` already are not encoded again.

    All ranks must call this function; they share the work through ``folder``, and each maps the
    files of all features into memory instead of holding them.

    Args:
        numbers: ``(S,)`` ascending sample numbers.
        folder: cache of the blocks.

    Raises:
        ValueError: if ``folder`` holds the features of another model, data set or sample.
    """
    # The identity of the folder hashes the bytes of the numbers, so their type must be fixed.
    numbers = np.asarray(numbers, np.int64)
    folder.mkdir(parents=True, exist_ok=True)
    identity = _identity(loaded, numbers)
    claim_folder(folder, identity)
    if not is_complete(folder):
        blocks = [numbers[i : i + _BLOCK] for i in range(0, len(numbers), _BLOCK)]
        paths = [folder / f"block_{k:06d}.npz" for k in range(len(blocks))]
        _encode_missing(loaded, blocks, paths)
        barrier()
        join_blocks(paths, numbers, folder)
    return _load(folder, numbers, identity)


def _encode_missing(
    loaded: ModelAndData, blocks: Sequence[NDArray[Any]], paths: Sequence[Path]
) -> None:
    """Encode this rank's share of the blocks that have no file yet."""
    rank, world = get_rank(), get_world_size()
    missing = [k for k in range(rank, len(blocks), world) if not paths[k].is_file()]
    total = sum(len(blocks[k]) for k in missing)
    if total:
        log_on_main("encoding %d of %d samples", total, sum(map(len, blocks)))
    size = int(loaded.cfg.run_cfg.batch_size_eval)
    with progress(desc="features", total=total, unit=" samples") as bar:
        for k in missing:
            batches = [blocks[k][i : i + size] for i in range(0, len(blocks[k]), size)]
            _save(paths[k], _encode(loaded, batches, bar))


def _encode(
    loaded: ModelAndData, batches: list[NDArray[Any]], bar: tqdm
) -> dict[str, NDArray[Any]]:
    backbone = backbone_of(loaded.model)
    parts: dict[str, list[Any]] = {"images": [], "texts": [], "vectors": []}
    captions: list[str] = []
    errors: list[str] = []
    for batch in loaded.data.batches(batches):
        samples = to_device(batch, loaded.device)
        with torch.inference_mode(), loaded.autocast():
            images = backbone.encode_images(samples["image"])
            texts = backbone.encode_texts(samples["text_input"])
            vectors, text_vectors = backbone.grit_vectors(images, texts)
        assert images.features is not None
        _require_finite(batch["index"], vectors, text_vectors)
        several = images.features.ndim == 3
        if several:
            parts["images"].append(images.features.half().cpu().numpy())
        parts["vectors"].append(vectors.float().cpu().numpy())
        parts["texts"].append(text_vectors.float().cpu().numpy())
        captions += list(batch["text_input"])
        errors += list(batch["load_error"])
        bar.update(len(batch["index"]))
    stored = {name: np.concatenate(values) for name, values in parts.items() if values}
    return {**stored, "captions": packed(captions), "errors": packed(errors)}


def _require_finite(numbers: Tensor, *vectors: Tensor) -> None:
    good = torch.stack([torch.isfinite(v).flatten(1).all(1).cpu() for v in vectors]).all(0)
    if not good.all():
        raise ValueError(
            f"features of samples {numbers[~good][:5].tolist()} are NaN or infinite: the "
            "checkpoint is damaged, or fp16 overflows (run.amp_dtype=bf16, or run.amp=False)"
        )


def _save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    with atomic_write(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _load(folder: Path, numbers: NDArray[Any], identity: Mapping[str, str]) -> Features:
    try:
        arrays, unreadable = read_arrays(folder), read_unreadable(folder)
        found = Features(
            read_numbers(folder),
            arrays.get("images", arrays["vectors"]),
            arrays["texts"],
            arrays["vectors"],
            read_captions(folder),
            unreadable,
            identity,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"the features in {folder} are damaged ({error}): remove the folder, and the samples "
            "are encoded again"
        ) from error
    if unreadable:
        number, problem = unreadable[0]
        log_on_main(
            "%d of %d samples cannot be read and are skipped, the first: %d (%s). If they have "
            "been repaired, delete %s to read them again",
            *(len(unreadable), len(numbers), number, one_line(problem), folder),
        )
    return found


def _identity(loaded: ModelAndData, numbers: NDArray[Any]) -> dict[str, str]:
    """Return what the features depend on."""
    run = loaded.cfg.run_cfg
    precision = str(run.get("amp_dtype", "fp16")) if run.get("amp", False) else "fp32"
    return {
        "model": fingerprint(loaded.model),
        "data": f"{len(loaded.data)} samples, {loaded.data.fingerprint()}",
        "read with": f"{precision}, {getattr(loaded.model, 'max_txt_len', None)} tokens",
        "sample": f"{len(numbers)} of them, {digest(numbers)}",
    }
