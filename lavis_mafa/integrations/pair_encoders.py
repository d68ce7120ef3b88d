"""Encoders of images and texts, or of two texts, in other libraries behind one interface.

A model's folder runs no code: none is loaded with ``trust_remote_code``. No library is imported
before a model of it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lavis_mafa.integrations.cross_encoders import DualEncoder, PairEncoder, SentenceEncoder

_OPEN_CLIP = "open_clip:"


class _OpenClip(PairEncoder):
    """A model of open_clip: a name with a tag of weights, a name on the hub, or a folder."""

    def __init__(self, name: str, device: torch.device) -> None:
        import open_clip

        name, _, weights = name.partition("/") if ":" not in name else (name, "", "")
        self.model, self._processor = open_clip.create_model_from_pretrained(
            name, weights or None, device=device
        )
        self.model.eval()
        self._tokenizer, self._device = open_clip.get_tokenizer(name), device

    def prepare(self, anchor: Any) -> Any:
        return self._processor(anchor)

    def encode_anchors(self, anchors: Sequence[Any]) -> Tensor:
        found: Tensor = self.model.encode_image(torch.stack(list(anchors)).to(self._device))
        return found

    def encode_texts(self, texts: list[str]) -> Tensor:
        found: Tensor = self.model.encode_text(self._tokenizer(texts).to(self._device))
        return found


def load_pair_encoder(name: str, device: torch.device) -> PairEncoder:
    """Load an encoder by the form of its folder or name.

    Raises:
        OSError, ValueError, RuntimeError: if it cannot be loaded, or has another form.
    """
    if name.startswith(_OPEN_CLIP):
        return _OpenClip(name.removeprefix(_OPEN_CLIP), device)
    if os.path.isfile(os.path.join(name, "open_clip_config.json")):
        return _OpenClip(f"local-dir:{name}", device)
    if _has_file(name, "modules.json"):
        from sentence_transformers import SentenceTransformer

        model: Any = SentenceTransformer(name, device=str(device), trust_remote_code=False)
        encoder = SentenceEncoder(model)
        encoder.reads_images, encoder.reads_texts = map(model.supports, ("image", "text"))
        return encoder
    kind = kind_of(name)
    if kind.startswith(("clip", "siglip")):
        return load_dual_encoder(name, device, threshold=0.0)
    raise ValueError(
        f"got a model of the kind {kind!r}, expected a folder, or a name on the Hugging Face hub, "
        "of a CLIP or SigLIP of transformers or of a SentenceTransformer, or open_clip:NAME"
    )


def load_dual_encoder(
    name: str, device: torch.device, threshold: float | None = None
) -> DualEncoder:
    """Return a CLIP or SigLIP of transformers, see `DualEncoder`."""
    from transformers import AutoModel, AutoProcessor

    processors: Any = AutoProcessor
    model = AutoModel.from_pretrained(name).to(device)
    return DualEncoder(model, processors.from_pretrained(name), threshold)


def kind_of(name: str) -> str:
    """Return the ``model_type`` of a model of transformers.

    Raises:
        OSError, ValueError: if there is no such model.
    """
    _require_folder(name)
    from transformers import AutoConfig

    return str(AutoConfig.from_pretrained(name).model_type)


def _has_file(name: str, file: str) -> bool:
    """Return whether a folder, or a model on the hub, has a file."""
    _require_folder(name)
    from transformers.utils import cached_file

    return cached_file(name, file, _raise_exceptions_for_missing_entries=False) is not None


def _require_folder(name: str) -> None:
    """Refuse a path that does not exist, which cannot be a name on the hub either."""
    if name.startswith((os.sep, ".", "~")) and not os.path.isdir(name):
        raise FileNotFoundError("no such folder")
