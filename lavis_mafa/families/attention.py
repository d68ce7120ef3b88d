"""Replace LAVIS's attention by PyTorch's fused kernels, which share an image's keys and values.

LAVIS computes attention in separate operations, and its cross-attention projects an image again for
each of its pairs. Only the computation changes; modules keep their weights and names.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from lavis.models import eva_vit, med, vit
from lavis.models.blip2_models import Qformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import TensorWeakRef

if TYPE_CHECKING:
    from lavis_mafa.algorithm.backbone import Images


# The first of several layers: what its joined weights were made of, and the weights.
_JOINED: WeakKeyDictionary[nn.Module, tuple[Any, TensorWeakRef]] = WeakKeyDictionary()
_HIDDEN = -10000.0  # LAVIS adds this to the attention score of padding


class PairedImages:
    """Stand-in for ``images.embeds[image_of]``, ``(P, S, D)``, as ``encoder_hidden_states`` of a
    model with fused attention.

    Keys and values are computed once per image and layer, and cached in ``images.memory`` for later
    calls: ITM and MLM of one step share them.

    Args:
        images: N encoded images.
        image_of: ``(P,)`` number of each pair's image; None: pair k has image k.
    """

    def __init__(self, images: Images, image_of: Tensor | None = None) -> None:
        self.embeds, self.memory, self.image_of = images.embeds, images.memory, image_of
        if image_of is not None and len(image_of) < len(self.embeds):
            # Of all ranks' images, a rank may need only a few.
            needed, self.image_of = torch.unique(image_of, return_inverse=True)
            self.embeds, self.memory = take(images.embeds, needed), {}

    def size(self) -> tuple[int, int, int]:
        """Return ``(P, S, D)``, as LAVIS's models call this method of tensors."""
        pairs = len(self.embeds if self.image_of is None else self.image_of)
        return pairs, self.embeds.shape[1], self.embeds.shape[2]

    def _of_pairs(self) -> Tensor:
        """Return the images of the pairs, ``(P, S, D)``."""
        return self.embeds if self.image_of is None else take(self.embeds, self.image_of)

    def _keys_and_values(self, attention: Any) -> Tensor:
        """Return keys and values of the N images, ``(N, S, 2 * heads * d)``."""
        # Cached by weights rather than by layer, because layers may share them (BLIP's encoder and
        # decoder), and by grad mode, because tensors without a graph cannot be trained on.
        weights = attention.key.weight, attention.value.weight
        mode = torch.is_grad_enabled(), _product_type(self.embeds)
        made_by = *map(id, weights), *mode
        if mode not in self.memory:  # autocast would cast them in every layer
            self.memory[mode] = self.embeds.to(mode[1])
        if made_by not in self.memory:
            # The weights are kept so that their ids are not reused.
            both = _project(self.memory[mode], attention.key, attention.value)
            self.memory[made_by] = both, weights
        both, _ = self.memory[made_by]
        return both


class _Recomputed:
    """The forward pass of a module, with activations recomputed in the backward pass.

    It replaces fairscale's checkpointing, which recomputes in fp16 whatever autocast's type was,
    keeps calling the module's former class, and uses the original's weights in copies of the
    module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **options: Any) -> Any:
        forward = type(self.module).forward
        return checkpoint(forward, self.module, *args, use_reentrant=False, **options)


class _FusedText:
    """Mixin for LAVIS's attention of BERT and the Q-Former."""

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
        """Compute attention with LAVIS's signature.

        Returns:
            The context ``(P, L, D)`` and the keys and values used, each ``(P, heads, S, d)``, or
            ``(N, heads, S, d)`` for `PairedImages`.
        """
        looked_at = encoder_hidden_states
        paired = isinstance(looked_at, PairedImages)
        if (
            output_attentions
            or head_mask is not None
            or _is_watched(self)
            or self.position_embedding_type != "absolute"
        ):
            plain: Any = super()
            return plain.forward(
                hidden_states,
                attention_mask,
                head_mask,
                looked_at._of_pairs() if paired else looked_at,
                encoder_attention_mask,
                past_key_value,
                output_attentions,
            )
        if paired:
            query = self.transpose_for_scores(self.query(hidden_states))
            both = looked_at._keys_and_values(self)
            context = _attend_to_images(self, query, both, looked_at.image_of)
            kept = _split(both, self.num_attention_heads, 2)
            return context.transpose(1, 2).flatten(2), kept
        mask = attention_mask
        if looked_at is None:
            query, key, value = _heads_of(self, hidden_states, self.query, self.key, self.value)
            if past_key_value is not None:
                key = torch.cat([past_key_value[0], key], dim=2)
                value = torch.cat([past_key_value[1], value], dim=2)
        else:
            query = self.transpose_for_scores(self.query(hidden_states))
            key, value = _heads_of(self, looked_at, self.key, self.value)
            mask = encoder_attention_mask
            if mask is not None:
                mask = mask.clamp(min=_HIDDEN)  # finite in every type
        context = _attend(self.dropout, query, key, value, mask)
        return context.transpose(1, 2).flatten(2), (key, value)


class _FusedBert(_FusedText, med.BertSelfAttention):
    """Fused attention of ALBEF's and BLIP's BERT."""


class _FusedQFormer(_FusedText, Qformer.BertSelfAttention):
    """Fused attention of BLIP-2's Q-Former."""


class _FusedVit(vit.Attention):
    """Fused attention of ALBEF's and BLIP's ViT."""

    def forward(self, x: Tensor, register_hook: bool = False) -> Any:
        if register_hook:
            return super().forward(x, register_hook)
        query, key, value = _split(self.qkv(x), self.num_heads)
        context = _attend(self.attn_drop, query, key, value, scale=self.scale)
        return self.proj_drop(self.proj(context.transpose(1, 2).flatten(2)))


class _FusedEva(eva_vit.Attention):
    """Fused attention of BLIP-2's EVA ViT."""

    def forward(self, x: Tensor, rel_pos_bias: Tensor | None = None) -> Any:
        if rel_pos_bias is not None or self.relative_position_bias_table is not None:
            return super().forward(x, rel_pos_bias)
        bias = None
        if self.q_bias is not None:
            bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
        query, key, value = _split(F.linear(x, self.qkv.weight, bias), self.num_heads)
        context = _attend(self.attn_drop, query, key, value, scale=self.scale)
        return self.proj_drop(self.proj(context.transpose(1, 2).flatten(2)))


FUSED = {
    med.BertSelfAttention: _FusedBert,
    Qformer.BertSelfAttention: _FusedQFormer,
    vit.Attention: _FusedVit,
    eva_vit.Attention: _FusedEva,
}


def fuse_attention(model: Any) -> None:
    """Switch LAVIS's attention modules in ``model`` to PyTorch's fused kernels, in place.

    Results are equal up to rounding; weights, names and hooks stay. CLIP's ViT uses PyTorch's own
    attention already. Activation checkpointing is replaced by PyTorch's too, see `_Recomputed`.
    """
    for module in model.modules():
        # By exact type, since a subclass may compute something else.
        fused = FUSED.get(type(module))
        if fused is not None:
            module.__class__ = fused
            if fused is _FusedEva and module.v_bias is not None:
                zeros = torch.zeros_like(module.v_bias)
                module.register_buffer("k_bias", zeros.detach(), persistent=False)
        wrapped = vars(module).get("forward")
        if isinstance(wrapped, partial) and wrapped.func.__module__.startswith("fairscale"):
            module.forward = _Recomputed(module)


def _is_watched(attention: Any) -> bool:
    """Return whether the caller needs attention weights, which fused kernels do not compute."""
    hooks = attention.dropout._forward_hooks or attention.dropout._forward_pre_hooks
    return bool(attention.save_attention or hooks)


def _fuse(layers: Sequence[Any], hidden: Tensor, added: Tensor, looked_at: PairedImages) -> Tensor:
    """Return all tokens ``(P, L, D)`` after fusion layers, see `_padding_scores`."""
    for layer in layers:
        hidden = layer(hidden, added, encoder_hidden_states=looked_at, mode="fusion")[0]
    return hidden


def tokens_after(
    layers: Sequence[Any], hidden: Tensor, mask: Tensor, looked_at: PairedImages, rows: Tensor
) -> Tensor:
    """Return some tokens ``(T, D)`` after the fusion layers of LAVIS's BERT.

    The last layer computes few others, which nobody reads.

    Args:
        layers, hidden, mask, looked_at: as of `first_token_after`.
        rows: ``(T,)`` numbers of the tokens among all ``P * L``.
    """
    *others, last = layers
    added = _padding_scores(mask, hidden)
    hidden = _fuse(others, hidden, added, looked_at)
    context = last.attention.self(hidden, added)[0]
    tokens = last.attention.output(_tokens(context, rows), _tokens(hidden, rows))
    queries = torch.zeros_like(hidden).flatten(0, 1).index_copy(0, rows, tokens.to(hidden.dtype))
    queries = queries.view_as(hidden)
    context = last.crossattention.self(queries, encoder_hidden_states=looked_at)[0]
    tokens = last.crossattention.output(_tokens(context, rows), tokens)
    chosen: Tensor = last.feed_forward_chunk(tokens)
    return chosen


def _tokens(hidden: Tensor, rows: Tensor) -> Tensor:
    return take(hidden.flatten(0, 1), rows)


def first_token_after(
    layers: Sequence[Any], hidden: Tensor, mask: Tensor, looked_at: PairedImages
) -> Tensor:
    """Return the first tokens ``(P, D)`` after the fusion layers of LAVIS's BERT, for ITM.

    In the last layer, only the first token is computed; the others serve as keys and values.

    Args:
        layers: LAVIS's ``BertLayer``, the last one with cross-attention.
        hidden: ``(P, L, D)``, input of the first layer.
        mask: ``(P, L)``, 0 for padding.
        looked_at: the images of the P pairs.
    """
    *others, last = layers
    added = _padding_scores(mask, hidden)
    if _is_watched(last.attention.self) or _is_watched(last.crossattention.self):
        return _fuse(layers, hidden, added, looked_at)[:, 0]
    hidden = _fuse(others, hidden, added, looked_at)
    first = last.attention(
        hidden[:, :1], encoder_hidden_states=hidden, encoder_attention_mask=added
    )[0]
    first = last.crossattention(first, encoder_hidden_states=looked_at)[0]
    fused: Tensor = last.feed_forward_chunk(first)
    return fused[:, 0]


def _padding_scores(mask: Tensor, hidden: Tensor) -> Tensor:
    """Return what is added to attention scores by a mask ``(P, L)``, 0 for padding."""
    return (1.0 - mask[:, None, None].to(hidden.dtype)) * _HIDDEN


def take(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return ``tensor[rows]``, with a deterministic backward pass."""
    # The backward pass of indexing adds in arbitrary order on a CPU with several threads;
    # index_select does so on a GPU.
    return tensor.index_select(0, rows) if tensor.device.type == "cpu" else tensor[rows]


def _project(source: Tensor, *layers: Any) -> Tensor:
    """Return the outputs of several linear layers on ``(B, S, D)``, concatenated."""
    # In training, use one product. Without gradients, copying the weights is not worth it, since
    # captions are generated token by token.
    plain = all(type(one) is nn.Linear and not one._forward_hooks for one in layers)
    if plain and torch.is_grad_enabled():
        return F.linear(source, *_joined(layers))
    return torch.cat([one(source) for one in layers], dim=-1)


def _joined(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    """Return weights and biases of linear layers, one below the other.

    All passes of a step share them: they live as long as the graph of one of them.
    """
    # Weights of another version belong to a step before; autocast would cast them in every pass.
    weights: list[Tensor] = [one.weight for one in layers]
    biases: list[Tensor] = [one.bias for one in layers]
    kind = _product_type(weights[0])
    made_of = kind, [one._version for one in weights + biases]
    known, kept = _JOINED.get(layers[0], (None, None))
    weight: Any = kept() if known == made_of and kept is not None else None
    if weight is None:
        weight = torch.cat(weights).to(kind)
        weight.with_bias = torch.cat(biases).to(kind)  # no graph needs it after the product
        _JOINED[layers[0]] = made_of, TensorWeakRef(weight)
    return weight, weight.with_bias


def _product_type(tensor: Tensor) -> torch.dtype:
    """Return the type in which a linear layer computes here."""
    device = tensor.device.type
    half = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if half else tensor.dtype


def _heads_of(attention: Any, source: Tensor, *layers: Any) -> Sequence[Tensor]:
    """Return the outputs of linear layers on ``(B, S, D)``, each ``(B, heads, S, d)``."""
    if torch.is_grad_enabled():
        return _split(_project(source, *layers), attention.num_attention_heads, len(layers))
    return [attention.transpose_for_scores(one(source)) for one in layers]


def _split(joined: Tensor, heads: int, parts: int = 3) -> tuple[Tensor, ...]:
    """Split ``(B, S, parts * heads * d)`` into parts ``(B, heads, S, d)``."""
    rows, length, width = joined.shape  # there may be no rows
    split = joined.view(rows, length, parts, heads, width // (parts * heads))
    # In this order the backward pass joins the gradients by one kernel, in the layout of `joined`.
    return tuple(part.transpose(1, 2) for part in torch.unbind(split, dim=2))


def _attend(
    dropout: nn.Dropout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    rate = dropout.p if dropout.training else 0.0
    mask = None if mask is None else mask.to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=rate, scale=scale)


def _attend_to_images(
    attention: Any, query: Tensor, both: Tensor, image_of: Tensor | None
) -> Tensor:
    """Return the context ``(P, heads, L, d)``; images have no padding, so there is no mask.

    Args:
        both: keys and values of the N images, ``(N, S, 2 * heads * d)``.
    """
    pairs, heads, length, _ = query.shape
    if image_of is None or len(both) != 1:
        of_pairs = both if image_of is None else take(both, image_of)
        key, value = _split(of_pairs, heads, 2)
        return _attend(attention.dropout, query, key, value)
    # If all pairs have the same image, their tokens are the queries of one sequence.
    together = query.transpose(0, 1).flatten(1, 2)[None]
    key, value = _split(both, heads, 2)
    context = _attend(attention.dropout, together, key, value)
    return context[0].view(heads, pairs, length, -1).transpose(0, 1)
