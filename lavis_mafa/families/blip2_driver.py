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
from lavis_mafa.algorithm.tokens import Tokens
from lavis_mafa.families.attention import PairedImages, take
from lavis_mafa.families.family import ModelDriver, all_visible, begin_with

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
        output = self._query(PairedImages(images_seen))
        features = F.normalize(self.model.vision_proj(output.last_hidden_state).float(), dim=-1)
        return replace(images_seen, features=features, cache=output.past_key_values)

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
        hidden = self.model.Qformer.bert(
            ids,
            attention_mask=torch.cat([all_visible(self._queries(len(ids))), mask], dim=1),
            past_key_values=self._states_of_queries(images, image_of),
            return_dict=True,
            is_decoder=True,
        ).last_hidden_state
        return next_token_losses(hidden, ids, mask, self.model.Qformer.cls)

    def _queries(self, size: int) -> Tensor:
        queries: Tensor = self.model.query_tokens.expand(size, -1, -1)
        return queries

    def _query(self, looked_at: PairedImages) -> Any:
        return self.model.Qformer.bert(
            query_embeds=self._queries(looked_at.size()[0]),
            encoder_hidden_states=looked_at,
            use_cache=True,
            return_dict=True,
        )

    def _states_of_queries(self, images: Images, image_of: Tensor) -> Any:
        """Return keys and values of the images' queries by layer, each ``(P, heads, Q, d)``.

        For this rank's images they were cached at encoding; for other ranks' images they are
        computed here.
        """
        count = 0 if images.cache is None else len(images.cache[0][0])
        if count == len(images.embeds):  # known without reading from the device
            return tuple(
                (take(key, image_of), take(value, image_of)) for key, value in images.cache
            )
        local = (image_of >= images.first) & (image_of < images.first + count)
        here = image_of[local] - images.first
        computed = self._query(PairedImages(images, image_of[~local])).past_key_values
        # `back` restores the order of the pairs.
        order = torch.cat([torch.nonzero(local).flatten(), torch.nonzero(~local).flatten()])
        back = torch.argsort(order)
        if not len(here):
            return computed
        return tuple(
            tuple(
                take(torch.cat([take(kept, here), new]), back)
                for kept, new in zip(layer, other, strict=True)
            )
            for layer, other in zip(images.cache, computed, strict=True)
        )
