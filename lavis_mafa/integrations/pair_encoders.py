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

from lavis_mafa.integrations.cross_encoders import DualEncoder

_OPEN_CLIP = "open_clip:"
EXPECTED = (
    "expected a folder, or a name on the Hugging Face hub, of a CLIP or SigLIP of transformers or "
    "of a SentenceTransformer, or open_clip:NAME"
)


class PairEncoder:
    """Encodes the anchors and the texts of pairs.

    Attributes:
        model: whose weights identify the features.
        reads_images, reads_texts: what anchors may be.
    """

    model: Any
    reads_images, reads_texts = True, False

    def prepare(self, anchor: Any) -> Any:
        """Return what `encode_anchors` needs of an anchor, small enough to hold many."""
        return anchor

    def encode_anchors(self, anchors: Sequence[Any]) -> Tensor:
        """Return the features ``(B, E)`` of prepared anchors."""
        raise NotImplementedError

    def encode_texts(self, texts: list[str]) -> Tensor:
        """Return the features ``(B, E)`` of texts."""
        raise NotImplementedError


class _TwoTowers(PairEncoder):
    """CLIP and SigLIP of transformers."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.model, processor = load_two_towers(name, device)
        self._encoder = DualEncoder(self.model, processor, threshold=0.0)

    def prepare(self, anchor: Any) -> Any:
        return self._encoder.pixels([anchor]).cpu()

    def encode_anchors(self, anchors: Sequence[Any]) -> Tensor:
        weight = next(self.model.parameters())
        return self._encoder.encode_pixels(torch.cat(list(anchors)).to(weight.device))

    def encode_texts(self, texts: list[str]) -> Tensor:
        return self._encoder.encode_texts(texts)


class _Sentences(PairEncoder):
    """A SentenceTransformer, by its prompts for queries and documents if it has some."""

    def __init__(self, name: str, device: torch.device) -> None:
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(name, device=str(device), trust_remote_code=False)
        self.reads_images, self.reads_texts = map(self.model.supports, ("image", "text"))

    def encode_anchors(self, anchors: Sequence[Any]) -> Tensor:
        found: Tensor = self.model.encode_query(
            list(anchors), convert_to_tensor=True, show_progress_bar=False
        )
        return found

    def encode_texts(self, texts: list[str]) -> Tensor:
        found: Tensor = self.model.encode_document(
            texts, convert_to_tensor=True, show_progress_bar=False
        )
        return found


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
        return _Sentences(name, device)
    kind = kind_of(name)
    if kind.startswith(("clip", "siglip")):
        return _TwoTowers(name, device)
    raise ValueError(f"got a model of the kind {kind!r}, {EXPECTED}")


def load_two_towers(name: str, device: torch.device) -> tuple[Any, Any]:
    """Return a CLIP or SigLIP of transformers, and its processor."""
    from transformers import AutoModel, AutoProcessor

    processors: Any = AutoProcessor
    return AutoModel.from_pretrained(name).to(device), processors.from_pretrained(name)


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
    if os.path.isdir(name):
        return os.path.isfile(os.path.join(name, file))
    _require_folder(name)
    from transformers.utils import cached_file

    return cached_file(name, file, _raise_exceptions_for_missing_entries=False) is not None


def _require_folder(name: str) -> None:
    """Refuse a path that does not exist, which cannot be a name on the hub either."""
    if name.startswith((os.sep, ".", "~")) and not os.path.isdir(name):
        raise FileNotFoundError("no such folder")
