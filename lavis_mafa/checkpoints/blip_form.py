"""BLIP as Hugging Face's classes.

A BLIP has two forms: ITC and ITM (``BlipForImageTextRetrieval``) and the decoder of captions
(``BlipForConditionalGeneration``). Neither has a temperature, so ITC logits are plain cosines.
"""

from __future__ import annotations

from typing import Any, ClassVar

from lavis_mafa.checkpoints.checkpoints import RUN_STATE_KEYS
from lavis_mafa.checkpoints.hub_form import (
    HubForm,
    bert_config,
    image_processor,
    tokenizer_of,
    vision_config,
)
from lavis_mafa.checkpoints.hub_names import BLIP

_MOMENTUM = tuple(
    f"{part}_m." for part in ("visual_encoder", "text_encoder", "vision_proj", "text_proj")
)
_MATCHING = ("text_encoder.", "vision_proj.", "text_proj.", "itm_head.")


class BlipRetrieval(HubForm):
    """ITC and ITM. As in LAVIS, texts begin with [CLS] in ITC and with [ENC] in ITM."""

    family = "blip"
    names = BLIP
    class_name = "BlipForImageTextRetrieval"
    dropped = ("text_decoder.", "temp", *_MOMENTUM, *RUN_STATE_KEYS)
    needs: ClassVar[tuple[str, ...]] = ("itm_head", "vision_proj", "text_proj", "text_encoder")

    def _bert(self) -> Any:
        """Return LAVIS's BERT of the form."""
        return self.model.text_encoder

    def config(self) -> Any:
        """Return the config of a Hugging Face BLIP with the sizes of the LAVIS model."""
        from transformers import BlipConfig

        tokenizer, bert = self.model.tokenizer, self._bert()
        text = {
            **bert_config(bert.config),
            "vocab_size": bert.embeddings.word_embeddings.num_embeddings,
            "is_decoder": True,  # it has cross-attention
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.sep_token_id,
            "sep_token_id": tokenizer.sep_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        projection = getattr(self.model, "vision_proj", None)
        sizes = {"image_text_hidden_size": projection.out_features} if projection else {}
        return BlipConfig(text_config=text, vision_config=vision_config(self.model), **sizes)

    def processor(self) -> Any:
        from transformers import BlipProcessor

        return BlipProcessor(image_processor(self.model), tokenizer_of(self.model))

    def note(self) -> str:
        return (
            "for ITM, texts begin with [ENC] as in LAVIS: inputs['input_ids'][:, 0] = "
            "processor.tokenizer.convert_tokens_to_ids('[ENC]'); for ITC (use_itm_head=False) with "
            "[CLS], as the tokenizer writes them"
        )


class BlipCaptioning(BlipRetrieval):
    """The decoder of captions."""

    to = "hf_captioning"
    class_name = "BlipForConditionalGeneration"
    dropped = (*_MATCHING, "temp", *_MOMENTUM, *RUN_STATE_KEYS)
    needs = ("text_decoder",)
    # LAVIS's defaults of the generate() of `blip_caption`.
    generation = {"num_beams": 3, "max_length": 30, "min_length": 10, "do_sample": False}

    def _bert(self) -> Any:
        return self.model.text_decoder.bert

    def note(self) -> str:
        return HubForm.note(self)
