"""Build the parts of LAVIS's BLIP-2 models with published weights, weights from files, or random
ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lavis.models import clip_vit, eva_vit
from lavis.models.blip2_models.blip2 import LayerNorm
from lavis.models.blip2_models.Qformer import BertLMHeadModel
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import BertTokenizerFast  # type: ignore[attr-defined]
from transformers.models.bert.configuration_bert import BertConfig

from lavis_mafa.checkpoints.checkpoints import problem_of_state, problem_of_types, read_checkpoint
from lavis_mafa.checkpoints.downloads import is_timm_name, weights_on_hub
from lavis_mafa.checkpoints.weight_loading import resize_positions
from lavis_mafa.compat.traits import shipped_config
from lavis_mafa.families.beams import OneRowPerBeam
from lavis_mafa.families.blip2_driver import precision_of
from lavis_mafa.families.feature_encoder import Features, feature_width_of
from lavis_mafa.families.tokenizers import add_dec_token, build_tokenizer, from_hub
from lavis_mafa.families.vit import begin_narrow
from lavis_mafa.io.project_files import find_config

_PUBLISHED = "https://storage.googleapis.com/sfr-vision-language-research/LAVIS/models/BLIP2/"
_VIT_WEIGHTS = {
    "eva_clip_g": f"{_PUBLISHED}eva_vit_g.pth",
    "clip_L": f"{_PUBLISHED}clip_vit_L.pth",
}
PREFIX = "visual_encoder."
# As in LAVIS, whose function for this encoder downloads its weights.
_EVA_CLIP_G = {"patch_size": 14, "width": 1408, "depth": 39, "heads": 16, "mlp_ratio": 4.3637}

# Arguments of LAVIS's constructors that have the same name as their key of ``model``.
SIZES = (
    "vit_model",
    "drop_path_rate",
    "use_grad_checkpoint",
    "vit_precision",
    "freeze_vit",
    "num_query_token",
    "cross_attention_freq",
    "max_txt_len",
)


@dataclass(frozen=True)
class Parts:
    """Sources of the parts of a model.

    Attributes:
        tokenizer: a ``vocab.txt``, a folder or a name on the hub; None: BERT's.
        vit: sizes of an EVA ViT (``patch_size``, ``width``, ``depth``, ``heads``); None: the sizes
            of ``vit_model``.
        vit_weights: a checkpoint or URL of the image encoder, or of a model that contains one as
            ``visual_encoder``; ``timm/NAME``: weights of timm on the hub; ``published``: LAVIS's
            for ``vit_model``; None: random.
        bert_weights: a folder or a name on the hub that the Q-Former starts from; None: random.
        q_former_config: JSON of the Q-Former's sizes; None: BERT-base's.
        feature_width: width V of the features that replace the image encoder's output; None: there
            is an image encoder.
    """

    tokenizer: str | None = None
    vit: Any = None
    vit_weights: str | None = "published"
    bert_weights: str | None = "bert-base-uncased"
    q_former_config: str | None = None
    feature_width: int | None = None

    @classmethod
    def from_config(cls, cfg: Any) -> Parts:
        """Read a ``model`` config; missing keys keep their defaults."""
        names = ("tokenizer", "vit", "vit_weights", "bert_weights", "q_former_config")
        parts = cls(**{name: cfg[name] for name in names if name in cfg})
        width = feature_width_of(cfg)
        return replace(parts, feature_width=width, vit_weights=None) if width else parts

    def without(self, content: dict[str, Any]) -> Parts:
        """Return a copy that does not load weights which a checkpoint contains anyway."""
        state = content.get("model", content)
        parts = self
        if any(key.startswith(PREFIX) for key in state):
            parts = replace(parts, vit_weights=None)
        if "Qformer.bert.embeddings.word_embeddings.weight" in state:  # stage 2 does not contain it
            parts = replace(parts, bert_weights=None)
        return parts

    def _image_weights(self, vit_model: str) -> str | None:
        """Return ``vit_weights``, with ``published`` replaced by LAVIS's URL."""
        if self.vit_weights != "published":
            return self.vit_weights
        return _VIT_WEIGHTS[vit_model] if self.vit is None else None


class _QFormer(OneRowPerBeam, BertLMHeadModel):
    """LAVIS's Q-Former."""


class Blip2Parts:
    """Mixin for LAVIS's BLIP-2 classes that overrides the methods which build their parts.

    LAVIS's methods download every part. A class must set `parts` before it calls LAVIS's
    constructor.

    Attributes:
        random_parts: prefixes of weights that are random unless a checkpoint is loaded; frozen ones
            stay random.
    """

    family = "blip2"
    loads_with_our_loader = True
    parts: Parts

    def init_tokenizer(self) -> BertTokenizerFast:
        return add_dec_token(build_tokenizer(self.parts.tokenizer))

    def init_vision_encoder(
        self,
        model_name: str,
        img_size: int,
        drop_path_rate: float,
        use_grad_checkpoint: bool,
        precision: str,
    ) -> tuple[nn.Module, nn.Module]:
        if self.parts.feature_width:
            self.random_parts: tuple[str, ...] = ()
            return Features(self.parts.feature_width), LayerNorm(self.parts.feature_width)
        encoder = build_image_encoder(
            model_name, img_size, drop_path_rate, use_grad_checkpoint, self.parts.vit
        )
        weights = self.parts._image_weights(model_name)
        if weights:
            load_image_encoder(encoder, weights)
        self.random_parts = () if weights else (PREFIX,)
        if precision == "fp16" and not torch.cuda.is_available():
            logging.warning("model.vit_precision: no fp16 without a GPU, fp32 is used")
        elif precision == "fp16":
            eva_vit.convert_weights_to_fp16(encoder)
        return encoder, LayerNorm(encoder.num_features)

    def init_Qformer(  # noqa: N802  (LAVIS's name)
        self, num_query_token: int, vision_width: int, cross_attention_freq: int = 2
    ) -> tuple[nn.Module, nn.Parameter]:
        file = self.parts.q_former_config
        config = BertConfig.from_json_file(find_config(file)) if file else BertConfig()
        config.encoder_width = vision_width
        config.add_cross_attention = True
        config.cross_attention_freq = cross_attention_freq
        config.query_length = num_query_token
        if self.parts.bert_weights:
            former = from_hub(_QFormer.from_pretrained, self.parts.bert_weights, config=config)
        else:
            config.vocab_size = len(self.tokenizer)  # type: ignore[attr-defined]
            former = _QFormer(config)
        queries = torch.zeros(1, num_query_token, config.hidden_size)
        return former, nn.Parameter(queries.normal_(std=config.initializer_range))

    @classmethod
    def frozen_encoder(
        cls, model_type: str | None = None, device: str = "cpu", **changes: Any
    ) -> tuple[nn.Module, Callable[[Tensor], Tensor], int]:
        """Return the image encoder of a model type, a function that calls it, and its image size in
        pixels.

        Args:
            model_type: the model type; "": the first one.
            device: the device for the encoder.
            changes: changes to the type's ``model`` config, such as ``vit_weights`` and
                ``image_size``.

        Raises:
            ValueError: for an unknown type, and if the encoder's weights would be random.
        """
        kind: Any = cls
        types = list(kind.PRETRAINED_MODEL_CONFIG_DICT)
        if model_type and model_type not in types:
            raise ValueError(f"no type {model_type!r} of {cls.__name__}; known: {', '.join(types)}")
        shipped = shipped_config(cls, model_type).model
        cfg: Any = OmegaConf.merge(shipped, {"freeze_vit": True}, changes)
        builder, size = Blip2Parts(), int(cfg.get("image_size", 224))
        builder.parts = Parts.from_config(cfg)
        name, precision = cfg.get("vit_model", "eva_clip_g"), cfg.get("vit_precision", "fp16")
        encoder, _ = builder.init_vision_encoder(name, size, 0.0, False, precision)
        builder._report_random_encoder(cfg, trained=True)
        encoder.eval().to(device)

        def encode(images: Tensor) -> Tensor:
            images = images.to(device)
            with precision_of(encoder, images.device):
                tokens: Tensor = encoder(images)
            return tokens

        return encoder, encode, size

    def _report_random_encoder(self, cfg: Any, trained: bool = False) -> None:
        """Warn if the frozen image encoder has random weights.

        Raises:
            ValueError: instead of the warning if the rest of the model is trained, because it was
                trained with another image encoder.
        """
        if not cfg.get("freeze_vit", True) or PREFIX not in self.random_parts:
            return
        problem = (
            "the frozen image encoder has RANDOM weights: neither model.vit_weights nor the "
            "checkpoint has any. Set model.vit_weights to 'published', or to the checkpoint of "
            "stage 1 that trained it"
        )
        if trained:
            raise ValueError(problem)
        logging.warning("%s", problem)


def build_image_encoder(
    vit_model: str, image_size: int, drop_path_rate: float, use_grad_checkpoint: bool, sizes: Any
) -> Any:
    """Build BLIP-2's image encoder with random weights: EVA ViT-g, CLIP's ViT-L, or a small EVA
    ViT.

    Raises:
        ValueError: for an unknown ``vit_model``, or a stem other than ``patch``.
    """
    if sizes is not None and sizes.get("stem", "patch") != "patch":
        raise ValueError("model.vit.stem: BLIP-2 has no convolutional stem; use patch")
    if sizes is None and vit_model == "clip_L":
        return clip_vit.VisionTransformer(
            input_resolution=image_size,
            patch_size=14,
            width=1024,
            layers=22,
            heads=16,
            use_grad_checkpointing=use_grad_checkpoint,
        )
    if sizes is None and vit_model not in _VIT_WEIGHTS:
        raise ValueError(f"model.vit_model is {vit_model!r}; known: {', '.join(_VIT_WEIGHTS)}")
    eva = _EVA_CLIP_G if sizes is None else sizes
    encoder = eva_vit.VisionTransformer(
        img_size=image_size,
        patch_size=eva["patch_size"],
        embed_dim=eva["width"],
        depth=eva["depth"],
        num_heads=eva["heads"],
        mlp_ratio=eva.get("mlp_ratio", 4.0),
        qkv_bias=True,
        drop_path_rate=drop_path_rate,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
        use_checkpoint=use_grad_checkpoint,
    )
    if sizes is not None:
        begin_narrow(encoder)
    return encoder


def load_image_encoder(encoder: nn.Module, url_or_filename: str) -> None:
    """Load an image encoder's weights, with position embeddings resized to its image size.

    Args:
        url_or_filename: a URL, a file, or the name of a timm model, such as
            ``timm/vit_base_patch16_384.augreg_in21k_ft_in1k``.

    Raises:
        FileNotFoundError, OSError: if they cannot be loaded.
        ValueError: if they lack some of the encoder's weights.
    """
    path = url_or_filename
    if is_timm_name(path):
        path = weights_on_hub(path, "model.vit_weights")
    state = read_checkpoint(path)
    state = state.get("model", state)
    if problem := problem_of_state(state, url_or_filename):
        raise ValueError(problem)
    if any(key.startswith(PREFIX) for key in state):
        state = {key[len(PREFIX) :]: v for key, v in state.items() if key.startswith(PREFIX)}
    resize_positions(encoder, state)
    own = encoder.state_dict()
    wrong = sorted(key for key in own if key not in state or state[key].shape != own[key].shape)
    if wrong:
        raise ValueError(
            f"{url_or_filename} does not fit this image encoder ({type(encoder).__name__} of "
            f"{sum(weight.numel() for weight in own.values()) / 1e6:.1f} M weights): "
            f"{len(wrong)} weights are missing or of another shape, such as {wrong[0]}"
        )
    problem = problem_of_types(state, own)
    if problem:
        raise ValueError(f"{url_or_filename} cannot be loaded: {problem}")
    encoder.load_state_dict(state, strict=False)
    logging.info("loaded the image encoder from %s", url_or_filename)
