"""Build frozen models from ``model.mafa.con_d`` and ``model.mafa.negatives_encoder``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from lavis.common.registry import registry
from omegaconf import OmegaConf
from torch import Tensor

from lavis_mafa.algorithm.discriminator import (
    ENCODER_TOKENS,
    ENCODER_VIEW,
    Discriminator,
    EncodedByFrozen,
)
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.tokens import captions_of
from lavis_mafa.checkpoints.checkpoints import read_checkpoint, weights_of
from lavis_mafa.checkpoints.downloads import local_file
from lavis_mafa.checkpoints.weight_loading import (
    check_origin,
    config_of,
    load_state,
    require_weights,
)
from lavis_mafa.compat.traits import image_size_of, shipped_config, traits_of
from lavis_mafa.data.feature_folder import FeatureView
from lavis_mafa.judges import (  # noqa: F401  registers them
    caption_judge,
    cross_encoder,
    yes_no,
)
from lavis_mafa.judges.discriminators import DISCRIMINATORS, ModelDiscriminator
from lavis_mafa.judges.frozen import MATCHING_PARTS, PROJECTION_PARTS, FrozenModel

ORACLE = "oracle"
T = TypeVar("T", bound=FrozenModel)


def build_discriminator(
    cfg: Mapping[str, Any] | None, known: Mapping[str, Any] | None = None
) -> Discriminator | None:
    """Build Con-D from ``model.mafa.con_d``.

    ``arch`` names an entry of `DISCRIMINATORS`, such as ``oracle``, which is constructed with its
    own settings; or else a LAVIS model, see `_build_frozen`. It gets the entry that ``first`` names
    as its attribute of this name, see `judge_in_turn`.

    Returns:
        None for None: no discriminator.

    Raises:
        ValueError: as `_build_frozen`.
    """
    if not cfg:
        return None
    if cfg.get("first"):
        if not hasattr(DISCRIMINATORS.get(cfg["first"]), "probability"):
            raise ValueError(
                f"model.mafa.con_d.first: {cfg['first']} needs pictures; expected a discriminator "
                "that does without, such as captions"
            )
        con_d: Any = build_discriminator({**cfg, "first": None}, known)
        con_d.first = build_discriminator(
            {"arch": cfg["first"], cfg["first"]: cfg.get(cfg["first"])}
        )
        con_d.know = getattr(con_d.first, "know", lambda train_set: None)
        return con_d
    if cfg["arch"] in DISCRIMINATORS:
        entry = DISCRIMINATORS.entry(cfg["arch"])
        if entry.settings is None:
            return entry.value()
        own = entry.settings(**(cfg.get(entry.name) or {}))
        # Those with weights also read the keys of a model: checkpoint, precision, image_size.
        from_config = getattr(entry.value, "from_config", None)
        return entry.value(own) if from_config is None else from_config(cfg, own)
    return _build_frozen(ModelDiscriminator, cfg, known)


def build_negatives_encoder(
    cfg: Mapping[str, Any] | None, known: Mapping[str, Any] | None = None
) -> _ModelNegativesEncoder | None:
    """Build the encoder of hard negatives from ``model.mafa.negatives_encoder``.

    Returns:
        None for None: hard negatives are picked by the model in training.

    Raises:
        ValueError: as `_build_frozen`.
        TypeError: as `_ModelNegativesEncoder`.
    """
    return _build_frozen(_ModelNegativesEncoder, cfg, known) if cfg else None


def _build_frozen(
    cls: type[T], cfg: Mapping[str, Any], known: Mapping[str, Any] | None = None
) -> T:
    """Build a frozen model from the keys of `FrozenSettings`.

    ``arch`` is a LAVIS model, which a driver of `FAMILIES` must be able to drive. It is built by
    its config for ``model_type`` with the weights of ``checkpoint``. The sizes that the checkpoint
    records override the config of the model type, and ``model`` overrides both. Without
    ``checkpoint`` the model's published weights are used.

    Args:
        cls: what to build of the LAVIS model.
        known: the ``model`` config of the run. A tokenizer or file that the checkpoint records is
            used only if this config names it too.

    Raises:
        ValueError: for an unknown ``arch`` or key, no weights, a checkpoint that lacks some, or one
            whose recorded config has sizes out of range or names files.
    """
    arch, checkpoint, given = cfg["arch"], cfg.get("checkpoint"), cfg.get("model") or {}
    model_cls = registry.get_model_class(arch)
    if model_cls is None:
        names = [*registry.list_models(), *(DISCRIMINATORS if cls is ModelDiscriminator else ())]
        raise ValueError(f"{cls.key}.arch: no model named {arch!r}; known: {', '.join(names)}")
    model_type = cfg.get("model_type")
    shipped = shipped_config(model_cls, model_type).model
    unknown = [name for name in given if name not in shipped]
    if unknown:
        raise ValueError(
            f"{cls.key}.model.{unknown[0]}: {arch} has no such key; it has {', '.join(shipped)}"
        )
    if checkpoint:
        # LAVIS's models would look for a URL's file by the last part of its name alone.
        checkpoint = local_file(checkpoint)
        content = read_checkpoint(checkpoint)
        check_origin(content, arch, None, checkpoint)
        model_cfg: Any = config_of(arch, model_type, checkpoint, content, given, known)
    else:
        model_cfg = OmegaConf.merge(shipped, given)
        weights = ("finetuned", "pretrained")
        if not any(model_cfg.get(one) and model_cfg.get(f"load_{one}", True) for one in weights):
            raise ValueError(
                f"{cls.key}.checkpoint: {arch} has no published weights of that type; name the "
                f"checkpoint of a model with {cls.trained}"
            )
    if cfg.get("image_size"):
        model_cfg.image_size = cfg["image_size"]
    source = checkpoint or "published weights"
    logging.info("%s: %s %s from %s", cls.title, arch, model_type or "", source)
    model = model_cls.from_config(model_cfg)
    if checkpoint:
        check_origin(content, arch, getattr(model, "tokenizer", None), checkpoint)
        _require_weights(cls, model, content, checkpoint)
    processor = view_of(arch, model_type, model)
    return cls(model, cfg.get("precision", "fp32"), processor, cfg.get("own_view"))


def view_of(arch: str, model_type: str | None, model: Any) -> Callable[[Any], Tensor] | None:
    """Return the evaluation image processor of a model type's default YAML, None if unknown."""
    if getattr(getattr(model, "visual_encoder", None), "takes_features", False):
        return FeatureView()
    shipped = shipped_config(registry.get_model_class(arch), model_type)
    view = OmegaConf.select(shipped, "preprocess.vis_processor.eval")
    if view is None:
        # LAVIS's configs of pre-training name only a processor of training.
        view = OmegaConf.select(shipped, "preprocess.vis_processor.train")
        if view is None or not view.name.endswith("_train"):
            return None
        name = view.name.removesuffix("_train") + "_eval"
        view = OmegaConf.create({"name": name, "image_size": view.image_size})
    view.image_size = image_size_of(model) or view.image_size
    processor: Callable[[Any], Tensor] = registry.get_processor_class(view.name).from_config(view)
    return processor


def _require_weights(
    cls: type[FrozenModel], model: Any, content: dict[str, Any], checkpoint: str
) -> None:
    """Load the weights that LAVIS's loading may have skipped, and refuse a partly random model."""
    said = traits_of(model).loads_with_our_loader  # as the model was built
    loaded = load_state(model, weights_of(content), checkpoint, say_dropped=not said)
    require_weights(
        model,
        loaded.missing_keys,
        cls.parts,
        f"{cls.key}.checkpoint: to {cls.purpose} with {type(model).__name__}, {checkpoint}",
        f"Name a checkpoint of a model with {cls.trained} and of the same sizes",
    )


class _ModelNegativesEncoder(FrozenModel):
    """The encoders of a LAVIS model that was trained with ITC; its fusion is not used.

    Hard negatives are picked by its similarities (GRIT-VLP, Table 1).

    Args:
        model, precision, processor, own_view: see `FrozenModel`.

    Raises:
        TypeError: if no backbone can drive the model, or it has no temperature of ITC.
    """

    key, title = "model.mafa.negatives_encoder", "negatives_encoder"
    view, tokens = ENCODER_VIEW, ENCODER_TOKENS
    parts = (*MATCHING_PARTS, *PROJECTION_PARTS)
    purpose, trained = "compare", "the projections of ITC"

    def __init__(self, model: Any, *how: Any, **more: Any) -> None:
        super().__init__(model, *how, **more)
        if not hasattr(model, "temp"):
            raise TypeError(
                f"{type(model).__name__} cannot pick hard negatives: it has no temperature of ITC "
                "(temp); use a model of pre-training or of retrieval"
            )

    def compare(
        self, samples: dict[str, Any], ranks: Ranks | None = None, seen: Tensor | None = None
    ) -> EncodedByFrozen:
        ranks = ranks or Ranks(together=False)
        images, seen = self._inputs(samples, seen)
        backbone = self.step_backbone
        with torch.inference_mode():
            with self.autocast(images.device):
                own_images = backbone.encode_images(images, seen)
                own_texts = backbone.encode_texts(captions_of(samples, self.tokens))
            of_images, of_texts = own_images.features, own_texts.features
            assert of_images is not None and of_texts is not None
            temperature = backbone.temperature
            found = (
                backbone.similarity(of_images, ranks.gather(of_texts)) / temperature,
                backbone.similarity(ranks.gather(of_images), of_texts).t() / temperature,
                temperature,
                *backbone.grit_vectors(own_images, own_texts),
            )
        # Cloned outside: tensors of inference mode could not be changed in place by their users.
        return EncodedByFrozen(*(one.detach().clone() for one in found))
