"""Features and captions of many samples, made once by a checkpoint and kept in files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import get_rank, get_world_size, is_main_process
from torch import Tensor
from tqdm import tqdm

from lavis_mafa.analysis.corpus import Opened, tell
from lavis_mafa.io.files import atomic_write
from lavis_mafa.io.identity import claim_folder, digest, fingerprint
from lavis_mafa.io.processes import barrier
from lavis_mafa.models.families import backbone_of
from lavis_mafa.runners.loaders import to_device

BLOCK = 2048  # samples in a file: what an interruption loses at most


@dataclass
class Features:
    """What a model makes of S samples, which are numbered 0 to S - 1 here.

    Attributes:
        numbers: ``(S,)`` int64, ascending, their numbers in the training set.
        images, texts: normalised features, ``(S, E)``, images ``(S, Q, E)`` in half precision
            where an image has Q queries.
        vectors: ``(S, E)``, the one vector of each image that GRIT groups by.
        captions: S processed captions.
        unreadable: numbers of the samples that were asked for and could not be read.
    """

    numbers: np.ndarray
    images: Tensor
    texts: Tensor
    vectors: Tensor
    captions: Sequence[str]
    unreadable: list[tuple[int, str]]

    def __len__(self) -> int:
        return len(self.numbers)

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """Places 0 to S - 1 of numbers of the training set, which must be among them."""
        return np.searchsorted(self.numbers, numbers)


def make_features(opened: Opened, numbers: np.ndarray, folder: Path) -> Features:
    """Encode samples; what lies in ``folder`` already is not encoded again.

    All ranks must call it and share the work through ``folder``.

    Args:
        numbers: ``(S,)`` ascending sample numbers.
        folder: where the blocks are kept.

    Raises:
        ValueError: if ``folder`` holds the features of another model, data set or sample.
    """
    numbers = np.asarray(numbers, np.int64)
    folder.mkdir(parents=True, exist_ok=True)
    claim_folder(folder, _identity(opened, numbers))
    blocks = [numbers[i : i + BLOCK] for i in range(0, len(numbers), BLOCK)]
    paths = [folder / f"block_{k:06d}.npz" for k in range(len(blocks))]
    rank, world = get_rank(), get_world_size()
    missing = [k for k in range(rank, len(blocks), world) if not paths[k].is_file()]
    if missing:
        left = sum(len(blocks[k]) for k in missing)
        tell("encoding %d of %d samples", left, len(numbers))
    size = int(opened.cfg.run_cfg.batch_size_eval)
    total = sum(len(blocks[k]) for k in missing)
    bar = tqdm(total=total, unit=" samples", desc="features", disable=not is_main_process())
    for k in missing:
        batches = [blocks[k][i : i + size] for i in range(0, len(blocks[k]), size)]
        _save(paths[k], _encode(opened, batches, bar))
    bar.close()
    barrier()
    return _load(paths, numbers)


def _encode(opened: Opened, batches: list[np.ndarray], bar: tqdm) -> dict[str, np.ndarray]:
    backbone = backbone_of(opened.model)
    parts: dict[str, list[Any]] = {"images": [], "texts": [], "vectors": []}
    captions: list[str] = []
    errors: list[str] = []
    for batch in opened.data.batches(batches):
        samples = to_device(batch, opened.device)
        with torch.inference_mode(), opened.autocast():
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
    return {**stored, "captions": _packed(captions), "errors": _packed(errors)}


def _require_finite(numbers: Tensor, *vectors: Tensor) -> None:
    good = torch.stack([torch.isfinite(v).flatten(1).all(1).cpu() for v in vectors]).all(0)
    if not good.all():
        raise ValueError(
            f"features of samples {numbers[~good][:5].tolist()} are NaN or infinite: the "
            "checkpoint is damaged, or fp16 overflows (run.amp_dtype=bf16, or run.amp=False)"
        )


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with atomic_write(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _load(paths: list[Path], numbers: np.ndarray) -> Features:
    # Filled in place: of millions of samples there may not be several copies.
    filled: dict[str, np.ndarray] = {}
    captions: list[str] = []
    errors: list[str] = []
    count = 0
    for path in paths:
        with np.load(path, allow_pickle=False) as stored:
            told = _unpacked(stored["errors"])
            good = np.array([not error for error in told], bool)
            for name in {"images", "texts", "vectors"} & set(stored):
                block = stored[name][good]
                if name not in filled:
                    filled[name] = np.empty((len(numbers), *block.shape[1:]), block.dtype)
                filled[name][count : count + len(block)] = block
            captions += _unpacked(stored["captions"])
            errors += told
            count += int(good.sum())
    readable = np.array([not error for error in errors], bool)
    arrays = {name: torch.from_numpy(values[:count]) for name, values in filled.items()}
    unreadable = [
        (int(number), error) for number, error in zip(numbers, errors, strict=True) if error
    ]
    if unreadable:
        tell(
            "%d of %d samples cannot be read and are left out, the first: %d (%s); mended? remove "
            "%s to have them read again",
            *(len(unreadable), len(numbers), *unreadable[0], paths[0].parent),
        )
    return Features(
        numbers[readable],
        arrays.get("images", arrays["vectors"]),
        arrays["texts"],
        arrays["vectors"],
        [caption for caption, good in zip(captions, readable, strict=True) if good],
        unreadable,
    )


def _packed(texts: Sequence[str]) -> np.ndarray:
    """Strings as bytes of JSON: arrays of strings are as wide as the longest one."""
    return np.frombuffer(json.dumps(list(texts)).encode(), np.uint8)


def _unpacked(packed: np.ndarray) -> list[str]:
    return json.loads(packed.tobytes().decode())


def _identity(opened: Opened, numbers: np.ndarray) -> dict[str, str]:
    """What features depend on."""
    run = opened.cfg.run_cfg
    precision = str(run.get("amp_dtype", "fp16")) if run.get("amp", False) else "fp32"
    return {
        "model": fingerprint(opened.model),
        "data": f"{len(opened.data)} samples, {opened.data.fingerprint()}",
        "read with": f"{precision}, {getattr(opened.model, 'max_txt_len', None)} tokens",
        "sample": f"{len(numbers)} of them, {digest(numbers)}",
    }
