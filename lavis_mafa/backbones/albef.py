"""ALBEF: dot product of [CLS] features, fusion by cross-attention, MLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.backbones.base import Images, Texts
from lavis_mafa.objectives.language import IGNORED, mask_tokens


class AlbefBackbone:
    """Drives any LAVIS ALBEF: ``albef_mafa``, ``albef_pretrain``, ``albef_retrieval``.

    Args:
        model: has ``visual_encoder``, ``text_encoder`` (BERT, or BERT with an MLM head),
            ``vision_proj``, ``text_proj``, ``itm_head``, ``temp``, ``tokenizer``, ``max_txt_len``.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def _bert(self) -> Any:
        return getattr(self.model.text_encoder, "bert", self.model.text_encoder)

    @property
    def temperature(self) -> Tensor:
        return self.model.temp

    def encode_images(self, images: Tensor) -> Images:
        embeds = self.model.visual_encoder.forward_features(images)
        features = F.normalize(self.model.vision_proj(embeds[:, 0]).float(), dim=-1)
        return Images(embeds, features)

    def encode_texts(self, captions: Sequence[str], max_length: int | None = None) -> Texts:
        tokens = self.model.tokenizer(
            list(captions),
            padding="longest",
            truncation=True,
            max_length=max_length or self.model.max_txt_len,
            return_tensors="pt",
        ).to(self.model.device)
        embeds = self._bert(
            tokens.input_ids, attention_mask=tokens.attention_mask, return_dict=True, mode="text"
        ).last_hidden_state
        features = F.normalize(self.model.text_proj(embeds[:, 0]).float(), dim=-1)
        return Texts(embeds, tokens.attention_mask, tokens.input_ids, features)

    def similarity(
        self, images: Images, texts: Texts, detach_other: bool = False
    ) -> tuple[Tensor, Tensor]:
        other_texts, other_images = texts.features, images.features
        if detach_other:
            other_texts, other_images = other_texts.detach(), other_images.detach()
        # In fp32 whatever the precision around: the temperature's gradient suffers otherwise.
        with torch.autocast(images.features.device.type, enabled=False):
            return images.features @ other_texts.t(), texts.features @ other_images.t()

    def match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        fused = self._bert(
            encoder_embeds=texts.embeds[text_of],
            attention_mask=texts.mask[text_of],
            encoder_hidden_states=images.embeds[image_of],
            encoder_attention_mask=_all_visible(images.embeds[image_of]),
            return_dict=True,
            mode="fusion",
        ).last_hidden_state
        return self.model.itm_head(fused[:, 0])

    def tell(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        tokenizer = self.model.tokenizer
        ids, targets = mask_tokens(
            texts.ids[text_of],
            self.model.mlm_probability,
            mask_id=tokenizer.mask_token_id,
            vocab_size=self.model.text_encoder.config.vocab_size,
            special_ids=(tokenizer.cls_token_id, tokenizer.pad_token_id),
        )
        hidden = self._bert(
            ids,
            attention_mask=texts.mask[text_of],
            encoder_hidden_states=images.embeds[image_of],
            encoder_attention_mask=_all_visible(images.embeds[image_of]),
            return_dict=True,
        ).last_hidden_state
        # The head is a matrix product with the whole vocabulary: only where there is a target.
        asked = targets != IGNORED
        logits = self.model.text_encoder.cls(hidden[asked])
        if not len(logits):
            return logits.sum()
        return F.cross_entropy(logits.float(), targets[asked])


def _all_visible(embeds: Tensor) -> Tensor:
    return torch.ones(embeds.shape[:-1], dtype=torch.long, device=embeds.device)
