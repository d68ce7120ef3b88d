"""What Con-D's image encoder makes of the training images, kept on disk: it runs once per image."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import get_rank
from torch import Tensor

from lavis_mafa.algorithm.discriminator import VIEW
from lavis_mafa.datasets.training_set import TrainingSet
from lavis_mafa.io.identity import digest, fingerprint
from lavis_mafa.models.con_d.discriminator import ModelDiscriminator
from lavis_mafa.models.con_d.kept_flags import KEY
from lavis_mafa.models.con_d.kept_rows import KeptRows

IDENTITY_SAMPLE = 64  # images by whose names data are told from others


def keep_images(
    model_cfg: Mapping[str, Any], model: Any, train_set: TrainingSet | None, device: torch.device
) -> KeptRows | None:
    """Have Con-D keep what its image encoder makes, if `kept_images` says so."""
    kept = kept_images(model_cfg, model, train_set, device)
    if kept is not None:
        logging.info("%s", kept.told)
        model.con_d.kept = kept.open()
    return kept


def kept_images(
    model_cfg: Mapping[str, Any], model: Any, train_set: TrainingSet | None, device: torch.device
) -> KeptRows | None:
    """What ``model.mafa.con_d.keep_images`` asks for, not opened yet; None if it asks for nothing.

    Images are kept as Con-D's encoder gives them: one in float32 as bfloat16 if Con-D judges in
    bf16, where keys and values are rounded to that in any case.

    Args:
        model_cfg: section ``model`` of a config.
        model: the model in training.
        train_set: with Con-D's view, if its data can have one.
        device: where Con-D judges.

    Raises:
        ValueError: if Con-D sees an image differently from time to time, or the folder is of no
            use, see `KeptRows`.
    """
    asked = (model_cfg.get("mafa") or {}).get("con_d") or {}
    con_d = getattr(model, "con_d", None)
    if not asked.get("keep_images") or not isinstance(con_d, ModelDiscriminator):
        return None
    assert train_set is not None
    sample = train_set[0, 0]
    always_the_same = all(getattr(part, "deterministic", False) for part in train_set.parts)
    if VIEW not in sample and not always_the_same:
        raise ValueError(
            f"{KEY} needs images that are the same every time, and Con-D sees augmented ones: the "
            "data make their images without a processor, or Con-D's model type names none for "
            "evaluation. Leave it out"
        )
    _require_one_image_per_id(train_set)
    image = sample.get(VIEW, sample["image"])
    row = _encoded(con_d, image, device)
    dtype = row.dtype
    if dtype is torch.float32 and con_d.precision == "bf16":
        dtype = torch.bfloat16
    view = _described(con_d.processor) if VIEW in sample else "as the data make them"
    identity = {
        "image encoder": fingerprint(con_d.model.visual_encoder),
        "view": f"{con_d.image_size or image.shape[-1]} px, {view}",
        "rows": f"{' x '.join(map(str, row.shape))} {str(dtype).removeprefix('torch.')}",
        "data": _name_of(train_set),
    }
    folder = Path(os.path.abspath(os.path.expanduser(asked["keep_images"])))
    shape = (row.shape[0], row.shape[1])
    return KeptRows(folder, identity, train_set.image_ids, shape, dtype, get_rank())


def _encoded(con_d: ModelDiscriminator, image: Tensor, device: torch.device) -> Tensor:
    """A row ``(S, V)`` as `ModelDiscriminator.judge` would make it, of an image as large."""
    con_d.model.to(device)
    size = con_d.image_size or image.shape[-1]
    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=con_d.precision == "bf16")
    with torch.inference_mode(), bf16:
        return con_d.backbone.image_tokens(torch.zeros(1, 3, size, size, device=device))[0]


def _require_one_image_per_id(train_set: TrainingSet) -> None:
    for part in train_set.parts:
        conflicts = getattr(getattr(part, "table", None), "meta", {}).get("id_conflicts")
        if conflicts:
            raise ValueError(
                f"{KEY} keeps images by their ids, and in the training data {conflicts} pairs have "
                "an image_id that stands for another file as well: give each file an id of its own"
            )


def _described(processor: Any) -> str:
    """What a processor does, the same in every process."""
    text = " ".join(repr(getattr(processor, "transform", type(processor))).split())
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _name_of(train_set: TrainingSet) -> str:
    """A name for the images of the data: all ids, and some of the files."""
    ids = np.asarray(train_set.image_ids, np.int64)
    some = np.unique(np.linspace(0, len(ids) - 1, IDENTITY_SAMPLE).astype(np.int64))
    told = b"\n".join(_told(train_set, int(number)) for number in some)
    name = digest(ids, np.frombuffer(told, np.uint8))
    return f"{len(ids)} samples of {len(np.unique(ids))} images, {name}"


def _told(train_set: TrainingSet, number: int) -> bytes:
    """The name of a sample's image file, whose folder may change; or its content."""
    try:
        path, _ = train_set.source(number)
        return os.path.basename(path).encode() if path else train_set.image_bytes(number)[0]
    except (OSError, KeyError, AttributeError):  # data that tell no more than ids
        return b""
