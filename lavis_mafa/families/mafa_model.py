"""The mixin of all models: the training step, checkpoints and retrieval."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from omegaconf import OmegaConf

from lavis_mafa.algorithm.backbone import Backbone, backbone_of
from lavis_mafa.algorithm.cached_batch import in_chunks
from lavis_mafa.algorithm.discriminator import Discriminator, NegativesEncoder
from lavis_mafa.algorithm.momentum import RAMP_EPOCHS, Momentum
from lavis_mafa.algorithm.output import StepOutput
from lavis_mafa.algorithm.parts import StepParts, build_parts
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.checkpoints.checkpoints import (
    model_config,
    read_checkpoint,
    run_state_of,
    weights_of,
)
from lavis_mafa.checkpoints.weight_loading import (
    check_origin,
    fill_momentum,
    load_state,
    registered_name,
    require_weights,
)
from lavis_mafa.compat.traits import image_size_of, shipped_config
from lavis_mafa.families.rerank import MAX_TOKENS, compute_sim_matrix
from lavis_mafa.judges.build import build_discriminator, build_negatives_encoder
from lavis_mafa.judges.frozen import MATCHING_PARTS, PROJECTION_PARTS, frozen_models


def _of_step(name: str) -> Any:
    """Return a property for a part of a model's `StepParts`."""

    def put(model: Any, value: Any) -> None:
        setattr(model.step, name, value)

    return property(lambda model: getattr(model.step, name), put)


class MafaModel:
    """Mixin of the ``*_mafa`` models; it comes before LAVIS's base class of the family.

    A model sets ``backbone``, ``temp`` and its family's modules, and calls `attach_step` at the end
    of its constructor.
    """

    # Traits, see `lavis_mafa.compat.traits.Traits`; a family adds its own.
    loads_with_our_loader = True
    trains_by_step = True
    can_judge = True
    backbone: Backbone
    step: StepParts
    temp: Any
    keeps_initial_momentum = False  # False: copied from a checkpoint that lacks them
    cached_batch: int | None = None  # number of pairs whose activations are stored; None: all
    # LAVIS's ALBEF and BLIP clamp it to this range at every step; BLIP-2 does not.
    temperature_range: tuple[float, float] = (0.001, 0.5)

    def attach_step(
        self,
        backbone: Backbone,
        settings: StepSettings | None = None,
        con_d: Discriminator | None = None,
        negatives_encoder: NegativesEncoder | None = None,
    ) -> None:
        """Attach the parts of the step, see `build_parts`."""
        self.backbone = backbone
        # Frozen models are not submodules, so that they are neither trained nor saved.
        self.step = build_parts(
            settings or StepSettings(), con_d, negatives_encoder=negatives_encoder
        )
        for name, one in self.step.objects.items():
            if hasattr(self, name):
                raise ValueError(
                    f"model.mafa: {name} is an attribute of {type(self).__name__}; register "
                    f"{type(one).__name__} under another name"
                )
            # A module becomes a submodule: the optimizer trains its parameters, and checkpoints
            # hold its state under the registered name.
            setattr(self, name, one)

    settings = _of_step("settings")
    con_d = _of_step("con_d")
    negatives_encoder = _of_step("negatives_encoder")
    momentum_encoders = _of_step("momentum")

    def forward(self, samples: dict[str, Any]) -> StepOutput:
        """Compute one step on a mini-batch, as in `lavis_mafa.algorithm.step.run_step`."""
        with torch.no_grad():
            self.temp.clamp_(*self.temperature_range)
        return run_step(self.step_backbone, samples, self.step)

    @property
    def step_backbone(self) -> Backbone:
        """Return the backbone, which computes in chunks of ``cached_batch`` pairs if that is
        set."""
        return in_chunks(self.backbone, self.cached_batch)

    def add_momentum(self, cfg: Any) -> None:
        """Build the momentum encoders of a ``model`` config if the soft labels need them."""
        if self.settings.soft_labels.needs_momentum:
            model: Any = self
            self.keeps_initial_momentum = cfg.get("momentum_start") == "initial"
            self.momentum_encoders = Momentum(
                model,
                backbone_of,
                model.vision_proj.out_features,
                int(cfg.get("queue_size", 57600)),
                float(cfg.get("momentum", 0.995)),
                float(cfg.get("alpha", 0.4)),
                float(cfg.get("ramp_epochs", RAMP_EPOCHS)),
            )

    def allocate(self, size: int) -> None:
        """Prepare the step's objects for ``size`` training samples, see `StepParts.allocate`."""
        self.step.allocate(size)

    def expect_groups(self) -> None:
        """Prepare for training data with groups, before state is resumed."""
        if self.momentum_encoders is not None and self.settings.same_group != "negative":
            self.momentum_encoders.queue_groups()

    @property
    def has_unused_parameters(self) -> bool:
        """Return whether some weights get no gradient because their loss is switched off."""
        return any(not self.settings.loss_weights.get(name) for name in ("itc", "itm", "lm"))

    def compute_sim_matrix(
        self, data_loader: Any, task_cfg: Any
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return retrieval scores by ``k_test``, ``rerank_by`` and ``retrieval_max_txt_len`` of
        section ``run``."""
        return compute_sim_matrix(
            self.backbone,
            data_loader,
            task_cfg.get("k_test", 128),
            by=task_cfg.get("rerank_by", "sum"),
            max_tokens=task_cfg.get("retrieval_max_txt_len", MAX_TOKENS),
        )

    def load_checkpoint(self, url_or_filename: str, content: dict[str, Any] | None = None) -> Any:
        """Load the weights of a checkpoint of this family.

        Args:
            content: content of the file, if it has been read already.
        """
        origin = str(url_or_filename)
        content = content or read_checkpoint(origin)
        model: Any = self
        check_origin(content, registered_name(type(self)), model.tokenizer, origin)
        loaded = load_state(model, weights_of(content, run_state_of(model)), origin)
        self._after_loading(loaded.missing_keys)
        return loaded

    def load_from_pretrained(self, url_or_filename: str, rename_text_keys: bool = False) -> Any:
        """Load a checkpoint as `load_checkpoint` does, without renaming keys."""
        return self.load_checkpoint(url_or_filename)

    def _after_loading(self, missing: list[str]) -> None:
        """Handle the weights ``missing`` from the file that `load_state` has loaded."""
        if self.momentum_encoders is not None and not self.keeps_initial_momentum:
            model: Any = self
            fill_momentum(model, missing)

    def load_and_share(self, cfg: Any, content: dict[str, Any] | None = None) -> Any:
        """Load the checkpoint that a ``model`` config names, if any, and share a frozen image
        encoder with Con-D and the encoder of hard negatives.

        Args:
            content: content of the file, if it has been read already.

        Raises:
            ValueError: if the checkpoint does not fit, or lacks weights of ITC or ITM although
                ``load_finetuned`` is on.
        """
        checkpoint = checkpoint_of(cfg)
        if checkpoint:
            content = content or read_checkpoint(checkpoint)
            loaded = self.load_checkpoint(checkpoint, content)
            if cfg.get("load_finetuned", False):
                self._require_finetuned(checkpoint, content, loaded.missing_keys)
        if not (cfg.get("mafa") or {}).get("learn_temperature", True):
            self.temp.requires_grad_(False).fill_(cfg.get("temp", 0.07))
        for one in frozen_models(self):
            if one.share_encoder(self):
                logging.info(
                    "%s shares the frozen image encoder: it runs once per mini-batch", one.title
                )
        return self

    def _require_finetuned(
        self, checkpoint: str, content: dict[str, Any], missing: list[str]
    ) -> None:
        require_weights(
            self,
            missing,
            (*MATCHING_PARTS, *PROJECTION_PARTS),
            f"model.finetuned: {checkpoint}",
            "Name a checkpoint of the whole model, or give it as model.pretrained with "
            "model.load_finetuned: False to train the missing weights. A missing frozen image "
            "encoder can be named as model.vit_weights",
        )
        then, now = model_config(content).get("image_size"), image_size_of(self)
        if then and now and then != now:
            logging.warning(
                "%s was trained at model.image_size %s, but this model has %s: position embeddings "
                "are interpolated, and figures differ",
                checkpoint,
                then,
                now,
            )

    @classmethod
    def from_pretrained(cls, model_type: str, random_weights: bool = False) -> Any:
        """Build a model type from its default config.

        Args:
            random_weights: use random weights and download nothing; if the type's tokenizer is not
                in the cache, use a small built-in one.

        Raises:
            OSError: if weights or a tokenizer are not in the cache and cannot be downloaded.
        """
        model_cls: Any = cls
        cfg = shipped_config(model_cls, model_type).model
        name = f"{registered_name(cls)} {model_type}"
        if not random_weights:
            try:
                return model_cls.from_config(cfg)
            except OSError as error:
                raise OSError(
                    f"{name} cannot be built: a file that its published config names cannot be "
                    f"downloaded ({str(error).splitlines()[0]}); load the model once with a "
                    "network, or ask for random weights: load_model(..., random_weights=True)"
                ) from error
        logging.warning("%s is built with random weights, as asked for", name)
        model_cls.without_downloads(cfg)
        try:
            return model_cls.from_config(cfg)
        except OSError:
            logging.warning(
                "its tokenizer is not in the cache: captions are tokenised by a small built-in "
                "vocabulary; set model.tokenizer before using it"
            )
            cfg.tokenizer = "tiny_vocab.txt"
            return model_cls.from_config(cfg)

    @staticmethod
    def without_downloads(cfg: Any) -> None:
        """Change a config in place, so that building its model downloads no weights."""
        cfg.update(load_pretrained=False, load_finetuned=False, vit_weights=None, bert_weights=None)


def checkpoint_of(cfg: Any) -> str | None:
    """Return the checkpoint of a ``model`` config, or None.

    Raises:
        ValueError: if ``load_finetuned`` is on and no file is named.
    """
    if cfg.get("load_finetuned", False):
        if not cfg.get("finetuned"):
            raise ValueError("model.load_finetuned is True but model.finetuned names no file")
        return str(cfg.finetuned)
    path = cfg.get("pretrained") if cfg.get("load_pretrained", True) else None
    return str(path) if path else None


def step_parts(cfg: Any) -> dict[str, Any]:
    """Build ``settings`` and ``con_d`` of a ``model`` config. Add ``negatives_encoder`` only if the
    config has one, so that a user's model that does not take it raises an error."""
    mafa: Any = OmegaConf.to_container(OmegaConf.create(cfg.get("mafa") or {}), resolve=True)
    everywhere = bool(cfg.get("negative_all_rank", False))
    settings = StepSettings.from_config(mafa, all_ranks=everywhere)
    # Fork the random state, so that a model has the same weights with and without frozen models.
    with torch.random.fork_rng(devices=[]):
        parts = {"settings": settings, "con_d": build_discriminator(mafa.get("con_d"), cfg)}
        encoder = build_negatives_encoder(mafa.get("negatives_encoder"), cfg)
    return parts if encoder is None else {**parts, "negatives_encoder": encoder}
