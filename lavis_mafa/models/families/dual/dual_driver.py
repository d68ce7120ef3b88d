"""Drive a dual encoder: averages of both encoders' tokens, compared by cosine (FNE)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.backbone import Images, Texts
from lavis_mafa.algorithm.tokens import Captions
from lavis_mafa.models.families.attention import fuse_attention
from lavis_mafa.models.families.family import tokenize


class DualBackbone:
    """Encodes and compares; it has no fusion, so it can neither match nor generate.

    Features are averages over all tokens of an image, and over the tokens of a caption except
    padding, normalised, without projection.

    Args:
        model: has ``visual_encoder``, ``text_encoder`` (both of one width), ``tokenizer`` and
            ``max_txt_len``.
        suffix: of the encoders' names: ``_m`` drives the momentum copies.
    """

    def __init__(self, model: Any, suffix: str = "") -> None:
        fuse_attention(model)
        self.model, self.suffix = model, suffix

    def encode_images(
        self, images: Tensor, seen: Tensor | None = None, for_matching: bool = False
    ) -> Images:
        """Encode images ``(B, 3, H, W)``; ``embeds`` is the average token ``(B, 1, E)``."""
        if seen is None:
            seen = getattr(self.model, f"visual_encoder{self.suffix}").forward_features(images)
        average = seen.float().mean(dim=1)
        return Images(average[:, None], F.normalize(average, dim=-1), seen=seen)

    def encode_texts(
        self, captions: Captions, max_length: int | None = None, for_matching: bool = False
    ) -> Texts:
        """Tokenise and encode B captions, cut at ``max_length`` tokens (default: the model's)."""
        tokens = tokenize(self.model, captions, max_length)
        mask = tokens.attention_mask
        encoder = getattr(self.model, f"text_encoder{self.suffix}")
        hidden = encoder(tokens.input_ids, attention_mask=mask).last_hidden_state.float()
        # Unlike FNE's code without padding, so that a feature does not depend on other captions.
        average = (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return Texts(tokens.input_ids, mask, features=F.normalize(average, dim=-1))

    def similarity(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        """Return cosine similarities ``(I, T)``, in float32."""
        with torch.autocast(image_features.device.type, enabled=False):
            return image_features.float() @ text_features.float().t()
