"""The base of BLIP-2's stage-2 models: a Q-Former in front of a frozen language model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lavis.models.blip2_models.blip2 import Blip2Base
from torch import Tensor, nn

from lavis_mafa.checkpoints.checkpoints import read_checkpoint
from lavis_mafa.checkpoints.weight_loading import (
    check_origin,
    load_state,
    registered_name,
    require_weights,
)
from lavis_mafa.families.attention import fuse_attention
from lavis_mafa.families.blip2_driver import Blip2Backbone
from lavis_mafa.families.blip2_parts import SIZES, Blip2Parts, Parts
from lavis_mafa.families.family import all_visible
from lavis_mafa.families.mafa_model import checkpoint_of
from lavis_mafa.families.tokenizers import from_hub


class Blip2Llm(Blip2Parts, Blip2Base):
    """Base before LAVIS's stage-2 classes (BLIP-2 3.2).

    The language model is frozen, and so is the image encoder unless ``freeze_vit`` is off: they get
    no gradient, are not saved in the runner's checkpoints, and stay in evaluation mode. (LAVIS
    leaves the language model's dropout, 0.1 in OPT and Flan-T5, on while it trains the Q-Former.)

    Precision: language model and image encoder are built in the configured type; on a CPU both are
    converted to fp32 at their first use.

    Attributes:
        trains_by_step: False: no step of this package, so no features, Con-D or ``model.mafa``.
        llm_key: config key and attribute of the language model.
        llm_proj: attribute of the layer between Q-Former and language model.
        llm_tokenizer: attribute of the language model's tokenizer.
        llm_options: further constructor arguments that a config gives under the same name.
        _language_loaders: a method of `llm_options` that returns the ``from_pretrained`` of
            tokenizer and language model.
        write_tiny_llm: writes an untrained language model into a folder, for a toy run.
    """

    stage = 2
    trains_by_step = False
    can_judge = False
    llm_key: str
    llm_proj: str
    llm_tokenizer: str
    llm_options: tuple[str, ...] = ()
    _language_loaders: Callable[..., tuple[Any, Any]]
    write_tiny_llm: Callable[[Path], Path]

    @classmethod
    def from_config(cls, cfg: Any) -> Any:
        """Build from a ``model`` config.

        Stage 2 starts from a checkpoint of stage 1 or 2 (``pretrained`` with ``load_pretrained``),
        or evaluates one of stage 2 (``finetuned`` with ``load_finetuned``). A checkpoint contains
        the whole Q-Former, so that ``bert_weights`` are loaded only without one.

        Raises:
            OSError: if a part must be downloaded and cannot be.
            ValueError: if no language model is configured, or the checkpoint does not fit.
        """
        checkpoint = checkpoint_of(cfg)
        parts = Parts.from_config(cfg)
        if checkpoint:
            parts = replace(parts, bert_weights=None)
        names = (*SIZES, *cls.llm_options, cls.llm_key)
        options = {name: cfg[name] for name in names if name in cfg}
        size = cfg.get("image_size", 224)
        model = cls(parts, img_size=size, prompt=cfg.get("prompt") or "", **options)
        fuse_attention(model)
        if checkpoint:
            model.load_checkpoint(checkpoint, stage_2=bool(cfg.get("load_finetuned", False)))
        model._report_random_encoder(cfg, trained=bool(cfg.get("load_finetuned", False)))
        return model

    def __init__(
        self, parts: Parts | None = None, prompt: str = "", max_txt_len: int = 32, **options: Any
    ) -> None:
        """Build and freeze all parts. LAVIS's constructors download every part.

        Args:
            parts: sources of image encoder, Q-Former and its tokenizer.
            prompt, max_txt_len: see the class.
            options: `llm_key`, the language model (a folder, or a name on the hub); `llm_options`;
                and arguments of `_build_vision`.

        Raises:
            OSError: if a part cannot be loaded.
            ValueError: if no language model is named.
        """
        Blip2Base.__init__(self)
        self.parts = parts or Parts()
        self.prompt, self.max_txt_len = prompt, max_txt_len
        name = options.pop(self.llm_key, None)
        own = {key: options.pop(key) for key in self.llm_options if key in options}
        load_tokenizer, load_llm = self._language_loaders(**own)
        setattr(self, self.llm_tokenizer, _load_language_part(load_tokenizer, self.llm_key, name))
        self._build_vision(**options)
        llm = _load_language_part(load_llm, self.llm_key, name).requires_grad_(False)
        setattr(self, self.llm_key, llm)
        width = self.Qformer.config.hidden_size
        setattr(self, self.llm_proj, nn.Linear(width, llm.config.hidden_size))
        self.train(self.training)

    def _build_vision(
        self,
        vit_model: str = "eva_clip_g",
        img_size: int = 224,
        drop_path_rate: float = 0,
        use_grad_checkpoint: bool = False,
        vit_precision: str = "fp16",
        freeze_vit: bool = True,
        num_query_token: int = 32,
        cross_attention_freq: int = 2,
    ) -> None:
        """Set tokenizer, image encoder and Q-Former, the latter without its text layers."""
        self.tokenizer = self.init_tokenizer()
        self.visual_encoder, self.ln_vision = self.init_vision_encoder(
            vit_model, img_size, drop_path_rate, use_grad_checkpoint, vit_precision
        )
        self.frozen = [self.llm_key]
        if freeze_vit:
            self.visual_encoder.requires_grad_(False)
            self.frozen.append("visual_encoder")
        width: Any = self.visual_encoder.num_features
        former: Any
        former, self.query_tokens = self.init_Qformer(num_query_token, width, cross_attention_freq)
        former.cls = None
        former.bert.embeddings.word_embeddings = None
        former.bert.embeddings.position_embeddings = None
        for layer in former.bert.encoder.layer:
            layer.output = layer.intermediate = None
        self.Qformer = former

    @property
    def _language_model(self) -> Any:
        return getattr(self, self.llm_key)

    def _encode(self, texts: Sequence[str], **options: Any) -> Any:
        """Return the language model's tokens of B texts, padded to the longest."""
        tokenizer, more = getattr(self, self.llm_tokenizer), {"return_tensors": "pt", **options}
        return tokenizer(list(texts), padding="longest", **more).to(self.device)

    def train(self, mode: bool = True) -> Any:
        """Training or evaluation mode; frozen parts stay in evaluation mode."""
        super().train(mode)
        for name in self.frozen:
            getattr(self, name).eval()
        return self

    def _soft_prompts(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return images as input embeddings of the language model.

        In training ``run.amp`` determines the precision of an image encoder in fp32; in evaluation
        on a GPU it runs under fp16, as in LAVIS.

        Returns:
            Embeddings ``(B, Q, width)`` and their mask of ones ``(B, Q)``.
        """
        self._settle_precision()
        model: Any = self
        with nullcontext() if torch.is_grad_enabled() else model.maybe_autocast():
            seen = Blip2Backbone(self).image_tokens(images)
        embeds = self.ln_vision(seen.float())
        queries = self.query_tokens.expand(len(embeds), -1, -1)
        hidden = self.Qformer.bert(
            query_embeds=queries,
            encoder_hidden_states=embeds,
            encoder_attention_mask=all_visible(embeds),
            return_dict=True,
        ).last_hidden_state
        prompts = getattr(self, self.llm_proj)(hidden)
        return prompts, all_visible(prompts)

    def _llm_autocast(self) -> Any:
        """Return autocast to the language model's own type; none if that is fp32."""
        dtype = self._language_model.dtype
        if dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self._language_model.device.type, dtype)

    def _settle_precision(self) -> None:
        """Convert half-precision parts to fp32 if they are on a CPU."""
        if self._language_model.device.type != "cpu":
            return
        for name in (self.llm_key, "visual_encoder"):
            part = getattr(self, name)
            if any(weight.dtype in (torch.float16, torch.bfloat16) for weight in part.parameters()):
                logging.info("%s: converted to fp32, because it is on a CPU", name)
                part.float()

    def load_checkpoint(self, url_or_filename: str, stage_2: bool = False) -> Any:
        """Load the weights of a checkpoint of stage 1 or 2.

        Parts that only stage 1 needs (the Q-Former's text layers, the heads of its losses) and a
        language model are skipped. Image encoder and projection are loaded if the file has them.

        Args:
            stage_2: refuse a checkpoint without projection.

        Raises:
            FileNotFoundError: if the file does not exist.
            ValueError: listing the missing weights, if it is no such checkpoint or of other sizes.
        """
        origin = str(url_or_filename)
        content = read_checkpoint(origin)
        check_origin(content, registered_name(type(self)), None, origin)
        state = content.get("model", content)
        keys = [str(key) for key in state] if isinstance(state, dict) else []
        in_file = {key.partition(".")[0] for key in keys}
        optional = {"visual_encoder"} if stage_2 else {"visual_encoder", self.llm_proj}
        model: Any = self
        wanted: Any = nn.Module()
        wanted.query_tokens = self.query_tokens
        for name, child in model.named_children():
            if name != self.llm_key and (name in in_file or name not in optional):
                wanted.add_module(name, child)
        result = load_state(wanted, state, origin)
        stage = "2" if stage_2 else "1 or 2"
        cure = f"Name a checkpoint of BLIP-2's stage {stage}"
        require_weights(wanted, result.missing_keys, ("",), origin, cure)
        if self.llm_proj not in in_file:
            logging.info("%s is of stage 1: %s starts from random weights", origin, self.llm_proj)
        if "visual_encoder" in in_file:
            self.random_parts = ()
        return result

    def load_from_pretrained(self, url_or_filename: str) -> Any:
        """As `load_checkpoint`."""
        return self.load_checkpoint(url_or_filename)


def check_prompt(prompt: str) -> None:
    """Raise ValueError unless the prompt is empty or has exactly one place for a question."""
    braces = prompt.count("{"), prompt.count("}")
    if prompt and (prompt.count("{}") != 1 or braces != (1, 1)):
        raise ValueError(
            f"prompt: {prompt!r} needs exactly one {{}}, where the question goes, and no other "
            "braces; expected such as 'Question: {} Answer:'"
        )


def _load_language_part(load: Callable[..., Any], key: str, name: str | None) -> Any:
    """Load a tokenizer or a language model from a folder, the cache or the hub.

    Args:
        load: a ``from_pretrained``.
        key: the config key of ``name``, for messages.

    Raises:
        ValueError: if ``name`` is empty.
        OSError: if it cannot be loaded; an unreachable hub is not retried.
    """
    expected = "expected a folder with config.json, weights and tokenizer, or a name on the hub"
    if not name:
        raise ValueError(f"model.{key} is empty; {expected}")
    folder = os.path.isdir(name)
    if not folder and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise OSError(f"model.{key}: no such folder: {name!r}; {expected}")
    try:
        return from_hub(load, name)
    except (OSError, ValueError) as error:
        why = str(error) if folder else "it is neither cached nor can it be downloaded"
        raise OSError(f"model.{key}: {name!r} cannot be loaded: {why}; {expected}") from error
    except UnpicklingError:
        why = "its weights are not only tensors; convert it to safetensors"
        raise OSError(f"model.{key}: {name!r} cannot be loaded: {why}") from None
