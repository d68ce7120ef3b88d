"""ALBEF trained by this package's step, whose settings make it ALBEF-base, GRIT-VLP or MAFA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from lavis.common.registry import registry
from lavis.models.albef_models import AlbefBase
from lavis.models.med import BertForMaskedLM
from torch import nn
from transformers.models.bert.configuration_bert import BertConfig

from lavis_mafa.checkpoints.downloads import BERT
from lavis_mafa.families.albef_driver import AlbefBackbone
from lavis_mafa.families.feature_encoder import FeatureOptions
from lavis_mafa.families.mafa_model import MafaModel, checkpoint_of, step_parts
from lavis_mafa.families.tokenizers import build_tokenizer, from_hub
from lavis_mafa.families.vit import build_vit
from lavis_mafa.io.project_files import find_config, model_yamls


@registry.register_model("albef_mafa")
class AlbefMafa(MafaModel, AlbefBase):
    """ALBEF trained by `run_step`, with momentum encoders only if its soft labels need them.

    Its state dict has the keys of LAVIS's ``albef_pretrain`` except the momentum encoders, so that
    its checkpoints load into LAVIS's ALBEF models for downstream tasks.

    Supported model types:
        - base: ViT-B/16 and BERT with 6 text and 6 fusion layers, the settings of the paper.
        - tiny: built from its config without files, for small images and tests.
        - small: also without files, for pictures of 96 pixels, with a convolutional stem.

    Usage:
        >>> from lavis_mafa import load_model
        >>> model = load_model("albef_mafa", "tiny")
    """

    family = "albef"
    model_options = FeatureOptions
    PRETRAINED_MODEL_CONFIG_DICT = model_yamls("albef_mafa", "base", "tiny", "small")

    def __init__(
        self,
        image_encoder: Any,
        text_encoder: Any,
        tokenizer: Any,
        embed_dim: int = 256,
        mlm_mask_prob: float = 0.5,
        temp: float = 0.07,
        max_txt_len: int = 25,
        **step: Any,
    ) -> None:
        """
        Args:
            step: see `MafaModel.attach_step`.
        """
        super().__init__()
        self.tokenizer = tokenizer
        self.visual_encoder = image_encoder
        self.text_encoder = text_encoder
        text_width = text_encoder.config.hidden_size
        self.vision_proj = nn.Linear(image_encoder.vision_width, embed_dim)
        self.text_proj = nn.Linear(text_width, embed_dim)
        self.itm_head = nn.Linear(text_width, 2)
        self.temp = nn.Parameter(temp * torch.ones([]))
        self.mlm_probability = mlm_mask_prob
        self.max_txt_len = max_txt_len
        self.attach_step(AlbefBackbone(self), **step)

    @classmethod
    def from_config(cls, cfg: Any = None) -> AlbefMafa:
        """Build from a ``model`` config.

        With ``load_pretrained`` and no ``pretrained`` path, training starts from DeiT and BERT as
        in the papers; with a path, from that checkpoint; with neither, from random weights.
        Momentum encoders start as copies of the encoders, or with ``momentum_start: initial`` as if
        there were no checkpoint.

        Raises:
            OSError: if weights or a tokenizer must be downloaded and cannot be.
        """
        checkpoint = checkpoint_of(cfg)
        initial = not checkpoint or cfg.get("momentum_start") == "initial"
        from_parts = bool(cfg.get("load_pretrained", True)) and initial
        tokenizer = build_tokenizer(cfg.get("tokenizer"))
        model = cls(
            image_encoder=build_vit(cfg, from_parts),
            text_encoder=_text_encoder(cfg, from_parts, tokenizer),
            tokenizer=tokenizer,
            embed_dim=cfg.get("embed_dim", 256),
            mlm_mask_prob=cfg.get("mlm_mask_prob", 0.5),
            temp=cfg.get("temp", 0.07),
            max_txt_len=cfg.get("max_txt_len", 25),
            **step_parts(cfg),
        )
        model.add_momentum(cfg)
        model.load_and_share(cfg)
        return model


def _require_fusion(cfg: Any) -> None:
    """Raise ValueError unless the text encoder's JSON config has fusion layers.

    Args:
        cfg: a ``model`` config.

    Raises:
        OSError, ValueError: also if the file cannot be read.
    """
    path = cfg.get("med_config_path")
    sizes = json.loads(Path(find_config(path)).read_text(encoding="utf-8"))
    first, layers = sizes.get("fusion_layer"), sizes.get("num_hidden_layers", 12)
    if not isinstance(first, int) or not 0 <= first < layers:
        given = f'"fusion_layer": {first!r}' if "fusion_layer" in sizes else 'no "fusion_layer"'
        raise ValueError(
            f"model.med_config_path: {path} has {given}; ALBEF needs the number of the first layer "
            f'that fuses text with the image, 0 to {layers - 1}, such as "fusion_layer": '
            f"{layers // 2}"
        )


def _text_encoder(cfg: Any, from_pretrained: bool, tokenizer: Any) -> BertForMaskedLM:
    _require_fusion(cfg)
    config = BertConfig.from_json_file(find_config(cfg.get("med_config_path")))
    if from_pretrained:
        return _published_bert(cast(BertConfig, config))
    config.vocab_size = max(config.vocab_size, len(tokenizer))
    return BertForMaskedLM(config=config)


def _published_bert(config: BertConfig) -> BertForMaskedLM:
    """Build BERT with its published weights, adding token type 0 to the position embeddings."""
    config.add_type_embeddings, config.type_vocab_size = True, 2
    encoder: BertForMaskedLM
    encoder, found = from_hub(
        BertForMaskedLM.from_pretrained, BERT, config=config, output_loading_info=True
    )
    embeddings = encoder.bert.embeddings
    if not any("token_type_embeddings" in str(key) for key in found["missing_keys"]):
        with torch.no_grad():
            types = embeddings.token_type_embeddings.weight
            embeddings.position_embeddings.weight += types[0]
    del embeddings.token_type_embeddings
    config.add_type_embeddings = False
    return encoder
