"""BLIP-2's stage 2 with Flan-T5: prefix language modelling of captions, answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from lavis.common.registry import registry
from lavis.models.blip2_models.blip2 import Blip2Base
from lavis.models.blip2_models.blip2_t5 import Blip2T5
from lavis.models.blip2_models.modeling_t5 import T5ForConditionalGeneration
from torch import Tensor, nn
from transformers import T5Config, T5TokenizerFast

from lavis_mafa.io.checkpoints import CONFIGS
from lavis_mafa.models.families.blip2.blip2_llm import Blip2Llm, check_prompt, load_language_part
from lavis_mafa.models.families.blip2.blip2_parts import Parts

IGNORED = -100


class CachedT5(T5ForConditionalGeneration):
    """LAVIS's T5 that keeps keys and values of earlier tokens with any supported transformers."""

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        return super().prepare_inputs_for_generation(input_ids, past=past_key_values, **kwargs)


@registry.register_model("blip2_t5_mafa")
class Blip2T5Mafa(Blip2Llm, Blip2T5):
    """BLIP-2 with Flan-T5 under this package's runner; state-dict names of LAVIS's ``blip2_t5``.

    Unlike it, it trains on captions alone and runs on a CPU. On a GPU T5 is in bf16, as in LAVIS:
    it overflows in fp16.

    Supported model types:
        - pretrain_flant5xl, pretrain_flant5xl_vitL, pretrain_flant5xxl: LAVIS's published weights
          of stage 2.
        - caption_coco_flant5xl: fine-tuned for captions, the same.
        - tiny: small parts from its config; ``model.t5_model`` must name a folder with a T5.

    Usage:
        >>> from lavis_mafa import load_model
        >>> model = load_model("blip2_t5_mafa", "pretrain_flant5xl")
    """

    PRETRAINED_MODEL_CONFIG_DICT = {
        name: str(CONFIGS / "models" / f"blip2_t5_mafa_{name}.yaml")
        for name in (
            "pretrain_flant5xl",
            "pretrain_flant5xl_vitL",
            "pretrain_flant5xxl",
            "caption_coco_flant5xl",
            "tiny",
        )
    }
    llm_key, llm_proj = "t5_model", "t5_proj"
    llm_options = ("apply_lemmatizer",)

    def __init__(
        self,
        parts: Parts | None = None,
        t5_model: str | None = "google/flan-t5-xl",
        prompt: str = "",
        max_txt_len: int = 32,
        apply_lemmatizer: bool = False,
        **eyes: Any,
    ) -> None:
        """
        Args:
            parts: where image encoder, Q-Former and its tokenizer come from.
            t5_model: a folder, or a name on the hub.
            prompt: what T5 reads before a caption, in fine-tuning and generation; empty: captions
                are split for prefix language modelling.
            max_txt_len: longest text read or written in training, in tokens.
            apply_lemmatizer: bring answers to their base form, which needs spaCy's model.
            eyes: as of `Blip2Llm.build_eyes`.

        Raises:
            OSError: if a part is nowhere to be had.
            ValueError: if ``t5_model`` is empty.
        """
        Blip2Base.__init__(self)  # LAVIS's own constructor downloads
        self.parts = parts or Parts()
        self.t5_tokenizer = load_language_part(
            T5TokenizerFast.from_pretrained, self.llm_key, t5_model
        )
        self.build_eyes(**eyes)
        config = load_language_part(T5Config.from_pretrained, self.llm_key, t5_model)
        config.dense_act_fn = "gelu"
        self.t5_model = load_language_part(
            CachedT5.from_pretrained, self.llm_key, t5_model, config=config
        )
        self.t5_model.to(torch.bfloat16).requires_grad_(False)
        self.t5_proj = nn.Linear(self.Qformer.config.hidden_size, self.t5_model.config.hidden_size)
        self.max_txt_len = max_txt_len
        self.prompt = prompt
        self._apply_lemmatizer = apply_lemmatizer
        self._lemmatizer = None
        self.train(self.training)

    def _tokens(self, texts: Sequence[str]) -> Any:
        tokens = self.t5_tokenizer(
            list(texts),
            padding="longest",
            truncation=True,
            max_length=self.max_txt_len,
            return_tensors="pt",
        )
        return tokens.to(self.device)

    def forward(self, samples: dict[str, Any]) -> dict[str, Tensor]:
        """Language modelling of a text after an image and another text (BLIP-2 3.2).

        Args:
            samples: ``image`` ``(B, 3, H, W)``, ``text_input`` and perhaps ``text_output``, B texts
                each: what T5 reads and writes. Without ``text_output`` the input is a caption: T5
                reads the model's prompt and writes the caption, or, if the model has no prompt,
                reads its first words and writes the others.

        Returns:
            ``loss``, per token.
        """
        seen, seen_mask = self.soft_prompts(samples["image"])
        if "text_output" in samples:
            read, written = samples["text_input"], samples["text_output"]
        else:
            read, written = self._read_and_write(samples["text_input"])
        source, target = self._tokens(read), self._tokens(written)
        embeds = self.t5_model.get_input_embeddings()(source.input_ids)
        with self.llm_autocast():
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
            # LAVIS's text processors may have put it there.
            without = [caption.removeprefix(self.prompt).strip() for caption in captions]
            return [self.prompt] * len(captions), without
        places = torch.rand(len(captions)).tolist()
        pairs = [split_caption(text, place) for text, place in zip(captions, places, strict=True)]
        return [prefix for prefix, _ in pairs], [suffix for _, suffix in pairs]

    # Tasks look at the signatures, which stay LAVIS's.

    @torch.no_grad()
    @wraps(Blip2T5.generate)
    def generate(self, samples: dict[str, Any], *args: Any, **options: Any) -> list[str]:
        self.settle_precision()
        return super().generate(samples, *args, **options)

    @torch.no_grad()
    @wraps(Blip2T5.predict_answers)
    def predict_answers(self, samples: dict[str, Any], *args: Any, **options: Any) -> list[str]:
        check_prompt(options.get("prompt", ""))
        self.settle_precision()
        return super().predict_answers(dict(samples), *args, **options)


def split_caption(caption: str, place: float) -> tuple[str, str]:
    """Prefix and suffix of a caption, of at least one word each.

    Every cut between words is as likely as the others if ``place`` is uniform in [0, 1). A caption
    of one word is all suffix.
    """
    words = caption.split()
    cut = 1 + int(place * (len(words) - 1)) if len(words) > 1 else 0
    return " ".join(words[:cut]), " ".join(words[cut:])
