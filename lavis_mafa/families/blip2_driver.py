"""The driver of BLIP-2's Q-Former (stage 1): ITC by the best query, ITM by their mean, causal
LM."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lavis_mafa.algorithm.backbone import FAMILIES, Images, Teacher, Texts
from lavis_mafa.algorithm.losses.language import next_token_losses
from lavis_mafa.algorithm.tokens import Captions, Tokens
from lavis_mafa.families.attention import PairedImages
from lavis_mafa.families.family import ModelDriver, all_visible, begin_with, tokenize

# Maximum number of elements of a similarity tensor; more images are processed in chunks.
MAX_SIMILARITIES = 2**26


def precision_of(encoder: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context of an image encoder; on a CPU, convert an fp16 encoder to
    fp32."""
    if all(weight.dtype != torch.float16 for weight in encoder.parameters()):
        return nullcontext()
    if device.type == "cpu":
        logging.warning("the image encoder is in fp16, but on a CPU: it is converted to fp32")
        with torch.inference_mode(False):  # as inference tensors they could not be trained
            encoder.float()
        return nullcontext()
    # LAVIS's fp16 leaves normalisations in fp32, so autocast must make the types agree.
    return torch.autocast(device.type, torch.float16)


@FAMILIES.register("blip2")
class Blip2Backbone(ModelDriver):
    """Drive any LAVIS Q-Former of stage 1.

    These models are ``blip2_mafa``, ``blip2`` and ``blip2_image_text_matching``.

    Args:
        model: has ``visual_encoder``, ``ln_vision``, ``Qformer`` (BERT with an LM head),
            ``query_tokens``, ``vision_proj``, ``text_proj``, ``itm_head``, ``temp``, ``tokenizer``,
            ``max_txt_len``.
    """

    @classmethod
    def drives(cls, model: Any) -> bool:
        """Return whether a model has an ITM head and a Q-Former."""
        return hasattr(model, "itm_head") and hasattr(model, "Qformer")

    def image_tokens(self, images: Tensor) -> Tensor:
        encoder = self.model.visual_encoder
        trained = any(weight.requires_grad for weight in encoder.parameters())
        grad = torch.set_grad_enabled(torch.is_grad_enabled() and trained)
        with precision_of(encoder, images.device), grad:
            tokens: Tensor = encoder(images)
        return tokens

    def encode_images(
        self, images: Tensor, seen: Tensor | None = None, for_matching: bool = False
    ) -> Images:
        seen = self.image_tokens(images) if seen is None else seen
        images_seen = Images(self.model.ln_vision(seen.float()), seen=seen)
        if for_matching:
            return images_seen
        states = self.model.Qformer.bert(
            query_embeds=self._queries(len(seen)),
            encoder_hidden_states=PairedImages(images_seen),
            return_dict=True,
        ).last_hidden_state
        return replace(images_seen, features=self._image_features(states))

    def encode_pairs(self, images: Tensor, captions: Captions) -> tuple[Images, Texts]:
        """Encode B images and their captions in one pass, which also predicts the captions."""
        encoded = self.encode_images(images, for_matching=True)
        ids, mask = tokenize(self.model, captions, None)
        begun = begin_with(ids, self.model.tokenizer.bos_token_id)
        queries, embeds, hidden = self._states(PairedImages(encoded), mask, ids, begun)
        losses = next_token_losses(hidden, begun, mask, self.model.Qformer.cls)
        found = replace(encoded, features=self._image_features(queries), predicted=losses)
        return found, Texts(ids, mask, features=self._text_features(embeds))

    def _image_features(self, states: Tensor) -> Tensor:
        """Return features ``(N, Q, E)`` of images whose queries have the states ``(N, Q, D)``."""
        return F.normalize(self.model.vision_proj(states).float(), dim=-1)

    def _text_tokens(self, tokens: Tokens) -> Tensor:
        states: Tensor = self.model.Qformer.bert(
            tokens.input_ids, attention_mask=tokens.attention_mask, return_dict=True
        ).last_hidden_state
        return states

    def similarity(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        """Return the similarity of each image, by its best query (BLIP-2 3.1)."""
        queries, count = image_features.shape[1], len(text_features)
        at_once = max(1, MAX_SIMILARITIES // max(1, queries * count))
        with torch.autocast(image_features.device.type, enabled=False):
            parts = [
                (part.flatten(0, 1) @ text_features.t()).view(-1, queries, count).max(1).values
                for part in torch.split(image_features, at_once)
            ]
        return torch.cat(parts)

    def grit_vectors(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        """Represent each image by the query most similar to its own text (MAFA G.7)."""
        assert images.features is not None and texts.features is not None
        queries, own = images.features.detach(), texts.features.detach()
        best = torch.einsum("bqe,be->bq", queries, own).argmax(dim=1)
        return queries[torch.arange(len(best), device=best.device), best], own

    def match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        """Return match logits, averaged over the queries (BLIP-2 3.1)."""
        queries = self._queries(len(image_of))
        fused = self.model.Qformer.bert(
            texts.ids[text_of],
            query_embeds=queries,
            attention_mask=torch.cat([all_visible(queries), texts.mask[text_of]], dim=1),
            encoder_hidden_states=PairedImages(images, image_of),
            return_dict=True,
        ).last_hidden_state
        logits: Tensor = self.model.itm_head(fused[:, : queries.shape[1]]).mean(dim=1)
        return logits

    def language_losses(
        self,
        images: Images,
        texts: Texts,
        image_of: Tensor,
        text_of: Tensor,
        teacher: Teacher | None = None,
    ) -> Tensor:
        """Compute LM losses; every token attends to the queries and to the tokens before it."""
        ids = begin_with(texts.ids[text_of], self.model.tokenizer.bos_token_id)
        mask = texts.mask[text_of]
        hidden = self._states(PairedImages(images, image_of), mask, ids)[-1]
        return next_token_losses(hidden, ids, mask, self.model.Qformer.cls)

    def _queries(self, size: int) -> Tensor:
        queries: Tensor = self.model.query_tokens.expand(size, -1, -1)
        return queries

    def _states(self, images: PairedImages, mask: Tensor, *captions: Tensor) -> tuple[Tensor, ...]:
        """Return the states of P images' queries ``(P, Q, D)`` and of captions, each ``(P, L, D)``.

        They are one sequence, in which each attends to itself only. The last caption is predicted:
        its tokens attend to the queries and to the tokens before them (BLIP-2 Figure 2).

        Args:
            mask: ``(P, L)`` of every caption, 0 for padding.
            captions: one or more forms ``(P, L)`` of the captions.
        """
        queries, length = self._queries(len(mask)), mask.shape[1]
        sizes = [queries.shape[1], *(length for _ in captions)]
        visible = torch.block_diag(*(mask.new_ones(size, size) for size in sizes))
        visible[-length:, -length:].tril_()
        visible[-length:, : sizes[0]] = 1
        tokens = F.pad(mask.repeat(1, len(captions)), (sizes[0], 0), value=1)
        states: Tensor = self.model.Qformer.bert(
            torch.cat(captions, dim=1),
            position_ids=torch.arange(length, device=mask.device).repeat(1, len(captions)),
            query_embeds=queries,
            attention_mask=visible * tokens[:, None],
            encoder_hidden_states=images,
            return_dict=True,
        ).last_hidden_state
        return states.split(sizes, dim=1)
