"""Names of weights in LAVIS's models and in Hugging Face's, and their translation both ways."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, Tensor]
Pairs = tuple[tuple[str, str], ...]

_Q_BIAS, _V_BIAS, _QKV_BIAS = ".attn.q_bias", ".attn.v_bias", ".attn.qkv.bias"
_POSITION_IDS = "position_ids"  # a constant that some versions save
_VIT: Pairs = (
    ("visual_encoder.cls_token", "vision_model.embeddings.class_embedding"),
    ("visual_encoder.pos_embed", "vision_model.embeddings.position_embedding"),
    ("visual_encoder.patch_embed.proj.", "vision_model.embeddings.patch_embedding."),
    ("visual_encoder.blocks.", "vision_model.encoder.layers."),
)
_VIT_LAYER: Pairs = (
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
    (".attn.qkv.", ".self_attn.qkv."),
    (".attn.proj.", ".self_attn.projection."),
)


@dataclass(frozen=True)
class HubNames:
    """The names of one family.

    Attributes:
        prefixes: LAVIS's prefix and Hugging Face's; the first matching one applies.
        inside: for names with such a prefix of LAVIS, what else differs.
        title: of the family, for messages.
        splits_bias: the image encoder is EVA's, which keeps the biases of queries and values apart.
    """

    title: str
    prefixes: Pairs
    inside: dict[str, Pairs]
    splits_bias: bool = False

    def _to_hub(self, name: str) -> str | None:
        """Return Hugging Face's name of a LAVIS weight; None if it has none."""
        for start, changes in self.inside.items():
            if name.startswith(start):
                for old, new in changes:
                    name = name.replace(old, new)
        for prefix, new in self.prefixes:
            if name.startswith(prefix):
                return new + name.removeprefix(prefix)
        return None

    def _from_hub(self, name: str) -> str | None:
        """Return LAVIS's name of a weight of Hugging Face's model; None if it has none."""
        for new, prefix in self.prefixes:
            if not name.startswith(prefix):
                continue
            name = new + name.removeprefix(prefix)
            for start, changes in self.inside.items():
                if name.startswith(start):
                    for theirs, ours in changes:
                        name = name.replace(ours, theirs)
            return name
        return None

    def state_to_hub(self, state: State, dropped: tuple[str, ...] = ()) -> State:
        """Rename the weights of a LAVIS model.

        Args:
            dropped: prefixes of weights that are omitted.

        Raises:
            ValueError: if there is one that Hugging Face's model has no place for.
        """
        renamed: State = {}
        unknown = []
        for name, value in state.items():
            if name.startswith(dropped) or name.endswith((_V_BIAS, _POSITION_IDS)):
                continue
            if name.endswith(_Q_BIAS):
                # EVA's keys have no bias; Hugging Face keeps one vector for all three.
                v_bias = state[name.replace(_Q_BIAS, _V_BIAS)]
                value = torch.cat([value, torch.zeros_like(value), v_bias])
                name = name.replace(_Q_BIAS, _QKV_BIAS)
            new = self._to_hub(name)
            if new is None:
                unknown.append(name)
            else:
                renamed[new] = value
        if unknown:
            raise ValueError(
                f"Hugging Face's {self.title} cannot express {len(unknown)} weights, such as "
                f"{unknown[0]}"
            )
        return renamed

    def state_from_hub(self, state: State) -> State:
        """Rename the weights of a Hugging Face model; those that LAVIS has no name for are omitted.

        Raises:
            ValueError: if EVA's keys have a bias, for which LAVIS has no place.
        """
        renamed: State = {}
        for name, value in state.items():
            new = self._from_hub(name)
            if new is None or name.endswith(_POSITION_IDS):
                continue
            if not (self.splits_bias and new.endswith(_QKV_BIAS)):
                renamed[new] = value
                continue
            query, key, value_bias = value.chunk(3)
            if key.any():
                raise ValueError(f"{name} gives keys a bias, which LAVIS's image encoder lacks")
            renamed[new.replace(_QKV_BIAS, _Q_BIAS)] = query
            renamed[new.replace(_QKV_BIAS, _V_BIAS)] = value_bias
        return renamed


BLIP2 = HubNames(
    title="BLIP-2",
    prefixes=(
        *_VIT,
        ("ln_vision.", "vision_model.post_layernorm."),
        ("query_tokens", "query_tokens"),
        ("Qformer.bert.embeddings.LayerNorm.", "qformer.layernorm."),
        ("Qformer.bert.embeddings.", "embeddings."),
        ("Qformer.bert.", "qformer."),
        ("vision_proj.", "vision_projection."),
        ("text_proj.", "text_projection."),
        ("itm_head.", "itm_head."),
        ("opt_proj.", "language_projection."),
        ("t5_proj.", "language_projection."),
        ("opt_model.", "language_model."),
        ("t5_model.", "language_model."),
    ),
    inside={
        "visual_encoder.blocks.": _VIT_LAYER,
        "Qformer.bert.": (("attention.self.", "attention.attention."),),
    },
    splits_bias=True,
)
BLIP = HubNames(
    title="BLIP",
    prefixes=(
        *_VIT,
        ("visual_encoder.norm.", "vision_model.post_layernorm."),
        ("text_encoder.", "text_encoder."),
        ("text_decoder.", "text_decoder."),
        ("vision_proj.", "vision_proj."),
        ("text_proj.", "text_proj."),
        ("itm_head.", "itm_head."),
    ),
    inside={"visual_encoder.blocks.": _VIT_LAYER},
)
