"""ALBEF with two images for a text: every fusion layer doubled (ALBEF 4.2 and Figure 3b)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lavis.models.med import BertModel
from torch import Tensor, nn
from transformers import BertConfig
from transformers.modeling_outputs import ModelOutput

from lavis_mafa.backbones.base import all_visible, tokenize
from lavis_mafa.checkpoints import (
    check_origin,
    find_config,
    load_state,
    read_checkpoint,
    registered_name,
    require_whole,
)
from lavis_mafa.models.mafa_model import checkpoint_of
from lavis_mafa.models.tokenizers import build_tokenizer
from lavis_mafa.models.vit import build_vit

State = dict[str, Tensor]
LAYER = re.compile(r"(text_encoder\.encoder\.layer\.)(\d+)(\..*)")


@dataclass
class Judgement(ModelOutput):  # type: ignore[misc]
    """``loss`` (a scalar), ``logits`` ``(B, classes)`` and the ``labels`` ``(B,)`` they are for."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    labels: Tensor | None = None


class TwoImages:
    """Mixin before LAVIS's class, which has ``visual_encoder`` and ``text_encoder``.

    The text encoder is BERT whose fusion layers come in pairs: the first of a pair attends to the
    first image, the second to the second. Both begin with the same weights and always share the
    projections of keys and values.

    Attributes:
        trains_by_step: False: no step of this package, so no features, Con-D or ``model.mafa``.
        head: attribute of the classifier.
    """

    trains_by_step = False
    head: str

    def share_cross_attention(self, encoder: Any) -> None:
        """Let both layers of each pair in a BERT encoder have the same keys and values."""
        for first in range(encoder.config.fusion_layer, encoder.config.num_hidden_layers, 2):
            one, other = (encoder.layer[n].crossattention.self for n in (first, first + 1))
            for name in ("key", "value"):
                getattr(one, name).weight = getattr(other, name).weight
                getattr(one, name).bias = getattr(other, name).bias

    def fuse(
        self, captions: Sequence[str], first: Tensor, second: Tensor, text_encoder: Any = None
    ) -> Tensor:
        """State ``(B, D)`` of [CLS] for B captions with two images each.

        Args:
            first, second: encoded images ``(B, S, V)``.
            text_encoder: in the place of the model's own.
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
        return hidden[:, 0]

    @classmethod
    def from_config(cls, cfg: Any = None) -> Any:
        """Build from a ``model`` config.

        ``pretrained`` with ``load_pretrained``: a checkpoint of any ALBEF, for one image or two.
        ``finetuned`` with ``load_finetuned``: one of this very model. With neither, random weights.

        Raises:
            OSError: if a checkpoint or tokenizer must be downloaded and cannot be.
            ValueError: if no checkpoint is named, or it does not fit.
        """
        checkpoint = checkpoint_of(cfg)
        if not checkpoint and cfg.get("load_pretrained", True):
            raise ValueError(
                "model.pretrained names no checkpoint to begin with; name one of albef_mafa, or "
                "set model.load_pretrained: False to begin with random weights"
            )
        tokenizer: Any = build_tokenizer(cfg.get("tokenizer"))
        image_encoder = build_vit(cfg, from_pretrained=False)
        model = cls.of_parts(cfg, image_encoder, build_text_encoder(cfg, tokenizer), tokenizer)
        if checkpoint:
            model.load_checkpoint(checkpoint, whole=bool(cfg.get("load_finetuned", False)))
        return model

    @classmethod
    def of_parts(cls, cfg: Any, image_encoder: Any, text_encoder: Any, tokenizer: Any) -> Any:
        """The model of a config with these parts."""
        raise NotImplementedError

    def load_checkpoint(self, url_or_filename: str, whole: bool = True) -> Any:
        """Load the weights of a checkpoint of ALBEF.

        The fusion layers of one for single images are doubled. Position embeddings are brought to
        the model's image size.

        Args:
            whole: refuse a checkpoint without this model's classifier, which is new otherwise.

        Returns:
            What ``load_state_dict`` says of missing and unexpected keys.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the checkpoint does not fit, or lacks an encoder.
        """
        origin = str(url_or_filename)
        content = read_checkpoint(origin)
        model: Any = self
        check_origin(content, registered_name(type(self)), model.tokenizer, origin)
        state = for_two_images(content.get("model", content), model.text_encoder.config, origin)
        loaded = load_state(model, state, origin)
        parts = ("visual_encoder.", "text_encoder.", *([f"{self.head}."] if whole else []))
        name = registered_name(type(self))
        require_whole(
            model,
            loaded.missing_keys,
            parts,
            origin,
            f"{name} needs a checkpoint of ALBEF with both encoders as model.pretrained, and one "
            f"of {name} as model.finetuned",
        )
        return loaded

    def load_from_pretrained(self, url_or_filename: str) -> Any:
        """As `load_checkpoint`; the classifier may be new."""
        return self.load_checkpoint(url_or_filename, whole=False)


def for_two_images(state: State, config: BertConfig, origin: str) -> State:
    """Weights of an ALBEF for one image or two in the form for two.

    Momentum copies for one image are left out: those of the model begin as its encoders.

    Args:
        config: of the text encoder for two images.
        origin: where the weights come from, for the message.

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


def double_fusion_layers(state: State, fusion_layer: int) -> State:
    """Every layer of the text encoder from ``fusion_layer`` on twice, one after the other."""
    doubled: State = {}
    for key, value in state.items():
        match = LAYER.fullmatch(key)
        number = int(match[2]) if match else -1
        if match is None or number < fusion_layer:
            doubled[key] = value
            continue
        first = fusion_layer + 2 * (number - fusion_layer)
        for layer in (first, first + 1):
            doubled[f"{match[1]}{layer}{match[3]}"] = value
    return doubled


def build_text_encoder(cfg: Any, tokenizer: Any) -> nn.Module:
    """BERT with doubled fusion layers, of random weights, by the JSON that ``med_config_path`` of a
    ``model`` config names, which counts the layers for one image."""
    config: Any = BertConfig.from_json_file(find_config(cfg.get("med_config_path")))
    config.vocab_size = max(config.vocab_size, len(tokenizer))
    config.num_hidden_layers += config.num_hidden_layers - config.fusion_layer
    return BertModel(config=config, add_pooling_layer=False)
