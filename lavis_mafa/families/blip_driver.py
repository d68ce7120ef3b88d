"""The driver of BLIP: dot product of [CLS] features, ITM by cross-attention, causal LM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lavis_mafa.algorithm.backbone import FAMILIES, Images, Teacher, Texts
from lavis_mafa.algorithm.losses.language import next_token_losses
from lavis_mafa.algorithm.tokens import Tokens
from lavis_mafa.families.attention import PairedImages, first_token_after
from lavis_mafa.families.family import FromFirstTokens, begin_with


@FAMILIES.register("blip")
class BlipBackbone(FromFirstTokens):
    """Drive any LAVIS BLIP with an ITM head.

    These are ``blip_mafa``, ``blip_pretrain``, ``blip_retrieval``, ``blip_image_text_matching``.

    Args:
        model: has ``visual_encoder``, ``text_encoder``, ``vision_proj``, ``text_proj``,
            ``itm_head``, ``tokenizer`` (with ``enc_token_id``), ``max_txt_len``; to train also
            ``text_decoder`` and ``temp``.
    """

    @classmethod
    def drives(cls, model: Any) -> bool:
        """Return whether a model has an ITM head and a tokenizer with BLIP's [ENC]."""
        has_enc = hasattr(getattr(model, "tokenizer", None), "enc_token_id")
        has_encoder = hasattr(getattr(model, "text_encoder", None), "config")
        return hasattr(model, "itm_head") and has_enc and has_encoder

    def _text_tokens(self, tokens: Tokens) -> Tensor:
        states: Tensor = self.model.text_encoder.forward_text(tokens).last_hidden_state
        return states

    def match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        encoder = self.model.text_encoder
        ids = begin_with(texts.ids[text_of], self.model.tokenizer.enc_token_id)
        first = first_token_after(
            encoder.encoder.layer,
            encoder.embeddings(input_ids=ids),
            texts.mask[text_of],
            PairedImages(images, image_of),
        )
        logits: Tensor = self.model.itm_head(first)
        return logits

    def language_losses(
        self,
        images: Images,
        texts: Texts,
        image_of: Tensor,
        text_of: Tensor,
        teacher: Teacher | None = None,
    ) -> Tensor:
        """Compute the LM losses of the decoder, whose texts begin with [DEC]."""
        ids = begin_with(texts.ids[text_of], self.model.tokenizer.bos_token_id)
        decoder = self.model.text_decoder
        hidden = decoder.bert(
            ids,
            attention_mask=texts.mask[text_of],
            encoder_hidden_states=PairedImages(images, image_of),
            return_dict=True,
            is_decoder=True,
        ).last_hidden_state
        return next_token_losses(hidden, ids, texts.mask[text_of], decoder.cls)

    def match_and_predict(
        self,
        images: Images,
        texts: Texts,
        matched: tuple[Tensor, Tensor],
        predicted: tuple[Tensor, Tensor],
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return `match` and `language_losses` of pairs by one pass through the layers, of which
        encoder and decoder share all but self-attention (BLIP 3.2)."""
        encoder, decoder = self.model.text_encoder, self.model.text_decoder
        layers = list(zip(encoder.encoder.layer, decoder.bert.encoder.layer, strict=True))
        if any(one.output.dense.weight is not other.output.dense.weight for one, other in layers):
            losses = self.language_losses(images, texts, *predicted)
            return self.match(images, texts, *matched), losses
        image_of, text_of = map(torch.cat, zip(matched, predicted, strict=True))
        ids, mask, count = texts.ids[text_of], texts.mask[text_of], len(matched[0])
        ids[:count, 0] = self.model.tokenizer.enc_token_id
        ids[count:, 0] = self.model.tokenizer.bos_token_id
        added = [
            encoder.get_extended_attention_mask(part, part.shape, part.device, causal)
            for part, causal in ((mask[:count], False), (mask[count:], True))
        ]
        paired = PairedImages(images, image_of)
        hidden = encoder.embeddings(input_ids=ids)
        for both in layers:
            parts = zip(both, hidden.split([count, len(ids) - count]), added, strict=True)
            hidden = torch.cat([layer.attention(part, score)[0] for layer, part, score in parts])
            if hasattr(both[0], "crossattention"):  # a config may leave it out of the first layers
                hidden = both[0].crossattention(hidden, encoder_hidden_states=paired)[0]
            hidden = both[0].feed_forward_chunk(hidden)
        logits: Tensor = self.model.itm_head(hidden[:count, 0])
        return logits, next_token_losses(hidden[count:], ids[count:], mask[count:], decoder.cls)
