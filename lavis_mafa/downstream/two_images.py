"""ALBEF with two images per text: every fusion layer is doubled (ALBEF 4.2 and Figure 3b)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from lavis.models.med import BertModel
from torch import Tensor
from transformers.models.bert.configuration_bert import BertConfig
from transformers.utils.generic import ModelOutput

from lavis_mafa.downstream.albef_downstream import AlbefDownstream
from lavis_mafa.models.families.albef.fusion_layers import LAYER, State, double_fusion_layers
from lavis_mafa.models.families.base import all_visible, tokenize


@dataclass
class Judgement(ModelOutput):
    """``loss`` (a scalar), ``logits`` ``(B, classes)`` and their ``labels`` ``(B,)``."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    labels: Tensor | None = None


class TwoImages(AlbefDownstream):
    """Mixin before a class of LAVIS that has ``visual_encoder`` and ``text_encoder``.

    The text encoder is a BERT whose fusion layers come in pairs: the first of a pair attends to the
    first image, the second to the second. Both start from the same weights, and they always share
    the projections of keys and values.
    """

    images_per_sample = 2

    def share_cross_attention(self, encoder: Any) -> None:
        """Let both layers of each pair of a BERT encoder share their projections of images."""
        for first in range(encoder.config.fusion_layer, encoder.config.num_hidden_layers, 2):
            one, other = (encoder.layer[n].crossattention.self for n in (first, first + 1))
            for name in ("key", "value"):
                getattr(one, name).weight = getattr(other, name).weight
                getattr(one, name).bias = getattr(other, name).bias

    def fuse(
        self, captions: Sequence[str], first: Tensor, second: Tensor, text_encoder: Any = None
    ) -> Tensor:
        """Return the state ``(B, D)`` of [CLS] for B captions with two images each.

        Args:
            first, second: encoded images ``(B, S, V)``.
            text_encoder: default: the model's own.
        """
        model: Any = self
        tokens = tokenize(model, captions, None)
        hidden = (text_encoder or model.text_encoder)(
            tokens.input_ids,
            attention_mask=tokens.attention_mask,
            encoder_hidden_states=[first, second],
            encoder_attention_mask=[all_visible(first), all_visible(second)],
            return_dict=True,
        ).last_hidden_state
        first_token: Tensor = hidden[:, 0]
        return first_token

    @classmethod
    def language_parts(cls, config: BertConfig) -> dict[str, Any]:
        """Build BERT with doubled fusion layers; ``config`` has the layers for one image."""
        double = deepcopy(config)
        double.num_hidden_layers += config.num_hidden_layers - config.fusion_layer
        return {"text_encoder": BertModel(config=double, add_pooling_layer=False)}

    def convert_pretrained(self, state: State, origin: str) -> State:
        """Double the fusion layers of a checkpoint for single images."""
        model: Any = self
        return for_two_images(state, model.text_encoder.config, origin)


def for_two_images(state: State, config: BertConfig, origin: str) -> State:
    """Convert the weights of an ALBEF for one image or two to those for two.

    Momentum copies for one image are dropped: the model's own start equal to its encoders.

    Args:
        config: of the text encoder for two images.
        origin: of the weights, for messages.

    Raises:
        ValueError: if the text encoder has another number of layers.
    """
    # Pre-training models keep BERT below ``text_encoder.bert.``.
    state = {str(key).replace("encoder.bert.", "encoder.", 1): state[key] for key in state}
    found = [LAYER.fullmatch(key) for key in state]
    layers = 1 + max((int(match[2]) for match in found if match), default=-1)
    double, fusion = config.num_hidden_layers, config.fusion_layer
    single = fusion + (double - fusion) // 2
    if layers not in (single, double):
        raise ValueError(
            f"{origin} has {layers} layers below text_encoder, expected {single}, of an ALBEF for "
            f"one image, or {double}, of one for two"
        )
    if layers == double:
        return state
    return double_fusion_layers({k: v for k, v in state.items() if "_m." not in k}, fusion)
