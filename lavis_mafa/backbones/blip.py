"""BLIP: dot product of [CLS] features, ITM by the text encoder over the image, causal LM."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lavis_mafa.backbones.base import (
    FromFirstTokens,
    Images,
    Teacher,
    Texts,
    all_visible,
    begin_with,
    tokenize,
)
from lavis_mafa.objectives.language import next_token_losses


class BlipBackbone(FromFirstTokens):
    """Drives any LAVIS BLIP: ``blip_mafa``, ``blip_pretrain``, ``blip_retrieval``,
    ``blip_image_text_matching``.

    Args:
        model: has ``visual_encoder``, ``text_encoder``, ``vision_proj``, ``text_proj``,
            ``itm_head``, ``tokenizer`` (with ``enc_token_id``), ``max_txt_len``; to train also
            ``text_decoder`` and ``temp``.
    """

    def encode_texts(
        self, captions: Sequence[str], max_length: int | None = None, for_matching: bool = False
    ) -> Texts:
        tokens = tokenize(self.model, captions, max_length)
        if for_matching:
            return Texts(tokens.input_ids, tokens.attention_mask)
        embeds = self.model.text_encoder.forward_text(tokens).last_hidden_state
        features = self.text_features(embeds)
        return Texts(tokens.input_ids, tokens.attention_mask, features=features)

    def match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        embeds = images.embeds[image_of]
        fused = self.model.text_encoder(
            begin_with(texts.ids[text_of], self.model.tokenizer.enc_token_id),
            attention_mask=texts.mask[text_of],
            encoder_hidden_states=embeds,
            encoder_attention_mask=all_visible(embeds),
            return_dict=True,
        ).last_hidden_state
        return self.model.itm_head(fused[:, 0])

    def tell(
        self,
        images: Images,
        texts: Texts,
        image_of: Tensor,
        text_of: Tensor,
        teacher: Teacher | None = None,
    ) -> Tensor:
        """LM of the decoder, which begins with [DEC]."""
        embeds = images.embeds[image_of]
        ids = begin_with(texts.ids[text_of], self.model.tokenizer.bos_token_id)
        decoder = self.model.text_decoder
        hidden = decoder.bert(
            ids,
            attention_mask=texts.mask[text_of],
            encoder_hidden_states=embeds,
            encoder_attention_mask=all_visible(embeds),
            return_dict=True,
            is_decoder=True,
        ).last_hidden_state
        return next_token_losses(hidden, ids, texts.mask[text_of], decoder.cls)
