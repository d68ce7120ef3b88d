"""Shared code of the drivers of all families."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.backbone import Images, Texts
from lavis_mafa.algorithm.losses.tcl import local_features, pool_patches
from lavis_mafa.algorithm.tokens import Captions, Tokens, tokens_of
from lavis_mafa.families.attention import fuse_attention

# Methods that a family may do together, see `ModelDriver`.
_APART = ("match", "language_losses", "encode_images", "encode_texts", "_text_tokens")


class ModelDriver:
    """Base of the drivers of ALBEF, BLIP and BLIP-2.

    Attributes:
        matches_states: ITM needs the states of a caption's tokens; otherwise only its ids.

    Optional methods do the work of several with fewer kernels: ``match_and_predict``, and
    ``encode_pairs``. A class that gets one of the several from another class does not inherit them.
    """

    matches_states = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for together in ("match_and_predict", "encode_pairs"):
            nearest = next(one for one in cls.__mro__ if vars(one).keys() & {together, *_APART})
            if together not in vars(nearest):
                setattr(cls, together, None)

    def __init__(self, model: Any) -> None:
        fuse_attention(model)
        self.model = model

    @property
    def temperature(self) -> Tensor:
        temperature: Tensor = self.model.temp
        return temperature

    def _text_features(self, embeds: Tensor) -> Tensor:
        """Return features ``(N, E)`` of captions encoded as ``(N, L, D)``."""
        return F.normalize(self.model.text_proj(embeds[:, 0]).float(), dim=-1)

    def _text_tokens(self, tokens: Tokens) -> Tensor:
        """Return the encoder's states ``(N, L, D)`` of tokenised captions."""
        raise NotImplementedError

    def encode_texts(
        self, captions: Captions, max_length: int | None = None, for_matching: bool = False
    ) -> Texts:
        ids, mask = tokens = tokenize(self.model, captions, max_length)
        if for_matching and not self.matches_states:
            return Texts(ids, mask)
        states = self._text_tokens(tokens)
        features = None if for_matching else self._text_features(states)
        return Texts(ids, mask, states if self.matches_states else None, features)


class FromFirstTokens(ModelDriver):
    """Base of ALBEF's and BLIP's drivers: features of the first tokens, compared by dot product."""

    def image_tokens(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.model.visual_encoder.forward_features(images)
        return tokens

    def encode_images(
        self, images: Tensor, seen: Tensor | None = None, for_matching: bool = False
    ) -> Images:
        embeds = self.image_tokens(images) if seen is None else seen
        if for_matching:
            return Images(embeds)
        features = F.normalize(self.model.vision_proj(embeds[:, 0]).float(), dim=-1)
        return Images(embeds, features, seen=embeds)

    def similarity(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        # In fp32 even under autocast, for the precision of the temperature's gradient.
        with torch.autocast(image_features.device.type, enabled=False):
            return image_features @ text_features.t()

    def regions(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        """Return local features for TCL's LMI: image regions ``(N, M, E)`` and words ``(N, L - 1,
        E)``, whose mask is ``texts.mask[:, 1:]``.

        Raises:
            ValueError: if the family does not keep the states of words.
        """
        if texts.embeds is None:
            raise ValueError("loss_weights.lmi (TCL) needs states of words: use albef_mafa")
        patches = local_features(images.embeds, self.model.vision_proj)
        return pool_patches(patches), local_features(texts.embeds, self.model.text_proj)

    def grit_vectors(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        assert images.features is not None and texts.features is not None
        return images.features.detach(), texts.features.detach()


def tokenize(model: Any, captions: Captions, max_length: int | None) -> Tokens:
    """Tokenise captions, unless they are tokens already, and move them to the model's device."""
    if not isinstance(captions, Tokens):
        captions = tokens_of(model.tokenizer, captions, max_length or model.max_txt_len)
    return captions.to(model.device)


def begin_with(ids: Tensor, token: int) -> Tensor:
    """Return a copy of ``(N, L)`` ids whose first token is ``token``."""
    changed = ids.clone()
    changed[:, 0] = token
    return changed


def all_visible(embeds: Tensor) -> Tensor:
    """Return the attention mask ``(N, S)`` of embeddings ``(N, S, D)`` without padding."""
    return torch.ones(embeds.shape[:-1], dtype=torch.long, device=embeds.device)
