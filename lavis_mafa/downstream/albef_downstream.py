"""The base of ALBEF's models for downstream tasks: sizes, tokenizer, checkpoints."""

from __future__ import annotations

from typing import Any

from lavis.models.med import XBertEncoder
from torch import Tensor
from transformers.models.bert.configuration_bert import BertConfig

from lavis_mafa.checkpoints.checkpoints import read_checkpoint, weights_of
from lavis_mafa.checkpoints.weight_loading import (
    check_origin,
    fill_momentum,
    load_state,
    registered_name,
    require_weights,
)
from lavis_mafa.families.attention import fuse_attention
from lavis_mafa.families.mafa_model import checkpoint_of
from lavis_mafa.families.tokenizers import build_tokenizer
from lavis_mafa.families.vit import build_vit
from lavis_mafa.io.project_files import find_config

_ENCODERS = ("visual_encoder.", "text_encoder.")


class AlbefDownstream:
    """Mixin before LAVIS's ALBEF classes for downstream tasks.

    LAVIS's classes build only a ViT-B and BERT's tokenizer, and some of them load no checkpoint
    without momentum encoders. These have any size, start from a checkpoint of ``albef_mafa`` as
    ``model.pretrained``, and keep LAVIS's state-dict names. Without ``use_distill``, as in GRIT-VLP
    and MAFA (MAFA F), there is no distillation.

    Attributes:
        trains_by_step: False: no step of this package, so no GRIT, Con-D or ``model.mafa``.
        options: arguments of LAVIS's class that a config gives under the same name.
        heads: prefixes of weights that only a fine-tuned checkpoint has.
        random_parts: prefixes of frozen weights, which must be loaded from a checkpoint.
        ramp_epochs: epochs over which the weight of distillation grows to alpha; 0: none.
    """

    family = "albef"
    loads_with_our_loader = True
    trains_by_step = False
    can_judge = False
    options: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    random_parts: tuple[str, ...] = ()
    ramp_epochs = 1.0

    def __init__(self, tokenizer: Any = None, **arguments: Any) -> None:
        """
        Args:
            tokenizer: None: BERT's.
            arguments: of LAVIS's class.
        """
        self._given_tokenizer = tokenizer
        super().__init__(**arguments)

    def init_tokenizer(self) -> Any:
        """Return the tokenizer; called by LAVIS's constructors."""
        return self._given_tokenizer or build_tokenizer(None)

    @classmethod
    def from_config(cls, cfg: Any = None) -> Any:
        """Build from a ``model`` config.

        Fine-tuning starts from ``pretrained`` with ``load_pretrained``; ``finetuned`` with
        ``load_finetuned`` is a whole model of this arch; with neither, weights are random.

        Raises:
            OSError: if a checkpoint or tokenizer must be downloaded and cannot be.
            ValueError: if no checkpoint is given, or it does not fit.
        """
        checkpoint = checkpoint_of(cfg)
        if not checkpoint and cfg.get("load_pretrained", True):
            raise ValueError(
                "model.pretrained names no checkpoint to fine-tune; name one of albef_mafa, or set "
                "model.load_pretrained: False to start from random weights"
            )
        tokenizer: Any = build_tokenizer(cfg.get("tokenizer"))
        config: Any = BertConfig.from_json_file(find_config(cfg.get("med_config_path")))
        config.vocab_size = max(config.vocab_size, len(tokenizer))
        chosen = {name: cfg[name] for name in cls.options if name in cfg}
        model_cls: Any = cls
        model = model_cls(
            tokenizer=tokenizer,
            image_encoder=build_vit(cfg, from_pretrained=False),
            **cls._language_parts(config),
            **chosen,
        )
        model.ramp_epochs = float(cfg.get("ramp_epochs", cls.ramp_epochs))
        fuse_attention(model)
        if checkpoint and cfg.get("load_finetuned", False):
            model.load_checkpoint(checkpoint)
        elif checkpoint:
            model.load_from_pretrained(checkpoint)
        return model

    def _rampup_factor(self, epoch: int, iters: int, num_iters_per_epoch: int) -> float:
        """Return the share of alpha at a step; called by LAVIS's classes, which have a constant."""
        ramp = self.ramp_epochs * num_iters_per_epoch
        return min(1.0, (epoch * num_iters_per_epoch + iters) / ramp) if ramp else 1.0

    @classmethod
    def _language_parts(cls, config: BertConfig) -> dict[str, Any]:
        """Build the text encoder and any further language part of LAVIS's class."""
        return {"text_encoder": XBertEncoder(config=config, add_pooling_layer=False)}

    def _convert_pretrained(self, state: dict[str, Tensor], origin: str) -> dict[str, Tensor]:
        """Return the weights of a pre-trained checkpoint under the names of this model.

        Weights that start as copies of others are added.
        """
        return state

    def load_checkpoint(self, url_or_filename: str) -> Any:
        """Load a fine-tuned model of this arch.

        Raises:
            FileNotFoundError: if the file does not exist.
            ValueError: if it does not fit, or lacks weights.
        """
        cure = "Name a fine-tuned checkpoint, or give this one as model.pretrained to fine-tune it"
        return self._load(str(url_or_filename), False, (*_ENCODERS, *self.heads), cure)

    def load_from_pretrained(self, url_or_filename: str) -> Any:
        """Load a pre-trained model, of this package or of LAVIS, to fine-tune it.

        Raises:
            FileNotFoundError: if the file does not exist.
            ValueError: if it does not fit, or lacks an encoder.
        """
        needed = (*_ENCODERS, *self.random_parts)
        cure = "Name a checkpoint of the whole model"
        return self._load(str(url_or_filename), True, needed, cure)

    def _load(self, origin: str, pretrained: bool, needed: tuple[str, ...], cure: str) -> Any:
        content = read_checkpoint(origin)
        model: Any = self
        check_origin(content, registered_name(type(self)), model.tokenizer, origin)
        state = weights_of(content)
        # Anything else is refused by `load_state`, with a message.
        if pretrained and isinstance(state, dict):
            state = self._convert_pretrained(state, origin)
        loaded = load_state(model, state, origin)
        require_weights(model, loaded.missing_keys, needed, origin, cure)
        fill_momentum(model, loaded.missing_keys)
        return loaded
