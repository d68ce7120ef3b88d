"""Attention by PyTorch's fused kernels, and keys and values of an image once for all its pairs.

LAVIS writes attention out, and its cross-attention projects an image anew for every pair that it is
in. Modules keep their weights and names here; only how they compute changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from lavis.models import eva_vit, med, vit
from lavis.models.blip2_models import Qformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from lavis_mafa.algorithm.backbone import Images


HIDDEN = -10000.0  # what LAVIS adds to the attention score of padding


class PairedImages:
    """Stands for ``images.embeds[image_of]``, ``(P, S, D)``, as ``encoder_hidden_states`` of a
    model whose attention is fused.

    Keys and values are made once for each of the N images and layer, and kept in ``images.memory``
    for later calls: ITM and MLM of one step share them.

    Args:
        images: N of them.
        image_of: ``(P,)`` image of each pair; None: every image is in one pair, in its place.
    """

    def __init__(self, images: Images, image_of: Tensor | None = None) -> None:
        self.embeds, self.memory, self.image_of = images.embeds, images.memory, image_of
        if image_of is not None and len(image_of) < len(self.embeds):
            # Of the images of all ranks a rank may need few.
            needed, self.image_of = torch.unique(image_of, return_inverse=True)
            self.embeds, self.memory = take(images.embeds, needed), {}

    def size(self) -> tuple[int, int, int]:
        """``(P, S, D)``, which is what LAVIS's models ask of a tensor in this place."""
        pairs = len(self.embeds if self.image_of is None else self.image_of)
        return pairs, self.embeds.shape[1], self.embeds.shape[2]

    def of_pairs(self) -> Tensor:
        """``(P, S, D)``."""
        return self.embeds if self.image_of is None else take(self.embeds, self.image_of)

    def keys_and_values(self, attention: Any) -> tuple[Tensor, Tensor]:
        """Of the N images, each ``(N, heads, S, d)``."""
        # Layers may share their weights (BLIP's encoder and decoder). What was made without a
        # graph cannot serve training.
        weights = attention.key.weight, attention.value.weight
        device = self.embeds.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        made_by = *map(id, weights), torch.is_grad_enabled(), cast
        if made_by not in self.memory:
            key, value = (
                attention.transpose_for_scores(project(self.embeds))
                for project in (attention.key, attention.value)
            )
            # With the weights, so that no others can get their ids.
            self.memory[made_by] = key, value, weights
        return self.memory[made_by][:2]


class Recomputed:
    """The forward pass of a module whose activations are made again in the backward pass.

    In the place of fairscale's, which recomputes in fp16 whatever autocast's type was, holds on to
    the class that the module had, and in a copy of the module computes with the weights of the
    original.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **options: Any) -> Any:
        forward = type(self.module).forward
        return checkpoint(forward, self.module, *args, use_reentrant=False, **options)


class _FusedText:
    """Mixin before LAVIS's attention of BERT and the Q-Former."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
    ) -> Any:
        """LAVIS's: from ``(P, L, D)`` to ``(P, L, D)`` and the keys and values it used, each
        ``(P, heads, S, d)``, or ``(N, heads, S, d)`` of `PairedImages`."""
        looked_at = encoder_hidden_states
        paired = isinstance(looked_at, PairedImages)
        if (
            output_attentions
            or head_mask is not None
            or is_watched(self)
            or self.position_embedding_type != "absolute"
        ):
            plain: Any = super()
            return plain.forward(
                hidden_states,
                attention_mask,
                head_mask,
                looked_at.of_pairs() if paired else looked_at,
                encoder_attention_mask,
                past_key_value,
                output_attentions,
            )
        query = self.transpose_for_scores(self.query(hidden_states))
        if paired:
            kept = key, value = looked_at.keys_and_values(self)
            context = _attend_to_images(self, query, key, value, looked_at.image_of)
        else:
            source = hidden_states if looked_at is None else looked_at
            key = self.transpose_for_scores(self.key(source))
            value = self.transpose_for_scores(self.value(source))
            if looked_at is None and past_key_value is not None:
                key = torch.cat([past_key_value[0], key], dim=2)
                value = torch.cat([past_key_value[1], value], dim=2)
            kept = key, value
            mask = attention_mask if looked_at is None else encoder_attention_mask
            context = _attend(self.dropout, query, key, value, mask)
        return context.transpose(1, 2).flatten(2), kept


class FusedBert(_FusedText, med.BertSelfAttention):
    """Attention of ALBEF's and BLIP's BERT."""


class FusedQFormer(_FusedText, Qformer.BertSelfAttention):
    """Attention of BLIP-2's Q-Former."""


class FusedVit(vit.Attention):
    """Attention of ALBEF's and BLIP's ViT."""

    def forward(self, x: Tensor, register_hook: bool = False) -> Tensor:
        if register_hook:
            return super().forward(x, register_hook)
        query, key, value = _split(self.qkv(x), self.num_heads)
        context = _attend(self.attn_drop, query, key, value, scale=self.scale)
        return self.proj_drop(self.proj(context.transpose(1, 2).flatten(2)))


class FusedEva(eva_vit.Attention):
    """Attention of BLIP-2's EVA ViT."""

    def forward(self, x: Tensor, rel_pos_bias: Tensor | None = None) -> Tensor:
        if rel_pos_bias is not None or self.relative_position_bias_table is not None:
            return super().forward(x, rel_pos_bias)
        bias = None
        if self.q_bias is not None:
            bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        query, key, value = _split(F.linear(x, self.qkv.weight, bias), self.num_heads)
        context = _attend(self.attn_drop, query, key, value, scale=self.scale)
        return self.proj_drop(self.proj(context.transpose(1, 2).flatten(2)))


FUSED = {
    med.BertSelfAttention: FusedBert,
    Qformer.BertSelfAttention: FusedQFormer,
    vit.Attention: FusedVit,
    eva_vit.Attention: FusedEva,
}


def fuse_attention(model: Any) -> None:
    """Let LAVIS's attention modules in ``model`` compute by PyTorch's fused kernels, in place.

    Results are equal up to rounding; weights, names and hooks stay. CLIP's ViT needs nothing: it
    has PyTorch's own attention. Activation checkpointing becomes PyTorch's as well, see
    `Recomputed`.
    """
    for module in model.modules():
        fused = FUSED.get(type(module))
        if fused is not None:
            module.__class__ = fused
        wrapped = vars(module).get("forward")
        if isinstance(wrapped, partial) and wrapped.func.__module__.startswith("fairscale"):
            module.forward = Recomputed(module)


def is_watched(attention: Any) -> bool:
    """Whether somebody wants the attention weights, which fused kernels never make."""
    hooks = attention.dropout._forward_hooks or attention.dropout._forward_pre_hooks
    return bool(attention.save_attention or hooks)


def first_token_after(
    layers: Sequence[Any], hidden: Tensor, mask: Tensor, looked_at: PairedImages
) -> Tensor:
    """What fusing layers of LAVIS's BERT make of the first tokens, ``(P, D)``, for ITM.

    Of the last layer nothing else is computed: there the other tokens are keys and values alone.

    Args:
        layers: LAVIS's ``BertLayer``, the last one with cross-attention.
        hidden: ``(P, L, D)``, what the first layer gets.
        mask: ``(P, L)``, 0 for padding.
        looked_at: the images of the P pairs.
    """
    added = (1.0 - mask[:, None, None].to(hidden.dtype)) * HIDDEN
    *others, last = layers
    for layer in others:
        hidden = layer(hidden, added, encoder_hidden_states=looked_at, mode="fusion")[0]
    if is_watched(last.attention.self) or is_watched(last.crossattention.self):
        return last(hidden, added, encoder_hidden_states=looked_at, mode="fusion")[0][:, 0]
    first = last.attention(
        hidden[:, :1], encoder_hidden_states=hidden, encoder_attention_mask=added
    )[0]
    first = last.crossattention(first, encoder_hidden_states=looked_at)[0]
    return last.feed_forward_chunk(first)[:, 0]


def take(tensor: Tensor, rows: Tensor) -> Tensor:
    """``tensor[rows]``, whose backward pass adds up in the same order every time."""
    # On a CPU indexing adds in any order with several threads; on a GPU index_select does.
    return tensor.index_select(0, rows) if tensor.device.type == "cpu" else tensor[rows]


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """``(B, S, 3 * heads * d)`` as three ``(B, heads, S, d)``."""
    return qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _attend(
    dropout: nn.Dropout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    rate = dropout.p if dropout.training else 0.0
    if mask is not None:
        mask = mask.clamp(min=HIDDEN).to(query.dtype)  # no type may make it infinite
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=rate, scale=scale)


def _attend_to_images(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, image_of: Tensor | None
) -> Tensor:
    """``(P, heads, L, d)``; nothing of an image is padding, so there is no mask."""
    if image_of is None:
        return _attend(attention.dropout, query, key, value)
    if len(key) != 1:
        return _attend(attention.dropout, query, take(key, image_of), take(value, image_of))
    # All pairs have one image: the tokens of all of them ask it together.
    pairs, _, length, _ = query.shape
    together = query.transpose(0, 1).flatten(1, 2)[None]
    context = _attend(attention.dropout, together, key, value)
    return context[0].unflatten(1, (pairs, length)).transpose(0, 1)
