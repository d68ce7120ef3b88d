"""Cache the outputs of Con-D's image encoder on disk, so that it runs once per training image."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lavis.common.dist_utils import get_rank
from torch import Tensor

from lavis_mafa.algorithm.discriminator import VIEW
from lavis_mafa.datasets.data_identity import DataIdentity
from lavis_mafa.datasets.training_set import TrainingSet
from lavis_mafa.io.identity import fingerprint
from lavis_mafa.models.con_d.discriminators import ModelDiscriminator
from lavis_mafa.models.con_d.kept_rows import KEY, KeptRows


def keep_images(
    model_cfg: Mapping[str, Any], model: Any, train_set: TrainingSet | None, device: torch.device
) -> KeptRows | None:
    """Open the cache of `kept_images` and let Con-D use it; None if the config names none."""
    kept = kept_images(model_cfg, model, train_set, device)
    if kept is not None:
        logging.info("%s", kept.summary)
        model.con_d.kept = kept.open()
    return kept


def kept_images(
    model_cfg: Mapping[str, Any], model: Any, train_set: TrainingSet | None, device: torch.device
) -> KeptRows | None:
    """Return the cache of ``model.mafa.con_d.keep_images``, not opened yet; None if it is not set.

    Rows have the type of the encoder's output, or bfloat16 for float32 if Con-D judges in bf16,
    where the keys and values made from them are rounded to that anyway.

    Args:
        model_cfg: section ``model`` of a config.
        model: the model in training.
        train_set: with Con-D's view, if its data can have one.
        device: where Con-D judges.

    Raises:
        ValueError: if Con-D's view of an image is random, or the folder cannot be used, see
            `KeptRows`.
    """
    given = (model_cfg.get("mafa") or {}).get("con_d") or {}
    con_d = getattr(model, "con_d", None)
    if not given.get("keep_images") or not isinstance(con_d, ModelDiscriminator):
        return None
    assert train_set is not None
    sample = train_set[0, 0]
    deterministic = all(getattr(part, "deterministic", False) for part in train_set.parts)
    if VIEW not in sample and not deterministic:
        raise ValueError(
            f"{KEY} needs images that are the same every time, but Con-D sees augmented ones: the "
            "data load images without a processor, or Con-D's model type has none for evaluation. "
            "Remove this key"
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
        "data": _identity_of_data(train_set),
    }
    folder = Path(os.path.abspath(os.path.expanduser(given["keep_images"])))
    shape = (row.shape[0], row.shape[1])
    return KeptRows(folder, identity, train_set.image_ids, shape, dtype, get_rank())


def _encoded(con_d: ModelDiscriminator, image: Tensor, device: torch.device) -> Tensor:
    """Return a row ``(S, V)`` of a black image, computed as in `ModelDiscriminator.judge`."""
    con_d.model.to(device)
    size = con_d.image_size
    shape = image.shape if size is None else (3, size, size)
    with torch.inference_mode(), con_d.autocast(device):
        return con_d.backbone.image_tokens(torch.zeros(1, *shape, device=device))[0]


def _require_one_image_per_id(train_set: TrainingSet) -> None:
    for part in train_set.parts:
        conflicts = getattr(getattr(part, "table", None), "meta", {}).get("id_conflicts")
        if conflicts:
            raise ValueError(
                f"{KEY} keeps images by their ids, but in the training data {conflicts} pairs have "
                "an image_id that another file has too: give each file a different image_id"
            )


def _described(processor: Any) -> str:
    """Describe a processor, equally in every process."""
    text = " ".join(repr(getattr(processor, "transform", type(processor))).split())
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _identity_of_data(train_set: TrainingSet) -> str:
    """Return an identity of the images of all samples, in order."""
    data = DataIdentity.of(train_set)
    return f"{data.samples} samples of {data.images} images, {data.image_rows}"
