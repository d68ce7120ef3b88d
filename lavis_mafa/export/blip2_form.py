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
import torch.nn.functional as F
from lavis.models.eva_vit import VisionTransformer
from torch import Tensor

from lavis_mafa.export.hub_form import (
    HubForm,
    Outputs,
    bert_config,
    tokenizer_of,
    vision_config,
)
from lavis_mafa.export.source import language_model
from lavis_mafa.io.hub_names import BLIP2, State

# LAVIS's defaults of Blip2OPT.generate and Blip2T5.generate.
GENERATION = {"num_beams": 5, "max_new_tokens": 30, "length_penalty": 1.0, "do_sample": False}


class Blip2Form(HubForm):
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
                "has EVA's only"
            )
        vision = {**vision_config(model), "qkv_bias": vit.blocks[0].attn.q_bias is not None}
        query = bert_config(qformer)
        query["cross_attention_frequency"] = qformer.cross_attention_freq
        query["encoder_hidden_size"] = qformer.encoder_width
        return Blip2Config(
            vision_config=vision,
            qformer_config={**query, **self.query_settings()},
            num_query_tokens=model.query_tokens.shape[1],
            **self.settings(),
        )

    def query_settings(self) -> dict[str, Any]:
        """Return what the stage adds to the config of the Q-Former."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return what the stage adds to the config."""
        raise NotImplementedError

    def cause(self) -> str:
        return (
            f"LAVIS's ln_vision adds {self.model.ln_vision.eps:g} to the variance, Hugging Face "
            "what the other normalisations of the image encoder add, which shows where its outputs "
            "are tiny."
        )

    def query_states(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return LAVIS's image tokens, its queries' states and the mask of the former."""
        model: Any = self.model
        image = model.ln_vision(model.visual_encoder(pixels))
        attended = torch.ones(image.shape[:2], dtype=torch.long)
        output = model.Qformer.bert(
            query_embeds=model.query_tokens.expand(len(pixels), -1, -1),
            encoder_hidden_states=image,
            encoder_attention_mask=attended,
            return_dict=True,
        )
        return image, output.last_hidden_state, attended


class Blip2Retrieval(Blip2Form):
    """Stage 1. Other than LAVIS's ``blip_caption``, its tokenizer does not clean captions."""

    class_name = "Blip2ForImageTextRetrieval"
    needs = ("itm_head", "vision_proj", "text_proj")

    def query_settings(self) -> dict[str, Any]:
        return {"vocab_size": self.words(), "use_qformer_text_input": True}

    def settings(self) -> dict[str, Any]:
        return {"image_text_hidden_size": self.model.vision_proj.out_features}

    def words(self) -> int:
        return int(self.model.Qformer.bert.embeddings.word_embeddings.num_embeddings)

    def processor(self) -> Any:
        from transformers import Blip2Processor

        # Captions go to the Q-Former without placeholder tokens for the image.
        return Blip2Processor(self.image_processor(), tokenizer_of(self.model), num_query_tokens=0)

    def inputs(self, count: int, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        pixels, ids, mask = super().inputs(count, length, seed)
        mask[1::2, length // 2 :] = 0
        return pixels, ids, mask

    def ours(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Outputs:
        model: Any = self.model
        image, queries, attended = self.query_states(pixels)
        text = model.Qformer.bert(ids, attention_mask=mask, return_dict=True).last_hidden_state
        query_tokens = model.query_tokens.expand(len(pixels), -1, -1)
        ones = mask.new_ones(query_tokens.shape[:2])
        both = model.Qformer.bert(
            ids,
            query_embeds=query_tokens,
            attention_mask=torch.cat([ones, mask], 1),
            encoder_hidden_states=image,
            encoder_attention_mask=attended,
            return_dict=True,
        ).last_hidden_state
        return {
            "ITC image features": F.normalize(model.vision_proj(queries), dim=-1),
            "ITC text features": F.normalize(model.text_proj(text[:, 0]), dim=-1),
            "ITM logits": model.itm_head(both[:, : query_tokens.shape[1]]).mean(1),
        }

    def theirs(self, model: Any, pixels: Tensor, ids: Tensor, mask: Tensor) -> Outputs:
        itc = model(pixels, ids, mask)
        itm = model(pixels, ids, mask, use_image_text_matching_head=True)
        return {
            "ITC image features": itc.image_embeds,
            "ITC text features": itc.text_embeds,
            "ITM logits": itm.logits_per_image,
        }


class Blip2Generation(Blip2Form):
    """Stage 2."""

    class_name = "Blip2ForConditionalGeneration"
    generates = True
    generation_defaults = GENERATION

    @classmethod
    def takes(cls, model: Any) -> bool:
        return language_model(model) is not None

    @cached_property
    def tokenizer(self) -> Any:
        """The language model's tokenizer, to which `Blip2Processor` appends ``<image>``."""
        # A decoder continues after the last token, which must not be padding.
        return tokenizer_of(self.model, "left" if hasattr(self.model, "opt_model") else "right")

    @cached_property
    def image_token(self) -> int:
        """The id of ``<image>``; all below it are text."""
        return len(self.tokenizer)

    def words(self) -> int:
        return self.image_token

    def settings(self) -> dict[str, Any]:
        model: Any = self.model
        config: dict[str, Any] = copy.deepcopy(language_model(model).config).to_dict()
        for key in ("_name_or_path", "architectures", "torch_dtype", "transformers_version"):
            config.pop(key, None)
        # LAVIS's begin and end tokens of a text.
        if hasattr(model, "opt_model"):
            config["eos_token_id"] = model.eos_token_id  # it ends a text at the newline
        else:
            # The empty prompt: LAVIS's tokenizer encodes it as T5's end token.
            config["bos_token_id"] = config["eos_token_id"]
        return {"text_config": config, "image_token_index": self.image_token}

    def processor(self) -> Any:
        from transformers import Blip2Processor

        queries = self.model.query_tokens.shape[1]
        return Blip2Processor(self.image_processor(), self.tokenizer, num_query_tokens=queries)

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

    def note(self) -> str:
        return (
            "equivalent of LAVIS's generate(): model.generate(**processor(images=..., "
            f"text={self.model.prompt!r}), generation_config=model.generation_config)"
        )

    def ours(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Outputs:
        """Return the logits; T5 gets the tokens as input and as target."""
        model: Any = self.model
        _, queries, _ = self.query_states(pixels)
        attended = torch.cat([mask.new_ones(queries.shape[:2]), mask], 1)
        if hasattr(model, "opt_model"):
            inputs = model.opt_proj(queries)
            output = model.opt_model(ids, query_embeds=inputs, attention_mask=attended)
            return {"logits": output.logits[:, queries.shape[1] :]}
        inputs = torch.cat([model.t5_proj(queries), model.t5_model.encoder.embed_tokens(ids)], 1)
        output = model.t5_model(
            inputs_embeds=inputs, attention_mask=attended, decoder_input_ids=ids
        )
        return {"logits": output.logits}

    def theirs(self, model: Any, pixels: Tensor, ids: Tensor, mask: Tensor) -> Outputs:
        queries = model.config.num_query_tokens
        image = ids.new_full((len(ids), queries), model.config.image_token_index)
        inputs = torch.cat([image, ids], 1)
        attended = torch.cat([torch.ones_like(image), mask], 1)
        if model.config.use_decoder_only_language_model:
            output = model(pixels, inputs, attended).logits[:, queries:]
        else:
            output = model(pixels, inputs, attended, decoder_input_ids=ids).logits
        return {"logits": output}
