"""What the models of BLIP-2's stage 2 share: a Q-Former before a frozen language model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lavis_mafa.io.checkpoints import check_origin, load_state, read_checkpoint
from lavis_mafa.models.families import Blip2Backbone
from lavis_mafa.models.families.attention import fuse_attention
from lavis_mafa.models.families.base import all_visible
from lavis_mafa.models.families.blip2.blip2_parts import PREFIX, Blip2Parts, Parts
from lavis_mafa.models.mafa_model import checkpoint_of, registered_name
from lavis_mafa.models.parts.prompts import problem_of_prompt
from lavis_mafa.models.parts.tokenizers import from_hub

# LAVIS's arguments that a config gives under the same name.
OPTIONS = (
    "vit_model",
    "drop_path_rate",
    "use_grad_checkpoint",
    "vit_precision",
    "freeze_vit",
    "num_query_token",
    "cross_attention_freq",
    "max_txt_len",
)


class Blip2Llm(Blip2Parts):
    """Mixin before LAVIS's stage-2 classes (BLIP-2 3.2).

    The language model, and the image encoder unless ``freeze_vit`` is off, are frozen: they take no
    gradient, are in no checkpoint of the runner, and stay in evaluation mode. LAVIS leaves the
    language model's dropout (0.1 in OPT and Flan-T5) on while it trains the Q-Former.

    Precision: language model and image encoder begin in the type that they were asked for; on a
    CPU both become fp32 at the first use.

    Attributes:
        trains_by_step: False: no step of this package, so no features, Con-D or ``model.mafa``.
        llm_key: config key and attribute of the language model.
        llm_proj: attribute of the layer between Q-Former and language model.
        llm_options: further arguments that a config gives under the same name.
    """

    stage = 2
    trains_by_step = False
    can_judge = False
    llm_key: str
    llm_proj: str
    llm_options: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, cfg: Any) -> Any:
        """Build from a ``model`` config.

        A checkpoint of stage 1 (``pretrained`` with ``load_pretrained``) begins stage 2; one of
        stage 2 may stand there too, or as ``finetuned`` with ``load_finetuned``. It brings the
        whole Q-Former, so that ``bert_weights`` are read only without one.

        Raises:
            OSError: if a part must be downloaded and cannot be.
            ValueError: if no language model is named, or the checkpoint does not fit.
        """
        checkpoint = checkpoint_of(cfg)
        parts = Parts.from_config(cfg)
        if checkpoint:
            parts = replace(parts, bert_weights=None)
        names = (*OPTIONS, *cls.llm_options, cls.llm_key)
        options = {name: cfg[name] for name in names if name in cfg}
        model_cls: Any = cls
        model = model_cls(
            parts,
            img_size=cfg.get("image_size", 224),
            prompt=cfg.get("prompt") or "",
            **options,
        )
        fuse_attention(model)
        if checkpoint:
            model.load_checkpoint(checkpoint, stage_2=bool(cfg.get("load_finetuned", False)))
        if cfg.get("freeze_vit", True) and PREFIX in model.random_parts:
            model.report_blindness(trained=bool(cfg.get("load_finetuned", False)))
        return model

    def build_eyes(
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
        """Set tokenizer, image encoder and Q-Former, the latter without its text side."""
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
    def language_model(self) -> Any:
        return getattr(self, self.llm_key)

    def train(self, mode: bool = True) -> Any:
        """Training or evaluation mode; frozen parts stay in evaluation mode."""
        super().train(mode)  # type: ignore[misc]
        for name in self.frozen:
            getattr(self, name).eval()
        return self

    def soft_prompts(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What the language model sees of images.

        In training ``run.amp`` decides on the image encoder's precision if that is in fp32; in
        evaluation on a GPU it runs under fp16, as LAVIS has it.

        Returns:
            Embeddings ``(B, Q, width)`` and their mask of ones ``(B, Q)``.
        """
        self.settle_precision()
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

    def llm_autocast(self) -> Any:
        """Autocast in the language model's own type; none if that is fp32."""
        dtype = self.language_model.dtype
        if dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.language_model.device.type, dtype)

    def settle_precision(self) -> None:
        """Bring half-precision parts to fp32 if they are on a CPU."""
        if self.language_model.device.type != "cpu":
            return
        for name in (self.llm_key, "visual_encoder"):
            part = getattr(self, name)
            if any(weight.dtype in (torch.float16, torch.bfloat16) for weight in part.parameters()):
                logging.info("%s: fp32 on a CPU", name)
                part.float()

    def load_checkpoint(self, url_or_filename: str, stage_2: bool = False) -> Any:
        """Load the weights of a checkpoint of stage 1 or 2.

        What only stage 1 needs (the Q-Former's text side, the heads of its losses) is passed over,
        as is a language model. The image encoder comes along if the file has it, and so does the
        projection; without one the projection stays as it is.

        Args:
            stage_2: refuse a checkpoint without projection.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: listing what is missing, if it is no such checkpoint or of other sizes.
        """
        origin = str(url_or_filename)
        content = read_checkpoint(origin)
        check_origin(content, registered_name(type(self)), None, origin)
        state = content.get("model", content)
        keys = [str(key) for key in state] if isinstance(state, dict) else []
        there = {key.partition(".")[0] for key in keys}
        optional = {"visual_encoder"} if stage_2 else {"visual_encoder", self.llm_proj}
        model: Any = self
        wanted: Any = nn.Module()
        wanted.query_tokens = self.query_tokens
        for name, child in model.named_children():
            if name != self.llm_key and (name in there or name not in optional):
                wanted.add_module(name, child)
        needed = [key for key in wanted.state_dict() if "position_ids" not in key]
        missing = sorted(set(needed).difference(keys))
        if missing:
            raise ValueError(
                f"{origin} is no checkpoint of BLIP-2's stage {'2' if stage_2 else '1 or 2'} that "
                f"{type(self).__name__} can begin with: it lacks {len(missing)} of {len(needed)} "
                f"weights:\n  "
                + "\n  ".join([*missing[:10], *["..."][: len(missing) > 10]])
                + self._stage_1_hint(stage_2 and missing)
            )
        result = load_state(wanted, state, origin)
        if self.llm_proj not in there:
            logging.info("%s is of stage 1: %s begins at random", origin, self.llm_proj)
        if "visual_encoder" in there:
            self.random_parts = ()
        return result

    def _stage_1_hint(self, missing: Any) -> str:
        if not missing or any(not name.startswith(f"{self.llm_proj}.") for name in missing):
            return ""
        return (
            "\nIt is of stage 1: stage 2 begins with it as model.pretrained with "
            "model.load_pretrained: True and model.load_finetuned: False"
        )

    def load_from_pretrained(self, url_or_filename: str) -> Any:
        """As `load_checkpoint`."""
        return self.load_checkpoint(url_or_filename)

    def report_blindness(self, trained: bool) -> None:
        """Say that the frozen image encoder is random and will stay so.

        Raises:
            ValueError: if the rest is trained: it has learnt to see through another one.
        """
        why = (
            "the frozen image encoder has RANDOM weights: neither model.vit_weights nor the "
            "checkpoint has any. Name as model.vit_weights 'published', or the checkpoint of "
            "stage 1 that trained it"
        )
        if trained:
            raise ValueError(why)
        logging.warning("%s", why)


def check_prompt(prompt: str) -> None:
    """Raises ValueError unless the prompt is empty or has one place for a question."""
    problem = problem_of_prompt(prompt) if prompt else None
    if problem:
        raise ValueError(f"prompt: {problem}")


def load_language_part(load: Callable[..., Any], key: str, name: str | None, **options: Any) -> Any:
    """A tokenizer or a language model from a folder, the cache or the hub.

    Args:
        load: a ``from_pretrained``.
        key: the config key that named it, for messages.

    Raises:
        ValueError: if ``name`` is empty.
        OSError: if it is nowhere to be had; the hub is not waited for.
    """
    expected = "expected a folder with config.json, weights and tokenizer, or a name on the hub"
    if not name:
        raise ValueError(f"model.{key} is empty; {expected}")
    folder = os.path.isdir(name)
    if not folder and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise OSError(f"model.{key}: no such folder: {name!r}; {expected}")
    try:
        return from_hub(load, name, **options)
    except (OSError, ValueError) as error:
        nowhere = "it is no folder here, not in the Hugging Face cache, and not to be downloaded"
        why = " ".join(str(error).split()) if folder else nowhere
        raise OSError(f"model.{key}: {name!r} cannot be loaded: {why}; {expected}") from error
