"""Write untrained language models of a few thousand weights, in folders as downloaded from a hub.

``lavis-mafa train --toy`` puts them in the place of OPT and Flan-T5.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

_WORDS = [
    "question: what color is the red circle? answer: blue",
    "a photo of a big green square left of a small yellow triangle",
    "how many circles are there? two three four five",
    "a cat and a dog sit on the grass while people walk past the house",
]


def tiny_opt(folder: Path, vocabulary: int = 600) -> Path:
    """Save an OPT of width 32 with a byte-level tokenizer; pad, </s>, line break as in
    Facebook's.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import OPTConfig
    from transformers.models.opt import OPTForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        _WORDS,
        vocab_size=vocabulary,
        min_frequency=1,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
    )
    tokenizer.save_model(str(folder))
    special_tokens = {
        "bos_token": "</s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
        "pad_token": "<pad>",
    }
    about = {**special_tokens, "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "special_tokens_map.json").write_text(json.dumps(special_tokens))
    config = OPTConfig(
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=128,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        dropout=0.1,
        init_std=0.3,
        bos_token_id=2,
        eos_token_id=2,
        pad_token_id=1,
    )
    torch.manual_seed(3)
    OPTForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_t5(folder: Path) -> Path:
    """Save a Flan-T5 of width 32 with a Unigram tokenizer; pad, </s>, <unk> as in Google's."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import Metaspace
    from tokenizers.processors import TemplateProcessing
    from transformers import (  # type: ignore[attr-defined]
        T5Config,
        T5ForConditionalGeneration,
        T5TokenizerFast,
    )

    folder.mkdir(parents=True, exist_ok=True)
    # Listed, not trained: the trainer of Unigram does not return the same pieces every time.
    words = sorted({f"▁{word}" for line in _WORDS for word in line.split()})
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz?:"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(word, -3.0) for word in words] + [(letter, -6.0) for letter in letters]
    tokenizer = Tokenizer(models.Unigram(pieces, 2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = Metaspace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0).save_pretrained(folder)
    config = T5Config(  # type: ignore[call-arg]
        vocab_size=tokenizer.get_vocab_size(),
        initializer_factor=1.0,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    )
    torch.manual_seed(3)
    model = T5ForConditionalGeneration(config)
    # Newer versions of transformers tie it, and initialise it with other numbers.
    model.lm_head.weight = torch.nn.Parameter(torch.randn(model.lm_head.weight.shape))
    model.save_pretrained(folder)
    return folder
