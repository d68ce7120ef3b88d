"""The forms in which Hugging Face transformers can load a LAVIS model.

BLIP has two forms: ITC and ITM (``BlipForImageTextRetrieval``) and the decoder of captions
(``BlipForConditionalGeneration``). So has BLIP-2: stage 1 (Q-Former with ITC and ITM) becomes
``Blip2ForImageTextRetrieval``, stage 2 (with OPT or T5) ``Blip2ForConditionalGeneration``. No class
has a language head of stage 1 or a temperature, so both are omitted, and ITC logits are cosines.
"""

from __future__ import annotations

import copy
import tempfile
from functools import cached_property
from typing import Any, ClassVar

import torch
from lavis.models.eva_vit import VisionTransformer
from lavis.processors.blip_processors import BlipImageBaseProcessor

from lavis_mafa.checkpoints.checkpoints import RUN_STATE_KEYS
from lavis_mafa.checkpoints.hub_names import BLIP, BLIP2, HubNames, State
from lavis_mafa.compat.traits import image_size_of

# The class that transformers had last of those needed here.
_NEWEST = "Blip2ForImageTextRetrieval"


class HubForm:
    """One class of transformers, and how a LAVIS model is expressed as it.

    Attributes:
        to: value of ``--to``.
        family: of the LAVIS models that it takes.
        class_name: of transformers.
        names: of the weights.
        dropped: prefixes of LAVIS's weights that the class has no use for.
        in_float32: prefixes of LAVIS's weights that both libraries compute in float32, whatever the
            precision of the others.
        needs: attributes of a LAVIS model without which it has no such form.
        generation: the defaults of LAVIS's ``generate``; {} if it generates no texts.
    """

    to: ClassVar[str] = "hf"
    family: ClassVar[str]
    class_name: ClassVar[str]
    names: ClassVar[HubNames]
    dropped: ClassVar[tuple[str, ...]] = ()
    in_float32: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    generation: ClassVar[dict[str, Any]] = {}

    @classmethod
    def takes(cls, model: Any) -> bool:
        """Return whether a built model of the family has what the form needs."""
        return all(getattr(model, name, None) is not None for name in cls.needs)

    @classmethod
    def model_cls(cls) -> Any:
        """Return the class of transformers.

        Raises:
            ImportError: if transformers is too old to have it.
        """
        import transformers

        if not hasattr(transformers, _NEWEST):
            raise ImportError(
                f"transformers {transformers.__version__} has no {_NEWEST}: 4.46 or later is "
                "needed (run_scripts/requirements/modern.txt)"
            )
        return getattr(transformers, cls.class_name)

    def __init__(self, model: Any) -> None:
        """
        Args:
            model: the LAVIS model, its weights in float32.
        """
        self.model = model

    def state(self, dtype: torch.dtype) -> State:
        """Return the weights under Hugging Face's names.

        Raises:
            ValueError: if there is one that the class has no place for.
        """
        own = self.model.state_dict()
        state = {k: v if k.startswith(self.in_float32) else v.to(dtype) for k, v in own.items()}
        return self.names.state_to_hub(state, self.dropped)

    def config(self) -> Any:
        """Return the config of transformers."""
        raise NotImplementedError

    def processor(self) -> Any:
        """Return the processor of transformers: images and texts to inputs."""
        raise NotImplementedError

    def adapt(self, state: State, config: Any) -> None:
        """Change weights and config in place where they depend on each other."""

    def note(self) -> str:
        """Return what a user of the exported model has to know."""
        if not self.generation:
            return ""
        return (
            "equivalent of LAVIS's generate(): model.generate(**processor(images=..., "
            f"text={getattr(self.model, 'prompt', '')!r}), "
            "generation_config=model.generation_config)"
        )


def _image_processor(model: Any) -> Any:
    """Return the processor of LAVIS's ``blip_image_eval``."""
    from transformers import BlipImageProcessor

    size: Any = image_size_of(model)
    normalize = BlipImageBaseProcessor().normalize
    return BlipImageProcessor(
        size={"height": size, "width": size},
        image_mean=list(normalize.mean),
        image_std=list(normalize.std),
    )


def _vision_config(model: Any) -> dict[str, Any]:
    """Return the sizes of LAVIS's image encoder under the names of both BLIPs' configs."""
    vit = model.visual_encoder
    block = vit.blocks[0]
    return {
        "hidden_size": vit.embed_dim,
        "intermediate_size": block.mlp.fc1.out_features,
        "num_hidden_layers": len(vit.blocks),
        "num_attention_heads": block.attn.num_heads,
        "image_size": image_size_of(model),
        "patch_size": vit.patch_embed.patch_size[0],
        "hidden_act": "gelu",
        "layer_norm_eps": block.norm1.eps,
    }


def _bert_config(config: Any) -> dict[str, Any]:
    """Return what a config of LAVIS's BERT and one of Hugging Face's BLIPs have in common."""
    same = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "hidden_act",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "max_position_embeddings",
        "initializer_range",
        "layer_norm_eps",
        "pad_token_id",
    )
    return {key: getattr(config, key) for key in same}


def _tokenizer_of(model: Any, side: str = "right") -> Any:
    """Return the fast version of a model's tokenizer.

    Args:
        side: on which it pads.
    """
    from transformers import AutoTokenizer

    own = next(
        getattr(model, name)
        for name in ("opt_tokenizer", "t5_tokenizer", "tokenizer")
        if hasattr(model, name)
    )
    with tempfile.TemporaryDirectory() as folder:
        own.save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder, padding_side=side)


_MOMENTUM = tuple(
    f"{part}_m." for part in ("visual_encoder", "text_encoder", "vision_proj", "text_proj")
)
_MATCHING = ("text_encoder.", "vision_proj.", "text_proj.", "itm_head.")


class _BlipRetrieval(HubForm):
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
            **_bert_config(bert.config),
            "vocab_size": bert.embeddings.word_embeddings.num_embeddings,
            "is_decoder": True,  # it has cross-attention
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.sep_token_id,
            "sep_token_id": tokenizer.sep_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        projection = getattr(self.model, "vision_proj", None)
        sizes = {"image_text_hidden_size": projection.out_features} if projection else {}
        return BlipConfig(text_config=text, vision_config=_vision_config(self.model), **sizes)

    def processor(self) -> Any:
        from transformers import BlipProcessor

        return BlipProcessor(_image_processor(self.model), _tokenizer_of(self.model))

    def note(self) -> str:
        return (
            "for ITM, texts begin with [ENC] as in LAVIS: inputs['input_ids'][:, 0] = "
            "processor.tokenizer.convert_tokens_to_ids('[ENC]'); for ITC (use_itm_head=False) with "
            "[CLS], as the tokenizer writes them"
        )


class _BlipCaptioning(_BlipRetrieval):
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
        vision = {**_vision_config(model), "qkv_bias": vit.blocks[0].attn.q_bias is not None}
        query = _bert_config(qformer)
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


class _Blip2Retrieval(_Blip2Form):
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
            _image_processor(self.model), _tokenizer_of(self.model), num_query_tokens=0
        )


class _Blip2Generation(_Blip2Form):
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
        return _tokenizer_of(self.model, "left" if hasattr(self.model, "opt_model") else "right")

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
            _image_processor(self.model), self._tokenizer, num_query_tokens=queries
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


# The first that takes a model applies.
FORMS: tuple[type[HubForm], ...] = (
    _Blip2Generation,
    _Blip2Retrieval,
    _BlipRetrieval,
    _BlipCaptioning,
)
