"""BLIP, trained by this package's step."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from lavis.common.registry import registry
from lavis.models.blip_models import tie_encoder_decoder_weights
from lavis.models.blip_models.blip import BlipBase
from lavis.models.med import XBertEncoder, XBertLMHeadDecoder
from torch import nn
from transformers.models.bert.configuration_bert import BertConfig

from lavis_mafa.checkpoints.downloads import BERT
from lavis_mafa.families.beams import OneRowPerBeam
from lavis_mafa.families.blip_driver import BlipBackbone
from lavis_mafa.families.feature_encoder import FeatureOptions
from lavis_mafa.families.mafa_model import MafaModel, checkpoint_of, step_parts
from lavis_mafa.families.tokenizers import add_blip_tokens, build_tokenizer, from_hub
from lavis_mafa.families.vit import build_vit
from lavis_mafa.io.project_files import find_config, model_yamls


class _Decoder(OneRowPerBeam, XBertLMHeadDecoder):
    """LAVIS's text decoder."""


@registry.register_model("blip_mafa")
class BlipMafa(MafaModel, BlipBase):
    """BLIP, pre-trained (ITC, ITM, LM) by `lavis_mafa.algorithm.step.run_step`.

    Its state dict has the keys of LAVIS's ``blip_pretrain``; momentum encoders and queue exist only
    with ``mafa.soft_labels.type: momentum``. Its checkpoints load into LAVIS's BLIP models for
    downstream tasks.

    Supported model types:
        - base: ViT-B/16 and BERT-base.
        - large: ViT-L/16 and BERT-base.
        - tiny: built from its config without files, for small images and tests.

    Usage:
        >>> from lavis_mafa import load_model
        >>> model = load_model("blip_mafa", "tiny")
    """

    family = "blip"
    model_options = FeatureOptions
    PRETRAINED_MODEL_CONFIG_DICT = model_yamls("blip_mafa", "base", "large", "tiny")

    def __init__(
        self,
        image_encoder: Any,
        text_encoder: Any,
        text_decoder: Any,
        tokenizer: Any,
        embed_dim: int = 256,
        temp: float = 0.07,
        max_txt_len: int = 30,
        prompt: str = "",
        **step: Any,
    ) -> None:
        """
        Args:
            step: see `MafaModel.attach_step`.
        """
        super().__init__()
        self.tokenizer = tokenizer
        for part in (text_encoder, text_decoder):
            part.resize_token_embeddings(len(tokenizer))
        with contextlib.redirect_stdout(io.StringIO()):  # it prints every weight
            # Encoder and decoder share everything except self-attention (BLIP 3.2).
            tie_encoder_decoder_weights(text_encoder, text_decoder.bert, "", "/attention")
        self.visual_encoder = image_encoder
        self.text_encoder = text_encoder
        self.text_decoder = text_decoder
        text_width = text_encoder.config.hidden_size
        self.vision_proj = nn.Linear(image_encoder.vision_width, embed_dim)
        self.text_proj = nn.Linear(text_width, embed_dim)
        self.itm_head = nn.Linear(text_width, 2)
        self.temp = nn.Parameter(temp * torch.ones([]))
        self.max_txt_len = max_txt_len
        self.prompt = prompt
        self.attach_step(BlipBackbone(self), **step)

    @torch.no_grad()
    def generate(
        self,
        samples: dict[str, Any],
        use_nucleus_sampling: bool = False,
        num_beams: int = 3,
        max_length: int = 30,
        min_length: int = 10,
        top_p: float = 0.9,
    ) -> list[str]:
        """Generate captions of B images by the decoder, like LAVIS's ``blip_caption``."""
        embeds = self.backbone.image_tokens(samples["image"])
        prompt = samples.get("prompt", self.prompt)
        tokens = self.tokenizer([prompt for _ in embeds], return_tensors="pt").to(embeds.device)
        tokens.input_ids[:, 0] = self.tokenizer.bos_token_id
        tokens.input_ids = tokens.input_ids[:, :-1]  # without [SEP], which would end the caption
        generated = self.text_decoder.generate_from_encoder(
            tokenized_prompt=tokens,
            visual_embeds=embeds,
            sep_token_id=self.tokenizer.sep_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            use_nucleus_sampling=use_nucleus_sampling,
            num_beams=num_beams,
            max_length=max_length,
            min_length=min_length,
            top_p=top_p,
        )
        captions = self.tokenizer.batch_decode(generated, skip_special_tokens=True)
        return [caption[len(prompt) :] for caption in captions]

    @classmethod
    def from_config(cls, cfg: Any = None) -> BlipMafa:
        """Build from a ``model`` config.

        With ``load_pretrained`` and no ``pretrained`` path, training starts from ImageNet's ViT and
        BERT as in the paper; with a path, from that checkpoint; with neither, from random weights.

        Raises:
            OSError: if weights or a tokenizer must be downloaded and cannot be.
        """
        checkpoint = checkpoint_of(cfg)
        from_parts = bool(cfg.get("load_pretrained", True)) and not checkpoint
        tokenizer = add_blip_tokens(build_tokenizer(cfg.get("tokenizer")))
        model = cls(
            image_encoder=build_vit(cfg, from_parts),
            text_encoder=_bert(XBertEncoder, cfg, from_parts, tokenizer, add_pooling_layer=False),
            text_decoder=_bert(_Decoder, cfg, from_parts, tokenizer),
            tokenizer=tokenizer,
            embed_dim=cfg.get("embed_dim", 256),
            temp=cfg.get("temp", 0.07),
            max_txt_len=cfg.get("max_txt_len", 30),
            prompt=cfg.get("prompt") or "",
            **step_parts(cfg),
        )
        model.add_momentum(cfg)
        model.load_and_share(cfg)
        return model


def _bert(part: Any, cfg: Any, from_pretrained: bool, tokenizer: Any, **options: Any) -> Any:
    config = BertConfig.from_json_file(find_config(cfg.get("med_config_path")))
    if from_pretrained:
        # BERT's checkpoint has no [DEC] and [ENC]: the constructor adds their embeddings.
        config.vocab_size = min(config.vocab_size, 30522)
        return from_hub(part.from_pretrained, BERT, config=config, **options)
    config.vocab_size = len(tokenizer)
    return part(config=config, **options)
