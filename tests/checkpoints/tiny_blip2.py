"""LAVIS's BLIP-2 of stage 1 at test size, with its tokenizer and checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from lavis.common.registry import registry
from lavis.models.blip2_models.blip2 import LayerNorm
from lavis.models.blip2_models.blip2_qformer import Blip2Qformer
from lavis.models.blip2_models.Qformer import BertConfig, BertLMHeadModel
from lavis.models.eva_vit import VisionTransformer
from torch import nn
from transformers import BertTokenizer

WORDS = "a the red blue green big small dog cat ball box on under left of and two three runs sits"
CONFIG = str(Path(__file__).with_name("tiny_blip2.yaml"))


def randomise(module: nn.Module, scale: float = 0.2) -> nn.Module:
    """Draw all parameters away from 0 and 1, so that a misplaced weight changes the output."""
    for value in module.parameters():
        nn.init.normal_(value, std=scale)
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            nn.init.normal_(part.weight, mean=1.0, std=scale)
    return module


class Tiny:
    """Replace what Blip2Base loads from the hub by files of ``folder``."""

    PRETRAINED_MODEL_CONFIG_DICT = {"tiny": CONFIG}
    folder: Path

    @classmethod
    def init_tokenizer(cls):
        tokenizer = BertTokenizer(str(cls.folder / "vocab.txt"))
        tokenizer.add_special_tokens({"bos_token": "[DEC]"})
        return tokenizer

    @classmethod
    def init_vision_encoder(cls, name, img_size, *others):
        encoder = VisionTransformer(
            img_size=img_size,
            patch_size=8,
            embed_dim=64,
            depth=2,
            num_heads=4,
            mlp_ratio=4.3637,
            qkv_bias=True,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
        )
        randomise(encoder)
        for size in (encoder.pos_embed, encoder.cls_token):
            # image position embeddings are as large in the released checkpoints
            nn.init.normal_(size, std=2.0)
        if (cls.folder / "vit.pth").exists():
            encoder.load_state_dict(torch.load(cls.folder / "vit.pth", weights_only=True))
        return encoder, randomise(LayerNorm(64))

    @classmethod
    def init_Qformer(cls, num_query_token, vision_width, cross_attention_freq=2):
        config = BertConfig(
            vocab_size=len((cls.folder / "vocab.txt").read_text().split()),
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=40,
        )
        config.encoder_width = vision_width
        config.add_cross_attention = True
        config.cross_attention_freq = cross_attention_freq
        config.query_length = num_query_token
        qformer = randomise(BertLMHeadModel(config))
        return qformer, nn.Parameter(torch.randn(1, num_query_token, 32))


@registry.register_model("tiny_blip2")
class TinyBlip2(Tiny, Blip2Qformer):
    """Stage 1 at test size."""


def make_vocabulary(folder: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join(special + WORDS.split()))


def make_checkpoint(folder: Path) -> Path:
    """Write ``stage1.pth`` as runners do, trained weights only with the config, and its files."""
    Tiny.folder = folder
    torch.manual_seed(0)
    make_vocabulary(folder)
    model = TinyBlip2(img_size=32, num_query_token=8)
    torch.save(model.visual_encoder.state_dict(), folder / "vit.pth")
    for part in (model.vision_proj, model.text_proj, model.itm_head):
        randomise(part)
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    state = {key: value for key, value in model.state_dict().items() if key not in frozen}
    config = {"model": {"model_type": "tiny", "arch": "tiny_blip2"}}
    torch.save({"model": state, "config": config}, folder / "stage1.pth")
    return folder / "stage1.pth"


def random_images(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
