"""The driver of ALBEF: dot product of [CLS] features, fusion by cross-attention, MLM."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.backbone import FAMILIES, Images, Teacher, Texts
from lavis_mafa.algorithm.losses.language import IGNORED, mask_tokens
from lavis_mafa.algorithm.tokens import Tokens
from lavis_mafa.families.attention import PairedImages, first_token_after, take
from lavis_mafa.families.family import FromFirstTokens


@FAMILIES.register("albef")
class AlbefBackbone(FromFirstTokens):
    """Drive any LAVIS ALBEF: ``albef_mafa``, ``albef_pretrain``, ``albef_retrieval``.

    Args:
        model: has ``visual_encoder``, ``text_encoder`` (BERT, or BERT with an MLM head),
            ``vision_proj``, ``text_proj``, ``itm_head``, ``temp``, ``tokenizer``, ``max_txt_len``.
    """

    matches_states = True

    @classmethod
    def drives(cls, model: Any) -> bool:
        """Return whether a model has an ITM head and a BERT whose last layers fuse."""
        encoder = getattr(model, "text_encoder", None)
        return hasattr(model, "itm_head") and hasattr(
            getattr(encoder, "config", None), "fusion_layer"
        )

    @property
    def _bert(self) -> Any:
        return getattr(self.model.text_encoder, "bert", self.model.text_encoder)

    def _text_tokens(self, tokens: Tokens) -> Tensor:
        states: Tensor = self._bert(
            tokens.input_ids, attention_mask=tokens.attention_mask, return_dict=True, mode="text"
        ).last_hidden_state
        return states

    def match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        assert texts.embeds is not None
        hidden, mask = take(texts.embeds, text_of), texts.mask[text_of]
        layers = self._bert.encoder.layer[self._bert.config.fusion_layer :]
        first = first_token_after(layers, hidden, mask, PairedImages(images, image_of))
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
        """Compute MLM losses; the targets include a teacher's distribution over the vocabulary."""
        tokenizer = self.model.tokenizer
        ids, targets = mask_tokens(
            texts.ids[text_of],
            self.model.mlm_probability,
            mask_id=tokenizer.mask_token_id,
            vocab_size=self.model.text_encoder.config.vocab_size,
            special_ids=(tokenizer.cls_token_id, tokenizer.pad_token_id),
        )
        mask = texts.mask[text_of]
        # Only tokens with a target, since the head multiplies by the whole vocabulary.
        rows = torch.nonzero(targets.flatten() != IGNORED).squeeze(1)
        logits = self._predict(ids, mask, PairedImages(images, image_of), rows)
        losses: Tensor = F.cross_entropy(logits, targets.flatten()[rows], reduction="none")
        if teacher is None:
            return losses
        with torch.no_grad():
            copy: Any = teacher.backbone
            looked_at = PairedImages(teacher.images, image_of)
            soft = copy._predict(ids, mask, looked_at, rows).softmax(dim=1)
        distilled: Tensor = -(soft * logits.log_softmax(dim=1)).sum(dim=1)
        return (1.0 - teacher.alpha) * losses + teacher.alpha * distilled

    def _predict(self, ids: Tensor, mask: Tensor, looked_at: PairedImages, rows: Tensor) -> Tensor:
        """Return MLM's logits ``(T, V)`` at the tokens ``rows`` ``(T,)`` among all ``P * L``."""
        hidden = self._bert(
            ids,
            attention_mask=mask,
            encoder_hidden_states=looked_at,
            return_dict=True,
        ).last_hidden_state
        logits: Tensor = self.model.text_encoder.cls(take(hidden.flatten(0, 1), rows)).float()
        return logits
