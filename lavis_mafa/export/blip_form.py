"""BLIP as Hugging Face's classes.

A BLIP has two forms: ITC and ITM (``BlipForImageTextRetrieval``) and the decoder of captions
(``BlipForConditionalGeneration``). Neither has a temperature, so ITC logits are plain cosines.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.export.hub_form import (
    HubForm,
    Outputs,
    bert_config,
    tokenizer_of,
    vision_config,
)
from lavis_mafa.io.checkpoints import RUN_STATE_KEYS
from lavis_mafa.io.hub_names import BLIP

# LAVIS's defaults of the generate() of `blip_caption`.
GENERATION = {"num_beams": 3, "max_length": 30, "min_length": 10, "do_sample": False}
MOMENTUM = tuple(
    f"{part}_m." for part in ("visual_encoder", "text_encoder", "vision_proj", "text_proj")
)
MATCHING = ("text_encoder.", "vision_proj.", "text_proj.", "itm_head.")


class BlipForm(HubForm):
    """What both forms share."""

    family = "blip"
    names = BLIP
    text: str

    def bert(self) -> Any:
        """Return LAVIS's BERT of the form."""
        raise NotImplementedError

    def config(self) -> Any:
        """Return the config of a Hugging Face BLIP with the sizes of the LAVIS model."""
        from transformers import BlipConfig

        tokenizer, bert = self.model.tokenizer, self.bert()
        text = {
            **bert_config(bert.config),
            "vocab_size": self.words(),
            "is_decoder": True,  # it has cross-attention
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.sep_token_id,
            "sep_token_id": tokenizer.sep_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        projection = getattr(self.model, "vision_proj", None)
        sizes = {"image_text_hidden_size": projection.out_features} if projection else {}
        return BlipConfig(text_config=text, vision_config=vision_config(self.model), **sizes)

    def words(self) -> int:
        return int(self.bert().embeddings.word_embeddings.num_embeddings)

    def processor(self) -> Any:
        from transformers import BlipProcessor

        return BlipProcessor(self.image_processor(), tokenizer_of(self.model))

    def inputs(self, count: int, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        pixels, ids, mask = super().inputs(count, length, seed)
        mask[1::2, length // 2 :] = 0
        return pixels, ids, mask

    def image_tokens(self, pixels: Tensor) -> Tensor:
        """Return LAVIS's states of the image's patches."""
        states: Tensor = self.model.visual_encoder.forward_features(pixels)
        return states


class BlipRetrieval(BlipForm):
    """ITC and ITM. As in LAVIS, texts begin with [CLS] in ITC and with [ENC] in ITM."""

    class_name = "BlipForImageTextRetrieval"
    dropped = ("text_decoder.", "temp", *MOMENTUM, *RUN_STATE_KEYS)
    needs = ("itm_head", "vision_proj", "text_proj", "text_encoder")

    def bert(self) -> Any:
        return self.model.text_encoder

    def note(self) -> str:
        return (
            "for ITM, texts begin with [ENC] as in LAVIS: inputs['input_ids'][:, 0] = "
            "processor.tokenizer.convert_tokens_to_ids('[ENC]'); for ITC (use_itm_head=False) with "
            "[CLS], as the tokenizer writes them"
        )

    def begun(self, ids: Tensor) -> Tensor:
        """Return the texts of ITM."""
        ids = ids.clone()
        ids[:, 0] = self.model.tokenizer.convert_tokens_to_ids("[ENC]")
        return ids

    def ours(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Outputs:
        model: Any = self.model
        image = self.image_tokens(pixels)
        text = model.text_encoder(
            ids, attention_mask=mask, mode="text", return_dict=True
        ).last_hidden_state
        both = model.text_encoder(
            self.begun(ids),
            attention_mask=mask,
            encoder_hidden_states=image,
            encoder_attention_mask=torch.ones(image.shape[:2], dtype=torch.long),
            return_dict=True,
        ).last_hidden_state
        images = F.normalize(model.vision_proj(image[:, 0]), dim=-1)
        texts = F.normalize(model.text_proj(text[:, 0]), dim=-1)
        return {
            "image tokens": image,
            "ITC similarities": images @ texts.T,
            "ITM logits": model.itm_head(both[:, 0]),
        }

    def theirs(self, model: Any, pixels: Tensor, ids: Tensor, mask: Tensor) -> Outputs:
        itc = model(input_ids=ids, pixel_values=pixels, attention_mask=mask, use_itm_head=False)
        itm = model(input_ids=self.begun(ids), pixel_values=pixels, attention_mask=mask)
        return {
            "image tokens": itc.last_hidden_state,
            "ITC similarities": itc.itm_score,
            "ITM logits": itm.itm_score,
        }


class BlipCaptioning(BlipForm):
    """The decoder of captions."""

    to = "hf_captioning"
    class_name = "BlipForConditionalGeneration"
    dropped = (*MATCHING, "temp", *MOMENTUM, *RUN_STATE_KEYS)
    needs = ("text_decoder",)
    generates = True
    generation_defaults = GENERATION

    def bert(self) -> Any:
        return self.model.text_decoder.bert

    def note(self) -> str:
        prompt = getattr(self.model, "prompt", "")
        return (
            "equivalent of LAVIS's generate(): model.generate(**processor(images=..., "
            f"text={prompt!r}), generation_config=model.generation_config)"
        )

    def ours(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Outputs:
        image = self.image_tokens(pixels)
        output = self.model.text_decoder(
            ids,
            attention_mask=mask,
            encoder_hidden_states=image,
            encoder_attention_mask=torch.ones(image.shape[:2], dtype=torch.long),
            return_dict=True,
        )
        return {"image tokens": image, "logits": output.logits}

    def theirs(self, model: Any, pixels: Tensor, ids: Tensor, mask: Tensor) -> Outputs:
        output = model(pixel_values=pixels, input_ids=ids, attention_mask=mask)
        return {"image tokens": output.last_hidden_state, "logits": output.logits}
