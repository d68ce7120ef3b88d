"""Grad-CAM on cross-attention: where in an image the ITM head finds a text (ALBEF 6.4, appendix A).

A map is the attention of a text's tokens to the image's patches, times the positive part of the
gradient of the match logit with respect to it, averaged over heads and over all tokens, with [CLS]
and [SEP].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lavis_mafa.algorithm.backbone import Backbone, evaluating

_ALBEF_PLACE = 2  # the third layer with cross-attention: layer 8 of 12 in ALBEF


def heat_maps(
    backbone: Backbone,
    images: Tensor,
    captions: Sequence[str],
    layer: int | None = None,
) -> Tensor:
    """Return Grad-CAM maps of B pairs, non-negative, on the grid of the image encoder's patches.

    A map depends only on its own pair. The model's gradients and modes are unchanged; nothing is
    random (dropout is off), and it works under ``torch.no_grad`` too.

    Args:
        backbone: of ALBEF or BLIP, whose texts attend to images in LAVIS's ``med.py``.
        images: ``(B, 3, H, W)``.
        captions: B texts.
        layer: index of one of BERT's layers; None: see `layer_of`.

    Returns:
        ``(B, h, w)`` float32.

    Raises:
        TypeError, ValueError: as `layer_of`.
    """
    model: Any = getattr(backbone, "model", None)
    chosen = layer_of(model, layer)
    bert = getattr(model.text_encoder, "bert", model.text_encoder)
    attention = bert.encoder.layer[chosen].crossattention.self
    # Evaluation may run in inference mode, whose tensors no gradient can pass.
    with torch.inference_mode(False), evaluating(model):
        with torch.no_grad():
            seen = backbone.encode_images(images, for_matching=True)
            texts = backbone.encode_texts(captions, for_matching=True)
            mask = texts.mask.clone()
        pairs = torch.arange(len(captions), device=images.device)
        with torch.enable_grad(), _recorded(attention) as recorded:
            logits = backbone.match(seen, texts, pairs, pairs)
        (weights,) = recorded
        (gradient,) = torch.autograd.grad(logits[:, 1].sum(), weights)
    with torch.no_grad():
        # (B, heads, L, S), of which the first of the S is the image's [CLS].
        maps = (weights * gradient.clamp(min=0))[..., 1:].float().mean(dim=1)
        maps = torch.einsum("bls,bl->bs", maps, mask.float()) / mask.sum(dim=1, keepdim=True)
        return maps.reshape(len(maps), *_grid(model, images))


def _cross_layers(model: Any) -> list[int]:
    """Return the layers of a LAVIS model's BERT that attend to images."""
    encoder = getattr(model, "text_encoder", None)
    encoder = getattr(getattr(encoder, "bert", encoder), "encoder", None)
    layers = getattr(encoder, "layer", ())
    return [number for number, layer in enumerate(layers) if hasattr(layer, "crossattention")]


def layer_of(model: Any, layer: int | None = None) -> int:
    """Return the layer of BERT whose cross-attention gives the maps.

    Args:
        layer: the user's choice; None: the third layer with cross-attention (ALBEF 6.4), layer 8 of
            ALBEF's 12, or the last one if there are fewer. LAVIS uses layer 7 for BLIP.

    Raises:
        TypeError: if no text layer attends to images (BLIP-2).
        ValueError: if this layer does not.
    """
    layers = _cross_layers(model)
    if not layers:
        raise TypeError(
            f"{type(model).__name__} has no layer in which texts attend to images, which Grad-CAM "
            "needs; use an ALBEF or BLIP model"
        )
    if layer is None:
        return layers[min(_ALBEF_PLACE, len(layers) - 1)]
    if layer not in layers:
        raise ValueError(
            f"layer {layer} of {type(model).__name__} does not attend to images; layers that do: "
            f"{', '.join(map(str, layers))}"
        )
    return layer


@contextmanager
def _recorded(attention: Any) -> Iterator[list[Tensor]]:
    """Record the attention weights ``(B, heads, L, S)`` of passes inside, as leaves of the graph.

    The graph starts at the weights, because nothing before them needs a gradient. They pass through
    the module's dropout, where a hook can replace them.
    """
    recorded: list[Tensor] = []

    def take(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaf = inputs[0].detach().requires_grad_(True)
        recorded.append(leaf)
        return (leaf, *inputs[1:])

    hook = attention.dropout.register_forward_pre_hook(take)
    try:
        yield recorded
    finally:
        hook.remove()


def _grid(model: Any, images: Tensor) -> tuple[int, int]:
    """Return the numbers of rows and columns of the image encoder's patches."""
    height, width = model.visual_encoder.patch_embed.patch_size
    return images.shape[-2] // height, images.shape[-1] // width
