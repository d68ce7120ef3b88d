"""A tiny vision-language model with its processor, saved in a folder: LLaVA with random weights."""

from __future__ import annotations

import torch

from lavis_mafa.judges.yes_no import _without_old_timm

SIDE, PATCH = 32, 16
WORDS = tuple(
    """
    <unk> <s> </s> <pad> <image> Yes No ASSISTANT : ? Answer a an the red blue
    green yellow small large circle square triangle left right above below of and
    Does caption image
    """.split()
)
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image> "
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %} ASSISTANT :{% endif %}"
)


def save_vlm(folder, words=WORDS, template=TEMPLATE, seed=0):
    """Save model and processor; return the folder as a string."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    backend = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            **sizes, num_attention_heads=2, image_size=SIDE, patch_size=PATCH, projection_dim=16
        ),
        text_config=LlamaConfig(
            **sizes,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=len(words),
            max_position_embeddings=256,
            pad_token_id=words.index("<pad>"),
        ),
        image_token_index=words.index("<image>"),
        vision_feature_layer=-1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with _without_old_timm():
            model = LlavaForConditionalGeneration(config)
        with torch.no_grad():  # the default range would give nearly equal answers
            for weight in model.parameters():
                weight.mul_(8.0) if weight.ndim > 1 else None
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)
