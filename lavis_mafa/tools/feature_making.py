"""Encode pictures once by a frozen image encoder, into a `feature_folder`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.registry import registry
from lavis.processors.blip_processors import BlipImageEvalProcessor
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lavis_mafa.checkpoints.checkpoints import read_checkpoint
from lavis_mafa.data.feature_folder import NAMES
from lavis_mafa.data.pairs import TrainPairs
from lavis_mafa.io.files import atomic_write, write_json
from lavis_mafa.io.identity import IDENTITY_FILE, check_identity, digest, fingerprint
from lavis_mafa.io.processes import progress

VIEWS = ("plain", "flip")
_FILE_BYTES, _FILE_ROWS = 2**26, 256  # about, of a file of features, which is written as a whole


@dataclass
class Encoder:
    """What computes features of images.

    Attributes:
        encode: from images ``(B, 3, H, W)`` to features ``(B, S, V)``, ``(B, V, rows, columns)``,
            or ``(B, V)``.
        size: H and W in pixels.
        mean, std: by which colours in [0, 1] are normalised.
        identity: name of its weights; a folder has features of a single encoder.

    Raises:
        ValueError, or what the model raises: if it cannot encode images of this size.
    """

    encode: Callable[[Tensor], Tensor]
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    identity: str

    def __post_init__(self) -> None:
        self.shape = self(torch.zeros(1, 3, self.size, self.size)).shape[1:]

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Return features ``(B, S, V)``, float16 on the CPU.

        Raises:
            ValueError: for another shape, and for values that are not finite in float16.
        """
        made = self.encode(images)
        if made.ndim == 4:
            made = made.flatten(2).transpose(1, 2)
        made = (made[:, None] if made.ndim == 2 else made).half().cpu()
        if made.ndim != 3 or len(made) != len(images) or not made.isfinite().all():
            raise ValueError(
                f"the image encoder gives features {tuple(made.shape)} with "
                f"{int((~made.isfinite()).sum())} values that are not finite in float16, expected "
                f"finite features ({len(images)}, S, V)"
            )
        return made


def load_encoder(
    name: str, weights: str | None = None, size: int | None = None, device: str = "cpu"
) -> Encoder:
    """Load an image encoder.

    Args:
        name: of a model of timm; or ``blip2_mafa`` or ``blip2_mafa:TYPE`` for the frozen image
            encoder of BLIP-2.
        weights: checkpoint of a model of timm, or ``model.vit_weights`` of BLIP-2.
        size: of images in pixels; None: the model's.
        device: where to compute.

    Raises:
        ValueError: if it cannot be loaded.
    """
    arch, _, model_type = name.partition(":")
    kind: Any = registry.get_model_class(arch)
    if hasattr(kind, "frozen_encoder"):
        given = {"vit_weights": weights, "image_size": size}
        changes = {key: value for key, value in given.items() if value is not None}
        model, encode, pixels = kind.frozen_encoder(model_type, device, **changes)
        colours = BlipImageEvalProcessor(pixels).normalize
        mean, std = tuple(colours.mean), tuple(colours.std)
        return Encoder(encode, pixels, mean, std, fingerprint(model))
    import timm

    if name not in timm.list_models():
        raise ValueError(
            f"--encoder {name}: expected a model of timm {timm.__version__}, or blip2_mafa:TYPE; "
            "for an encoder of your own see examples/own_features.py"
        )
    if weights is None:
        raise ValueError(f"--encoder {name}: its weights would be random; give --weights FILE")
    timm_model: Any = timm.create_model(name, num_classes=0)
    state = read_checkpoint(weights)
    lacks = sorted(set(timm_model.state_dict()) - set(state.get("model", state)))
    if lacks:
        raise ValueError(f"--weights {weights} lacks {len(lacks)} weights of {name}: {lacks[0]}")
    timm_model.load_state_dict(state.get("model", state), strict=False)
    timm_model.eval().to(device)
    usual = timm_model.default_cfg
    return Encoder(
        lambda images: timm_model.forward_features(images.to(device)),
        size or usual["input_size"][-1],
        usual["mean"],
        usual["std"],
        fingerprint(timm_model),
    )


def pictures_of(
    files: Collection[str | os.PathLike[str]],
    image_root: str | os.PathLike[str] | None = None,
    **keys: Any,
) -> TrainPairs:
    """Return the pairs of annotation files or shards, for their pictures.

    Args:
        keys: further arguments of the data set.
    """
    # Pictures are read unprocessed.
    pairs = TrainPairs(None, str, image_root, files, **keys)  # type: ignore[arg-type]
    pairs.require_pictures()
    return pairs


class _Images(Dataset[tuple[Tensor, str]]):
    """Processed pictures, and an error where one cannot be read."""

    def __init__(self, pairs: TrainPairs, rows: Any, encoder: Encoder) -> None:
        self.pairs, self.rows, self.size = pairs, rows, encoder.size
        self.processor = BlipImageEvalProcessor(encoder.size, encoder.mean, encoder.std)

    def __getitem__(self, number: int) -> tuple[Tensor, str]:
        try:
            return self.processor(self.pairs.picture(int(self.rows[number]))), ""
        except OSError as error:
            return torch.zeros(3, self.size, self.size), str(error)


def make_features(
    pairs: TrainPairs,
    out: str | os.PathLike[str],
    encoder: Encoder,
    views: Collection[str] = VIEWS,
    part: tuple[int, int] = (0, 1),
    batch_size: int = 64,
    workers: int = 0,
) -> int:
    """Write the features of all images of some pairs into a folder, see `feature_folder`.

    Files that are complete are not made again. Rows of unreadable pictures are NaN.

    Args:
        views: of `VIEWS`, in the order of the rows' views.
        part: k and n: make every n-th file from the k-th on, so that n processes share the work.

    Returns:
        the number of unreadable pictures; each is logged.

    Raises:
        ValueError: if the folder has features of other images or by another encoder, or if two
            images have one name.
    """
    out = Path(out)
    names, rows = _images_of(pairs)
    shape = (len(views), *encoder.shape)
    row_bytes = 2 * int(np.prod(shape))
    # Small enough to lose little when killed, and to be shared; large enough to be mapped by all.
    step = max(1, min(_FILE_BYTES // row_bytes, max(_FILE_ROWS, len(names) // 1024)))
    files = {first: out / f"features_{first}.npy" for first in range(0, len(names), step)}
    waiting = [first for first in list(files)[part[0] :: part[1]] if not files[first].exists()]
    own = sum(min(step, len(names) - first) for first in waiting)
    logging.info(
        "%s: %s images of %s float16, %.3f GB; %s of them are to be made here",
        out,
        f"{len(names):,}",
        " x ".join(map(str, shape)),
        len(names) * row_bytes / 1e9,
        f"{own:,}",
    )
    identity = {
        "encoder": f"{encoder.identity}, {encoder.size} px, {encoder.mean}, {encoder.std}",
        "rows": f"{', '.join(views)}: {' x '.join(map(str, shape))}",
        "images": f"{len(names)}, {digest(np.frombuffer(repr(names).encode(), np.uint8))}",
    }
    check_identity(out, identity)
    if any(out.glob("features*.npy")) and not (out / IDENTITY_FILE).exists():
        raise ValueError(f"{out} has features that were not made here; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / IDENTITY_FILE, identity)
    write_json(out / NAMES, names)
    batches = [
        (first, range(begin, min(begin + batch_size, first + step, len(names))))
        for first in waiting
        for begin in range(first, min(first + step, len(names)), batch_size)
    ]
    loader: Any = DataLoader(
        _Images(pairs, rows, encoder),
        batch_sampler=[list(numbers) for _, numbers in batches],
        num_workers=workers,
        generator=torch.Generator(),
    )
    made: list[np.ndarray[Any, Any]] = []
    unreadable = 0
    bar = progress(total=own, unit=" images")
    for (first, numbers), (images, errors) in zip(batches, loader, strict=True):
        of_views = [encoder(images.flip(3) if view == "flip" else images) for view in views]
        features = torch.stack(of_views, dim=1).numpy()
        for place, error in enumerate(errors):
            if error:
                features[place] = np.nan
                unreadable += 1
                logging.warning("unreadable: %s", error)
        made.append(features)
        bar.update(len(numbers))
        if numbers.stop == min(first + step, len(names)):
            with atomic_write(files[first]) as file:
                np.save(file, np.concatenate(made))
            made.clear()
    bar.close()
    return unreadable


def _images_of(pairs: TrainPairs) -> tuple[list[str], Any]:
    """Return the names of the images of some pairs, and the first pair of each.

    Raises:
        ValueError: if two images have one name.
    """
    column = pairs.table.image_names().dictionary_encode()
    places, names = np.asarray(column.indices), column.dictionary.to_pylist()
    rows = np.unique(places, return_index=True)[1]
    ids = np.asarray(pairs.image_ids)
    twice = np.flatnonzero(ids[rows][places] != ids)
    if len(twice):
        raise ValueError(f"two images are named {names[places[twice[0]]]!r}: rename one of them")
    return names, rows
