"""BLIP-2 as Hugging Face's classes.

Stage 1 (Q-Former with ITC and ITM) becomes ``Blip2ForImageTextRetrieval``, stage 2 (with OPT or T5)
``Blip2ForConditionalGeneration``. These classes have neither a language head of stage 1 nor a
temperature, so both are omitted, and their ITC logits are plain cosines.
"""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from lavis.models.eva_vit import VisionTransformer

from lavis_mafa.checkpoints.hub_form import (
    HubForm,
    bert_config,
    image_processor,
    tokenizer_of,
    vision_config,
)
from lavis_mafa.checkpoints.hub_names import BLIP2, State


def _language_model(model: Any) -> Any:
    """Return OPT or T5 of stage 2; None for stage 1."""
    return getattr(model, "opt_model", None) or getattr(model, "t5_model", None)


class _Blip2Form(HubForm):
    """What both stages share."""

    family = "blip2"
    names = BLIP2
    in_float32 = ("query_tokens", "Qformer.")
    dropped = ("Qformer.cls.", "temp", "Qformer.bert.embeddings.position_ids")

    def config(self) -> Any:
        """Return the config of a Hugging Face BLIP-2 with the sizes of the LAVIS model.

        Raises:
            ValueError: if the image encoder is not EVA's.
        """
        from transformers import Blip2Config

        model: Any = self.model
        vit, qformer = model.visual_encoder, model.Qformer.bert.config
        if not isinstance(vit, VisionTransformer):
            raise ValueError(
                f"the image encoder {type(vit).__name__} cannot be exported: Hugging Face's BLIP-2 "
                "has EVA's only, and neither CLIP's first norm nor its QuickGELU"
            )
        vision = {**vision_config(model), "qkv_bias": vit.blocks[0].attn.q_bias is not None}
        query = bert_config(qformer)
        query["cross_attention_frequency"] = qformer.cross_attention_freq
        query["encoder_hidden_size"] = qformer.encoder_width
        return Blip2Config(
            vision_config=vision,
            qformer_config={**query, **self._query_settings()},
            num_query_tokens=model.query_tokens.shape[1],
            **self._settings(),
        )

    def _query_settings(self) -> dict[str, Any]:
        """Return what the stage adds to the config of the Q-Former."""
        return {}

    def _settings(self) -> dict[str, Any]:
        """Return what the stage adds to the config."""
        raise NotImplementedError


class Blip2Retrieval(_Blip2Form):
    """Stage 1. Other than LAVIS's ``blip_caption``, its tokenizer does not clean captions."""

    class_name = "Blip2ForImageTextRetrieval"
    needs = ("itm_head", "vision_proj", "text_proj")

    def _query_settings(self) -> dict[str, Any]:
        words = self.model.Qformer.bert.embeddings.word_embeddings.num_embeddings
        return {"vocab_size": words, "use_qformer_text_input": True}

    def _settings(self) -> dict[str, Any]:
        return {"image_text_hidden_size": self.model.vision_proj.out_features}

    def processor(self) -> Any:
        from transformers import Blip2Processor

        # Captions go to the Q-Former without placeholder tokens for the image.
        return Blip2Processor(
            image_processor(self.model), tokenizer_of(self.model), num_query_tokens=0
        )


class Blip2Generation(_Blip2Form):
    """Stage 2."""

    class_name = "Blip2ForConditionalGeneration"
    # LAVIS's defaults of Blip2OPT.generate and Blip2T5.generate.
    generation = {"num_beams": 5, "max_new_tokens": 30, "length_penalty": 1.0, "do_sample": False}

    @classmethod
    def takes(cls, model: Any) -> bool:
        return _language_model(model) is not None

    @cached_property
    def _tokenizer(self) -> Any:
        """The language model's tokenizer, to which `Blip2Processor` appends ``<image>``."""
        # A decoder continues after the last token, which must not be padding.
        return tokenizer_of(self.model, "left" if hasattr(self.model, "opt_model") else "right")

    def _settings(self) -> dict[str, Any]:
        model: Any = self.model
        config: dict[str, Any] = copy.deepcopy(_language_model(model).config).to_dict()
        for key in ("_name_or_path", "architectures", "torch_dtype", "transformers_version"):
            config.pop(key, None)
        # LAVIS's begin and end tokens of a text.
        if hasattr(model, "opt_model"):
            config["eos_token_id"] = model.eos_token_id  # it ends a text at the newline
        else:
            # The empty prompt: LAVIS's tokenizer encodes it as T5's end token.
            config["bos_token_id"] = config["eos_token_id"]
        return {"text_config": config, "image_token_index": len(self._tokenizer)}

    def processor(self) -> Any:
        from transformers import Blip2Processor

        queries = self.model.query_tokens.shape[1]
        return Blip2Processor(
            image_processor(self.model), self._tokenizer, num_query_tokens=queries
        )

    def adapt(self, state: State, config: Any) -> None:
        """Add a row for ``<image>`` to the language model if its vocabulary has no unused row.

        The new row is the mean of all rows, so its logit is the mean logit and never the highest.
        """
        rows = config.text_config.vocab_size
        if config.image_token_index < rows:
            return
        more = config.image_token_index + 1 - rows
        for key, value in state.items():
            if key.startswith("language_model.") and key.endswith(
                ("embed_tokens.weight", "shared.weight", "lm_head.weight")
            ):
                state[key] = torch.cat([value, value.mean(0, keepdim=True).expand(more, -1)])
        config.text_config.vocab_size = rows + more
