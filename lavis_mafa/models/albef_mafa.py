"""ALBEF under the step of this package: ALBEF-base, GRIT-VLP or MAFA by its settings."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import torch
from lavis.common.registry import registry
from lavis.models.albef_models import AlbefBase
from lavis.models.med import BertForMaskedLM
from lavis.models.vit import VisionTransformerEncoder
from omegaconf import OmegaConf
from torch import nn
from transformers import BertConfig

from lavis_mafa.backbones import AlbefBackbone
from lavis_mafa.checkpoints import CONFIGS, find_config, load_state, read_checkpoint
from lavis_mafa.connections.build import build_discriminator
from lavis_mafa.connections.con_d import Discriminator
from lavis_mafa.evaluation.rerank import compute_sim_matrix
from lavis_mafa.models.tokenizers import BERT, build_tokenizer, from_hub
from lavis_mafa.step import StepOutput, StepSettings, run_step

TEMPERATURE_RANGE = (0.001, 0.5)


@registry.register_model("albef_mafa")
class AlbefMafa(AlbefBase):
    """ALBEF without momentum encoders, trained by `lavis_mafa.step.run_step`.

    Its state dict has the keys of LAVIS's ``albef_pretrain`` less the momentum encoders, so its
    checkpoints load into LAVIS's ALBEF models for downstream tasks.

    Supported model types:
        - base: ViT-B/16 and BERT with 6 text and 6 fusion layers, the settings of the paper.
        - tiny: built from its config alone, for small images and tests.

    Usage:
        >>> from lavis_mafa import load_model
        >>> model = load_model("albef_mafa", "tiny")
    """

    PRETRAINED_MODEL_CONFIG_DICT = {
        "base": str(CONFIGS / "models" / "albef_mafa_base.yaml"),
        "tiny": str(CONFIGS / "models" / "albef_mafa_tiny.yaml"),
    }

    def __init__(
        self,
        image_encoder: Any,
        text_encoder: Any,
        tokenizer: Any,
        embed_dim: int = 256,
        mlm_mask_prob: float = 0.5,
        temp: float = 0.07,
        max_txt_len: int = 25,
        settings: StepSettings | None = None,
        con_d: Discriminator | None = None,
    ) -> None:
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
        self.settings = settings or StepSettings()
        self.backbone = AlbefBackbone(self)
        # Frozen and not ours to train or save: a discriminator is no submodule.
        self.con_d = con_d

    def forward(self, samples: dict[str, Any]) -> StepOutput:
        """One step on a mini-batch; see `lavis_mafa.step.run_step` for its keys."""
        with torch.no_grad():
            self.temp.clamp_(*TEMPERATURE_RANGE)
        return run_step(self.backbone, samples, self.settings, self.con_d)

    @property
    def has_unused_parameters(self) -> bool:
        """Whether some weights get no gradient because their loss is switched off."""
        return any(not self.settings.loss_weights[name] for name in ("itc", "itm", "lm"))

    def compute_sim_matrix(self, data_loader: Any, task_cfg: Any) -> tuple[np.ndarray, np.ndarray]:
        """Retrieval scores; ``task_cfg.k_test`` candidates are re-ranked by ITM."""
        return compute_sim_matrix(self.backbone, data_loader, task_cfg.get("k_test", 128))

    def load_checkpoint(self, url_or_filename: str) -> Any:
        """Load the weights of a checkpoint of this family."""
        checkpoint = read_checkpoint(url_or_filename)
        return load_state(self, checkpoint.get("model", checkpoint), str(url_or_filename))

    def load_from_pretrained(self, url_or_filename: str, rename_text_keys: bool = False) -> Any:
        """As `load_checkpoint`; keys need no renaming here."""
        return self.load_checkpoint(url_or_filename)

    @classmethod
    def from_pretrained(cls, model_type: str) -> AlbefMafa:
        """Build a model type from its default config.

        Where its starting weights or tokenizer cannot be had (no network), the model is built
        without them, and a warning says so.
        """
        cfg = OmegaConf.load(cls.default_config_path(model_type)).model
        try:
            return cls.from_config(cfg)
        except OSError as error:
            logging.warning(
                "albef_mafa %s is built WITHOUT its starting weights: they are neither in the "
                "cache nor to be downloaded (%s). Its weights are random, and unless its tokenizer "
                "is in the cache captions are cut by a small built-in vocabulary. Load a "
                "checkpoint and give model.tokenizer before using it.",
                model_type,
                str(error).splitlines()[0],
            )
        cfg.load_pretrained = False
        try:
            return cls.from_config(cfg)
        except OSError:
            cfg.tokenizer = "tiny_vocab.txt"
            return cls.from_config(cfg)

    @classmethod
    def from_config(cls, cfg: Any = None) -> AlbefMafa:
        """Build from a ``model`` config.

        With ``load_pretrained`` and no ``pretrained`` path, training starts from DeiT and BERT as
        in the papers; with a path, from that checkpoint; with neither, from random weights.

        Raises:
            OSError: if weights or a tokenizer must be downloaded and cannot be.
        """
        start = bool(cfg.get("load_pretrained", True))
        checkpoint = cfg.get("pretrained") if start else None
        if cfg.get("load_finetuned", False):
            checkpoint = cfg.get("finetuned")
            if not checkpoint:
                raise ValueError("model.load_finetuned is True but model.finetuned names no file")
        from_parts = start and not checkpoint
        tokenizer = build_tokenizer(cfg.get("tokenizer"))
        mafa: Any = OmegaConf.to_container(OmegaConf.create(cfg.get("mafa") or {}), resolve=True)
        model = cls(
            image_encoder=_image_encoder(cfg, from_parts),
            text_encoder=_text_encoder(cfg, from_parts, tokenizer),
            tokenizer=tokenizer,
            embed_dim=cfg.get("embed_dim", 256),
            mlm_mask_prob=cfg.get("mlm_mask_prob", 0.5),
            temp=cfg.get("temp", 0.07),
            max_txt_len=cfg.get("max_txt_len", 25),
            settings=StepSettings.from_config(mafa),
            con_d=build_discriminator(mafa.get("con_d")),
        )
        if checkpoint:
            model.load_checkpoint(checkpoint)
        return model


def _image_encoder(cfg: Any, from_pretrained: bool) -> VisionTransformerEncoder:
    if "vit" not in cfg or cfg.vit is None:
        return VisionTransformerEncoder.from_config(cfg, from_pretrained=from_pretrained)
    sizes = cfg.vit
    encoder = VisionTransformerEncoder(
        img_size=cfg.image_size,
        patch_size=sizes.patch_size,
        embed_dim=sizes.width,
        depth=sizes.depth,
        num_heads=sizes.heads,
        norm_layer=partial(nn.LayerNorm, eps=float(cfg.get("vit_layer_norm_epsilon", 1e-6))),
    )
    encoder.vision_width = sizes.width
    # LAVIS draws weights with a deviation of 0.02, right for a width of 768: a narrow encoder would
    # barely tell its tokens apart.
    for weight in encoder.parameters():
        if weight.ndim == 2:
            nn.init.xavier_uniform_(weight)
    for embedding in (encoder.pos_embed, encoder.cls_token):
        nn.init.normal_(embedding, std=0.2)
    return encoder


def _text_encoder(cfg: Any, from_pretrained: bool, tokenizer: Any) -> BertForMaskedLM:
    config = BertConfig.from_json_file(find_config(cfg.get("med_config_path")))
    if from_pretrained:
        return from_hub(BertForMaskedLM.from_pretrained, BERT, config=config)
    config.vocab_size = max(config.vocab_size, len(tokenizer))
    return BertForMaskedLM(config=config)
