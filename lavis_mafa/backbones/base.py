"""The verbs that a model family gives to the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.backbones.attention import fuse_attention
from lavis_mafa.objectives.tcl import local_features, pool_patches
from lavis_mafa.tokens import Captions, Tokens, tokens_of


@dataclass
class Images:
    """Encoded images.

    Attributes:
        embeds: ``(N, S, D)``, what the language side attends to.
        features: normalised, ``(N, E)``, or ``(N, Q, E)`` where an image has Q queries; None if
            encoded for matching only.
        seen: ``(B, S, V)`` output of the image encoder proper, for another model with the same one.
        cache: what a family keeps of this rank's B images for `Backbone.tell`.
        first: number of this rank's first image among the N.
        memory: keys and values of cross-attention, see `lavis_mafa.backbones.attention`.
    """

    embeds: Tensor
    features: Tensor | None = None
    seen: Tensor | None = None
    cache: Any = None
    first: int = 0
    memory: dict[Any, Any] = field(default_factory=dict, repr=False)


@dataclass
class Texts:
    """Encoded captions: ``ids`` and ``mask`` ``(N, L)``, ``embeds`` ``(N, L, D)`` where the family
    fuses those, normalised ``features`` ``(N, E)``; None if encoded for matching only."""

    ids: Tensor
    mask: Tensor
    embeds: Tensor | None = None
    features: Tensor | None = None


@dataclass
class Teacher:
    """A momentum copy of the model whose predictions the language loss takes up (ALBEF eq. 7).

    Attributes:
        backbone: drives the copy.
        images: what it encoded of the same N images.
        alpha: weight of its predictions, 0 to 1.
    """

    backbone: Backbone
    images: Images
    alpha: float


class Backbone(Protocol):
    """How a family encodes, compares, matches and tells.

    A backbone holds no weights of its own: it drives the modules of a LAVIS model, so that the same
    code serves the model in training and a frozen Con-D. It has their attention computed by fused
    kernels.
    """

    def see(self, images: Tensor) -> Tensor:
        """Output ``(B, S, V)`` of the image encoder alone for images ``(B, 3, H, W)``."""

    def encode_images(
        self, images: Tensor, seen: Tensor | None = None, for_matching: bool = False
    ) -> Images:
        """Encode ``(B, 3, H, W)``; ``for_matching`` leaves out what `match` does not need.

        ``seen`` stands for ``see(images)`` where that is known already.
        """

    def encode_texts(
        self, captions: Captions, max_length: int | None = None, for_matching: bool = False
    ) -> Texts:
        """Tokenise and encode B captions, cut at ``max_length`` tokens (default: the model's), or
        encode their tokens."""

    def similarity(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        """Similarities ``(I, T)`` of features of I images and T texts, not divided by the
        temperature."""

    def represent(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        """One vector ``(B, E)`` for each image and caption, for GRIT; pair b in row b."""

    def match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        """ITM logits ``(P, 2)``, class 1 = match, of the pairs ``(image_of[p], text_of[p])``."""

    def tell(
        self,
        images: Images,
        texts: Texts,
        image_of: Tensor,
        text_of: Tensor,
        teacher: Teacher | None = None,
    ) -> Tensor:
        """Language loss ``(T,)`` of every token to predict in the given pairs.

        ``teacher`` is for MLM; LM distils nothing, as in BLIP.
        """

    @property
    def temperature(self) -> Tensor:
        """The learnable temperature (scalar parameter)."""


class FromFirstTokens:
    """ALBEF and BLIP: one feature, of the first token, for an image and for a text; dot product."""

    def __init__(self, model: Any) -> None:
        fuse_attention(model)
        self.model = model

    @property
    def temperature(self) -> Tensor:
        return self.model.temp

    def see(self, images: Tensor) -> Tensor:
        return self.model.visual_encoder.forward_features(images)

    def encode_images(
        self, images: Tensor, seen: Tensor | None = None, for_matching: bool = False
    ) -> Images:
        embeds = self.see(images) if seen is None else seen
        if for_matching:
            return Images(embeds)
        features = F.normalize(self.model.vision_proj(embeds[:, 0]).float(), dim=-1)
        return Images(embeds, features, seen=embeds)

    def text_features(self, embeds: Tensor) -> Tensor:
        """Features ``(N, E)`` of captions encoded as ``(N, L, D)``."""
        return F.normalize(self.model.text_proj(embeds[:, 0]).float(), dim=-1)

    def similarity(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        # In fp32 whatever the precision around: the temperature's gradient suffers otherwise.
        with torch.autocast(image_features.device.type, enabled=False):
            return image_features @ text_features.t()

    def regions(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        """Local features for TCL's LMI: ``(N, M, E)`` of regions of images, ``(N, L - 1, E)`` of
        words, whose mask is ``texts.mask[:, 1:]``.

        Raises:
            ValueError: if the family keeps no states of words.
        """
        if texts.embeds is None:
            raise ValueError("loss_weights.lmi (TCL) needs states of words: use albef_mafa")
        patches = local_features(images.embeds, self.model.vision_proj)
        return pool_patches(patches), local_features(texts.embeds, self.model.text_proj)

    def represent(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        assert images.features is not None and texts.features is not None
        return images.features.detach(), texts.features.detach()


def tokenize(model: Any, captions: Captions, max_length: int | None) -> Tokens:
    """Tokens of captions on the model's device; of captions that are tokens already, these."""
    if not isinstance(captions, Tokens):
        captions = tokens_of(model.tokenizer, captions, max_length or model.max_txt_len)
    return captions.to(model.device)


def begin_with(ids: Tensor, token: int) -> Tensor:
    """A copy of ``(N, L)`` ids whose first token is another."""
    changed = ids.clone()
    changed[:, 0] = token
    return changed


def all_visible(embeds: Tensor) -> Tensor:
    """The attention mask ``(N, S)`` of embeddings ``(N, S, D)`` of which none is padding."""
    return torch.ones(embeds.shape[:-1], dtype=torch.long, device=embeds.device)


def image_size_of(model: Any) -> int | None:
    """Side in pixels that a LAVIS model's image encoder expects, None if it does not say."""
    encoder = getattr(model, "visual_encoder", None)
    size = getattr(getattr(encoder, "patch_embed", None), "img_size", None)
    if size is not None:
        return int(size[0])
    size = getattr(encoder, "input_resolution", None)  # CLIP's ViT
    return None if size is None else int(size)
