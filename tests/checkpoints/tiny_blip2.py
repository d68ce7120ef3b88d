"""Build LAVIS's BLIP-2 classes at test size, with tokenizers and language models."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from lavis.common.registry import registry
from lavis.models.blip2_models.blip2 import LayerNorm
from lavis.models.blip2_models.blip2_opt import Blip2OPT
from lavis.models.blip2_models.blip2_qformer import Blip2Qformer
from lavis.models.blip2_models.blip2_t5 import Blip2T5
from lavis.models.blip2_models.Qformer import BertConfig, BertLMHeadModel
from lavis.models.eva_vit import VisionTransformer
from torch import nn
from transformers import BertTokenizer

from lavis_mafa.downstream.tiny_language_models import OPT_SIZES, T5_SIZES

WORDS = "a the red blue green big small dog cat ball box on under left of and two three runs sits"
SENTENCES = [
    "a red ball on the big box",
    "two dogs and a cat run under the small blue box",
    "three green balls left of the dog\n",
    "the cat sits on a box and the dog runs",
]
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


@registry.register_model("tiny_blip2_opt")
class TinyBlip2Opt(Tiny, Blip2OPT):
    """Stage 2 with OPT at test size."""


@registry.register_model("tiny_blip2_t5")
class TinyBlip2T5(Tiny, Blip2T5):
    """Stage 2 with T5 at test size."""


def make_vocabulary(folder: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join(special + WORDS.split()))


def make_opt(folder: Path, spare_rows: int = 7) -> Path:
    """Write a tiny OPT and its tokenizer in the hub's folder layout."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Tokenizer, OPTConfig, OPTForCausalLM

    folder.mkdir()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(SENTENCES, vocab_size=320, special_tokens=special)
    trained.save_model(str(folder))
    tokenizer = GPT2Tokenizer(
        str(folder / "vocab.json"),
        str(folder / "merges.txt"),
        bos_token="</s>",
        eos_token="</s>",
        unk_token="</s>",
        pad_token="<pad>",
        add_bos_token=True,
    )
    tokenizer.save_pretrained(folder)
    config = OPTConfig(
        vocab_size=len(tokenizer) + spare_rows,
        max_position_embeddings=96,
        **OPT_SIZES,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
    )
    model = randomise(OPTForCausalLM(config), 0.4)
    with torch.no_grad():  # avoids repeating the last token, and ends some lines
        model.model.decoder.final_layer_norm.weight.normal_()
        model.model.decoder.embed_positions.weight.normal_()
        model.lm_head.weight[tokenizer("\n", add_special_tokens=False).input_ids[0]] *= -2
    model.save_pretrained(folder)
    return folder


def make_t5(folder: Path, spare_rows: int = 7) -> Path:
    """Write a tiny Flan-T5 and its tokenizer in the hub's folder layout."""
    import sentencepiece
    from tokenizers import pre_tokenizers
    from transformers import T5Config, T5ForConditionalGeneration, T5TokenizerFast

    folder.mkdir()
    (folder / "text.txt").write_text("\n".join(s.strip() for s in SENTENCES))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "spiece"),
        vocab_size=34,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    tokenizer = T5TokenizerFast.from_pretrained(folder, extra_ids=4)  # reads spiece.model
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )  # as in the tokenizers of T5 on the hub
    tokenizer.save_pretrained(folder)
    config = T5Config(vocab_size=len(tokenizer) + spare_rows, **T5_SIZES)
    model = randomise(T5ForConditionalGeneration(config), 0.3)
    # Newer versions share it with the input, which Flan-T5's file on the hub does not.
    model.lm_head.weight = nn.Parameter(torch.randn(config.vocab_size, 32) * 0.3)
    with torch.no_grad():
        model.lm_head.weight[config.eos_token_id] *= 2  # ends some texts
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "tie_word_embeddings": False}))
    return folder


def save_checkpoint(model: nn.Module, path: Path, **config) -> Path:
    """Save as runners do: trained weights only, with the config."""
    names = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, value in names if not value.requires_grad}
    state = {key: value for key, value in model.state_dict().items() if key not in frozen}
    torch.save({"model": state, "config": {"model": {"model_type": "tiny", **config}}}, path)
    return path
