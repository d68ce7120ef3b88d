"""Make a `feature_folder` from pictures by an image encoder, for ``check-data --features``."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.registry import registry
from lavis.processors.blip_processors import BlipImageEvalProcessor
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lavis_mafa.datasets.feature_folder import NAMES
from lavis_mafa.datasets.image_text_json import ImageTextTrain
from lavis_mafa.datasets.image_text_shards import ImageTextShardsTrain
from lavis_mafa.datasets.pairs import TrainPairs
from lavis_mafa.datasets.shards import names_shards
from lavis_mafa.io.checkpoints import read_checkpoint
from lavis_mafa.io.files import atomic_write, write_json
from lavis_mafa.io.identity import (
    IDENTITY_FILE,
    check_identity,
    digest,
    fingerprint,
    write_identity,
)
from lavis_mafa.io.processes import progress
from lavis_mafa.plugins import load_plugin

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
VIEWS = ("plain", "flip")
_FILE_BYTES, _FILE_ROWS = 2**26, 256  # about, of a file of features, which is written as a whole
_GB = 1e9


@dataclass
class Encoder:
    """What computes features ``(B, S, V)`` of images ``(B, 3, H, W)``.

    Attributes:
        encode: or ``(B, V, rows, columns)``, or ``(B, V)``.
        size: H and W in pixels.
        mean, std: by which colours in [0, 1] are normalised.
        identity: of its weights.
        grid: rows and columns to which ``(B, V, rows, columns)`` is averaged; None: as they are.
            Features of another form have none.
    """

    encode: Callable[[Tensor], Tensor]
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    identity: str
    grid: int | None = None

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Return float16 features on the CPU.

        Raises:
            ValueError: for another shape, and for values that are not finite in float16.
        """
        made = self.encode(images)
        if self.grid and made.ndim != 4:
            raise ValueError(
                "--grid averages features (B, V, rows, columns), and --encoder gives "
                f"{tuple(made.shape)}: leave it out"
            )
        if self.grid:
            made = torch.nn.functional.adaptive_avg_pool2d(made, self.grid)
        made = made.flatten(2).transpose(1, 2) if made.ndim == 4 else made
        made = (made[:, None] if made.ndim == 2 else made).half().cpu()
        if made.ndim != 3 or len(made) != len(images) or not made.isfinite().all():
            raise ValueError(
                f"--encoder: expected finite features ({len(images)}, S, V), got "
                f"{tuple(made.shape)} with {int((~made.isfinite()).sum())} values that are not "
                "finite in float16"
            )
        return made


def load_encoder(
    name: str,
    weights: str | None = None,
    size: int | None = None,
    grid: int | None = None,
    device: str = "cpu",
) -> Encoder:
    """Load an image encoder.

    Args:
        name: of a model of timm; of a BLIP-2 model, ``blip2_mafa`` or ``blip2_mafa:TYPE``, for its
            frozen image encoder; a file ``.onnx``; or ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``,
            a function from images ``(B, 3, H, W)`` to features.
        weights: checkpoint of a model of timm, or ``model.vit_weights`` of BLIP-2.
        size: of images in pixels; None: the model's, else 224.
        grid: see `Encoder`.
        device: where to compute.

    Raises:
        ValueError: if it cannot be loaded.
    """
    if name.endswith(".onnx"):
        return Encoder(
            _onnx(name), size or 224, *IMAGENET, digest(np.fromfile(name, np.uint8)), grid
        )
    of_model = _of_model(name, weights, size, grid, device)
    if of_model is not None:
        return of_model
    if ":" in name:
        place, _, function = name.rpartition(":")
        own = getattr(load_plugin(place), function, None)
        if not callable(own):
            raise ValueError(f"--encoder {name}: {place} has no function {function}")

        def encode(images: Tensor) -> Tensor:
            return torch.as_tensor(own(images.to(device)))

        return Encoder(encode, size or 224, *IMAGENET, name, grid)
    import timm

    if name not in timm.list_models():
        raise ValueError(
            f"--encoder {name}: expected a model of timm {timm.__version__}, a file .onnx, "
            "blip2_mafa:TYPE, or MODULE:FUNCTION"
        )
    if weights is None:
        raise ValueError(f"--encoder {name}: its weights would be random; give --weights FILE")
    model: Any = timm.create_model(name, num_classes=0)
    state = read_checkpoint(weights)
    lacks = sorted(set(model.state_dict()) - set(state.get("model", state)))
    if lacks:
        raise ValueError(f"--weights {weights} lacks {len(lacks)} weights of {name}: {lacks[0]}")
    model.load_state_dict(state.get("model", state), strict=False)
    model.eval().to(device)
    usual = model.default_cfg
    return Encoder(
        lambda images: model.forward_features(images.to(device)),
        size or usual["input_size"][-1],
        *(usual["mean"], usual["std"], fingerprint(model), grid),
    )


def _of_model(
    name: str, weights: str | None, size: int | None, grid: int | None, device: str
) -> Encoder | None:
    """Return the frozen image encoder of a registered model; None if there is no such model."""
    arch, _, model_type = name.partition(":")
    kind = registry.get_model_class(arch)
    if kind is None:
        return None
    if not hasattr(kind, "frozen_encoder"):
        raise ValueError(f"--encoder {name}: {arch} has no frozen image encoder")
    given = {"vit_weights": weights, "image_size": size}
    changes = {key: value for key, value in given.items() if value is not None}
    model, encode, pixels = kind.frozen_encoder(model_type, device, **changes)
    colours = BlipImageEvalProcessor(pixels).normalize
    mean, std = tuple(colours.mean), tuple(colours.std)
    return Encoder(encode, pixels, mean, std, fingerprint(model), grid)


def _onnx(path: str) -> Callable[[Tensor], Tensor]:
    try:
        import onnxruntime
    except ImportError as error:
        raise ValueError(f"--encoder {path} needs onnxruntime: pip install onnxruntime") from error
    try:
        session = onnxruntime.InferenceSession(
            path, providers=onnxruntime.get_available_providers()
        )
    except Exception as error:  # of classes of its own
        raise ValueError(f"--encoder {path} cannot be loaded: {error}") from error
    read = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {read: images.numpy()})[0])


def pictures_of(
    files: Collection[str | os.PathLike[str]],
    image_root: str | os.PathLike[str] | None,
    **keys: Any,
) -> TrainPairs:
    """Return the pairs of annotation files or shards, for their pictures.

    Args:
        keys: further arguments of the data set.
    """
    shards = any(map(names_shards, files))
    kind: Any = ImageTextShardsTrain if shards else ImageTextTrain
    where = {} if shards else {"vis_root": image_root, **keys}
    pairs: TrainPairs = kind(vis_processor=None, text_processor=str, ann_paths=files, **where)
    pairs.require_pictures()
    return pairs


class _Images(Dataset[tuple[Tensor, str]]):
    """Pictures, processed, and an error where one cannot be read."""

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
    out: Path,
    encoder: Encoder,
    views: Collection[str] = VIEWS,
    part: tuple[int, int] = (0, 1),
    batch_size: int = 64,
    workers: int = 0,
) -> Iterator[str]:
    """Write the features of all images of some pairs into a folder, see `feature_folder`.

    Files that are complete are not made again. Rows of unreadable pictures are NaN.

    Args:
        views: of `VIEWS`, in the order of the rows' views.
        part: k and n: make every n-th file from the k-th on, so that n processes share the work.

    Yields:
        Lines for people: the size first, and one for each unreadable picture.

    Raises:
        ValueError: if the folder has features of other images or by another encoder, if two images
            have one name, or if the disk has too little space.
    """
    column = pairs.table.image_names().dictionary_encode()
    places, names = np.asarray(column.indices), column.dictionary.to_pylist()
    rows = np.unique(places, return_index=True)[1]
    ids = np.asarray(pairs.image_ids)
    twice = np.flatnonzero(ids[rows][places] != ids)
    if len(twice):
        raise ValueError(f"two images are named {names[places[twice[0]]]!r}: rename one of them")
    shape = (len(views), *encoder(torch.zeros(1, 3, encoder.size, encoder.size)).shape[1:])
    row_bytes = 2 * int(np.prod(shape))
    # Small enough to lose little when killed, and to be shared; large enough to be mapped by all.
    step = max(1, min(_FILE_BYTES // row_bytes, max(_FILE_ROWS, len(names) // 1024)))
    files = {first: out / f"features_{first}.npy" for first in range(0, len(names), step)}
    waiting = [first for first in list(files)[part[0] :: part[1]] if not files[first].exists()]
    own = sum(min(step, len(names) - first) for first in waiting)
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    yield (
        f"{out}: {len(names):,} images of {' x '.join(map(str, shape))} float16, "
        f"{len(names) * row_bytes / _GB:.3f} GB; {own:,} of them, {own * row_bytes / _GB:.3f} GB, "
        f"are to be made here, {free / _GB:.1f} GB are free"
    )
    if own * row_bytes > free:
        raise ValueError(f"--features {out}: the disk has too little space for them")
    identity = {
        "encoder": f"{encoder.identity}, {encoder.size} px, {encoder.mean}, {encoder.std}",
        "rows": f"{', '.join(views)}: {' x '.join(map(str, shape))}",
        "images": f"{len(names)}, {digest(np.frombuffer(repr(names).encode(), np.uint8))}",
    }
    check_identity(out, identity)
    if any(out.glob("features*.npy")) and not (out / IDENTITY_FILE).exists():
        raise ValueError(f"--features {out}: has features that this command has not made")
    out.mkdir(parents=True, exist_ok=True)
    write_identity(out, identity)
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
    bar = progress(total=own, unit=" images")
    for (first, numbers), (images, errors) in zip(batches, loader, strict=True):
        of_views = [encoder(images.flip(3) if view == "flip" else images) for view in views]
        features = torch.stack(of_views, dim=1).numpy()
        for place, error in enumerate(errors):
            if error:
                features[place] = np.nan
                yield f"unreadable: {error}"
        made.append(features)
        bar.update(len(numbers))
        if numbers.stop == min(first + step, len(names)):
            with atomic_write(files[first]) as file:
                np.save(file, np.concatenate(made))
            made.clear()
    bar.close()


def part_of(text: str) -> tuple[int, int]:
    """Parse ``K/N``, the K-th of N parts from 0 on.

    Raises:
        ValueError: if it is none.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise ValueError(f"--part {text}: expected K/N with K from 0 to N - 1, such as 0/4")
    return int(found[1]), int(found[2])
