"""BLIP-2's stage 2 with Flan-T5: prefix language modelling of captions, and answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from lavis.common.registry import registry
from lavis.models.blip2_models.blip2_t5 import Blip2T5
from lavis.models.blip2_models.modeling_t5 import T5ForConditionalGeneration
from torch import Tensor
from transformers import T5TokenizerFast  # type: ignore[attr-defined]
from transformers.models.t5.configuration_t5 import T5Config

from lavis_mafa.algorithm.losses.language import IGNORED
from lavis_mafa.downstream.language_model import Blip2Llm, check_prompt
from lavis_mafa.downstream.tiny_language_models import tiny_t5
from lavis_mafa.downstream.yamls import model_yamls


class _CachedT5(T5ForConditionalGeneration):
    """LAVIS's T5, made to reuse keys and values with every supported version of transformers."""

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        return super().prepare_inputs_for_generation(input_ids, past=past_key_values, **kwargs)


@registry.register_model("blip2_t5_mafa")
class Blip2T5Mafa(Blip2Llm, Blip2T5):
    """BLIP-2 with Flan-T5 under this package's runner; state-dict names of LAVIS's ``blip2_t5``.

    In addition it trains on captions without a second text, and runs on a CPU. On a GPU T5 is in
    bf16, as in LAVIS, because it overflows in fp16.

    Args:
        prompt: input of T5 before a caption, in fine-tuning and generation; empty: captions are
            split for prefix language modelling.
        max_txt_len: longest input or output text in training, in tokens.
        apply_lemmatizer: reduce answers to their base form, which needs spaCy's model.
        Others: as of `Blip2Llm`.

    Supported model types:
        - pretrain_flant5xl, pretrain_flant5xl_vitL, pretrain_flant5xxl: LAVIS's published weights
          of stage 2.
        - caption_coco_flant5xl: LAVIS's weights, fine-tuned for captions.
        - tiny: small parts from its config; ``model.t5_model`` must name a folder with a T5.

    Usage:
        >>> from lavis_mafa import load_model
        >>> model = load_model("blip2_t5_mafa", "pretrain_flant5xl")
    """

    PRETRAINED_MODEL_CONFIG_DICT = model_yamls(
        "blip2_t5_mafa",
        "pretrain_flant5xl",
        "pretrain_flant5xl_vitL",
        "pretrain_flant5xxl",
        "caption_coco_flant5xl",
        "tiny",
    )
    llm_key, llm_proj, llm_tokenizer = "t5_model", "t5_proj", "t5_tokenizer"
    write_tiny_llm = staticmethod(tiny_t5)
    llm_options = ("apply_lemmatizer",)

    def _language_loaders(self, apply_lemmatizer: bool = False) -> tuple[Any, Any]:
        self._apply_lemmatizer, self._lemmatizer = apply_lemmatizer, None  # read by LAVIS's class
        return T5TokenizerFast.from_pretrained, _load_t5

    def forward(self, samples: dict[str, Any]) -> dict[str, Tensor]:
        """Language modelling of a text after an image and another text (BLIP-2 3.2).

        Args:
            samples: ``image`` ``(B, 3, H, W)``, ``text_input`` and optionally ``text_output``, B
                texts each: T5's input and target. Without ``text_output`` ``text_input`` are
                captions: with a prompt the input is the prompt and the target the caption; without
                one the caption is split into both.

        Returns:
            ``loss``, per token.
        """
        seen, seen_mask = self._soft_prompts(samples["image"])
        if "text_output" in samples:
            read, written = samples["text_input"], samples["text_output"]
        else:
            read, written = self._read_and_write(samples["text_input"])
        cut = {"truncation": True, "max_length": self.max_txt_len}
        source, target = (self._encode(texts, **cut) for texts in (read, written))
        embeds = self.t5_model.get_input_embeddings()(source.input_ids)
        with self._llm_autocast():
            output = self.t5_model(
                inputs_embeds=torch.cat([seen, embeds], dim=1),
                attention_mask=torch.cat([seen_mask, source.attention_mask], dim=1),
                decoder_attention_mask=target.attention_mask,
                labels=target.input_ids.masked_fill(target.attention_mask == 0, IGNORED),
                return_dict=True,
            )
        return {"loss": output.loss}

    def _read_and_write(self, captions: Sequence[str]) -> tuple[list[str], list[str]]:
        if self.prompt:
            # LAVIS's text processors may have added it already.
            without = [caption.removeprefix(self.prompt).strip() for caption in captions]
            return [self.prompt for _ in captions], without
        places = torch.rand(len(captions)).tolist()
        pairs = [_split_caption(text, place) for text, place in zip(captions, places, strict=True)]
        return [prefix for prefix, _ in pairs], [suffix for _, suffix in pairs]

    # Tasks inspect the signatures, so these must stay LAVIS's.

    @torch.no_grad()
    @wraps(Blip2T5.generate)
    def generate(self, samples: dict[str, Any], *args: Any, **options: Any) -> list[str]:
        self._settle_precision()
        return list(super().generate(samples, *args, **options))

    @torch.no_grad()
    @wraps(Blip2T5.predict_answers)
    def predict_answers(self, samples: dict[str, Any], *args: Any, **options: Any) -> list[str]:
        check_prompt(options.get("prompt", ""))
        self._settle_precision()
        return list(super().predict_answers(dict(samples), *args, **options))


def _load_t5(name: str, **options: Any) -> _CachedT5:
    config = T5Config.from_pretrained(name, **options)
    config.dense_act_fn = "gelu"  # as in LAVIS
    model: _CachedT5 = _CachedT5.from_pretrained(name, config=config, **options).to(torch.bfloat16)
    return model


def _split_caption(caption: str, place: float) -> tuple[str, str]:
    """Split a caption into prefix and suffix, of at least one word each.

    All cuts between words are equally likely if ``place`` is uniform in [0, 1). A caption of one
    word is all suffix.
    """
    words = caption.split()
    cut = 1 + int(place * (len(words) - 1)) if len(words) > 1 else 0
    return " ".join(words[:cut]), " ".join(words[cut:])
