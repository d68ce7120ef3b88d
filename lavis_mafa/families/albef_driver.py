"""The driver of ALBEF: dot product of [CLS] features, fusion by cross-attention, MLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.backbone import FAMILIES, Images, Teacher, Texts
from lavis_mafa.algorithm.losses.language import IGNORED, mask_tokens
from lavis_mafa.algorithm.tokens import Tokens
from lavis_mafa.families.attention import PairedImages, first_token_after, take, tokens_after
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

    @property
    def _fusion_layers(self) -> Any:
        return self._bert.encoder.layer[self._bert.config.fusion_layer :]

    def match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        assert texts.embeds is not None
        hidden, mask = take(texts.embeds, text_of), texts.mask[text_of]
        paired = PairedImages(images, image_of)
        logits: Tensor = self.model.itm_head(
            first_token_after(self._fusion_layers, hidden, mask, paired)
        )
        return logits

    def language_losses(
        self,
        images: Images,
        texts: Texts,
        image_of: Tensor,
        text_of: Tensor,
        teacher: Teacher | None = None,
    ) -> Tensor:
        """Compute MLM losses, with a teacher's distribution over the vocabulary in the targets."""
        masked = self._mask(texts, text_of)
        return self._mlm_losses(
            self._predicted(masked, images, image_of), masked, image_of, teacher
        )

    def match_and_predict(
        self,
        images: Images,
        texts: Texts,
        matched: tuple[Tensor, Tensor],
        predicted: tuple[Tensor, Tensor],
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return `match` and `language_losses` of pairs by one pass through the fusion layers."""
        assert texts.embeds is not None
        masked = self._mask(texts, predicted[1])
        mask = torch.cat([texts.mask[matched[1]], masked.tokens.attention_mask])
        # ITM reads the first token of its pairs, MLM the hidden ones of those that follow.
        count, length = len(matched[0]), mask.shape[1]
        firsts = torch.arange(0, count * length, length, device=mask.device)
        states = tokens_after(
            self._fusion_layers,
            torch.cat([take(texts.embeds, matched[1]), self._text_tokens(masked.tokens)]),
            mask,
            PairedImages(images, torch.cat([matched[0], predicted[0]])),
            torch.cat([firsts, masked.rows + count * length]),
        )
        first, others = states.split([count, len(masked.rows)])
        logits: Tensor = self.model.itm_head(first)
        return logits, self._mlm_losses(others, masked, predicted[0], teacher)

    def _mask(self, texts: Texts, text_of: Tensor) -> _Masked:
        """Hide tokens of captions, see `mask_tokens`."""
        tokenizer = self.model.tokenizer
        ids, targets = mask_tokens(
            texts.ids[text_of],
            self.model.mlm_probability,
            mask_id=tokenizer.mask_token_id,
            vocab_size=self.model.text_encoder.config.vocab_size,
            special_ids=(tokenizer.cls_token_id, tokenizer.pad_token_id),
        )
        rows = torch.nonzero(targets.flatten() != IGNORED).squeeze(1)
        return _Masked(Tokens(ids, texts.mask[text_of]), rows, targets.flatten()[rows])

    def _predicted(self, masked: _Masked, images: Images, image_of: Tensor) -> Tensor:
        """Return the states ``(T, D)`` of hidden tokens after the last layer."""
        hidden, mask = self._text_tokens(masked.tokens), masked.tokens.attention_mask
        paired = PairedImages(images, image_of)
        return tokens_after(self._fusion_layers, hidden, mask, paired, masked.rows)

    def _mlm_losses(
        self, states: Tensor, masked: _Masked, image_of: Tensor, teacher: Teacher | None
    ) -> Tensor:
        logits = self.model.text_encoder.cls(states).float()
        losses: Tensor = F.cross_entropy(logits, masked.targets, reduction="none")
        if teacher is None:
            return losses
        with torch.no_grad():
            copy: Any = teacher.backbone
            states = copy._predicted(masked, teacher.images, image_of)
            soft = copy.model.text_encoder.cls(states).float().softmax(dim=1)
        distilled: Tensor = -(soft * logits.log_softmax(dim=1)).sum(dim=1)
        return (1.0 - teacher.alpha) * losses + teacher.alpha * distilled


@dataclass
class _Masked:
    """Captions of P pairs with hidden tokens: their ``rows`` ``(T,)`` among all ``P * L`` tokens,
    and ``targets`` ``(T,)``. The head is a product with the whole vocabulary, so that no other
    tokens are predicted."""

    tokens: Tokens
    rows: Tensor
    targets: Tensor
