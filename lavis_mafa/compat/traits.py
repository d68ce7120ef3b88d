"""Properties of model classes that are needed before a model is built.

A class declares its traits as class attributes with the names of the fields of `Traits`; subclasses
inherit them. A table describes LAVIS's own classes, which we cannot edit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from lavis.common.registry import registry
from omegaconf import OmegaConf


@dataclass(frozen=True)
class Traits:
    """Traits of a model class.

    Attributes:
        family: models of one family load each other's checkpoints; "" if unknown.
        stage: 2 for a Q-Former in front of a language model (BLIP-2), which has no text encoder and
            no ITC and ITM heads; otherwise 1.
        loads_with_our_loader: reads ``tokenizer``, ``vit`` and weights as this package's models do,
            and no config keys except those of its default YAMLs.
        trains_by_step: trains by `run_step`, reads ``model.mafa`` and returns features for GRIT.
        can_judge: trains ITM on hard negatives, and can serve as Con-D.
        reranks: its retrieval re-ranks ``run.k_test`` candidates by ITM.
        pretrained_is_file: ``model.pretrained`` names a file; for LAVIS's CLIP it is a tag.
        llm_key: config key of its language model; None if it has none.
    """

    family: str = ""
    stage: int = 1
    loads_with_our_loader: bool = False
    trains_by_step: bool = False
    can_judge: bool = False
    reranks: bool = True
    pretrained_is_file: bool = True
    llm_key: str | None = None


_UNKNOWN = Traits()
_ALBEF, _BLIP, _BLIP2 = (Traits(family=family) for family in ("albef", "blip", "blip2"))
_CLIP = Traits(family="clip", reranks=False, pretrained_is_file=False)
# LAVIS's classes, each by one of its registered names.
_LAVIS_MODELS = {
    "albef_classification": _ALBEF,
    "albef_feature_extractor": _ALBEF,
    "albef_nlvr": _ALBEF,
    "albef_pretrain": replace(_ALBEF, can_judge=True),
    "albef_retrieval": replace(_ALBEF, can_judge=True),
    "albef_vqa": _ALBEF,
    "blip_caption": _BLIP,
    "blip_classification": _BLIP,
    "blip_feature_extractor": _BLIP,
    "blip_image_text_matching": replace(_BLIP, can_judge=True),
    "blip_nlvr": _BLIP,
    "blip_pretrain": replace(_BLIP, can_judge=True),
    "blip_retrieval": replace(_BLIP, can_judge=True),
    "blip_vqa": _BLIP,
    "blip2": replace(_BLIP2, can_judge=True),
    "blip2_image_text_matching": replace(_BLIP2, can_judge=True),
    "blip2_opt": replace(_BLIP2, stage=2),
    "blip2_t5": replace(_BLIP2, stage=2),
    "clip": _CLIP,
}


def traits_of(model: Any) -> Traits:
    """Return the traits of a model class, a model, or a registered name.

    Unregistered names, and classes that declare nothing and are not LAVIS's, have the defaults.
    """
    if isinstance(model, str):
        model = registry.get_model_class(model)
    if model is None:
        return _UNKNOWN
    cls = model if isinstance(model, type) else type(model)
    # By class, so that a user's subclass under another name has its parent's traits.
    table = {registry.get_model_class(name): traits for name, traits in _LAVIS_MODELS.items()}
    traits = next((table[base] for base in cls.__mro__ if base in table), _UNKNOWN)
    declared = {field.name: getattr(cls, field.name, None) for field in fields(Traits)}
    # A class may have a property or method of its own under one of these names.
    plain: dict[str, Any] = {
        name: one for name, one in declared.items() if isinstance(one, (bool, int, str))
    }
    return replace(traits, **plain)


def shipped_config(model_cls: Any, model_type: str | None = None) -> Any:
    """Return the default YAML of a model type; None: of the class's first type."""
    first = next(iter(model_cls.PRETRAINED_MODEL_CONFIG_DICT))
    return OmegaConf.load(model_cls.default_config_path(model_type or first))


def image_size_of(model: Any) -> int | None:
    """Return the image size of a LAVIS model's image encoder in pixels, None if unknown."""
    encoder = getattr(model, "visual_encoder", None)
    # LAVIS's ViTs do not record their image size, but their patch embedding does.
    size = getattr(getattr(encoder, "patch_embed", None), "img_size", None)
    if size is not None:
        return int(size[0])
    size = getattr(encoder, "input_resolution", None)  # CLIP's ViT
    return None if size is None else int(size)
