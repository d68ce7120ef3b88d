"""Load checkpoints into models: check that they fit, and adapt names and sizes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from lavis.common.registry import registry
from lavis.models import clip_vit
from lavis.models.vit import interpolate_pos_embed
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from lavis_mafa.algorithm.momentum import NO_IMAGE
from lavis_mafa.io.checkpoints import model_config, problem_of_state, read_checkpoint, vocabulary_of
from lavis_mafa.models.traits import same_model, traits_of

# Parts that image-text matching needs; momentum encoders and language heads are not among them.
MATCHING_PARTS = (
    "visual_encoder.",
    "text_encoder.",
    "itm_head.",
    "Qformer.",
    "query_tokens",
    "ln_vision.",
)
PROJECTION_PARTS = ("vision_proj.", "text_proj.")
LANGUAGE_HEADS = ("text_encoder.cls.", "Qformer.cls.")


def recorded_model(content: dict[str, Any], arch: str) -> dict[str, Any]:
    """Return the ``model`` config recorded in a checkpoint, without keys of its training.

    Empty if the checkpoint records no config, or one of a model other than ``arch``. A class and
    its subclass count as one model, so that users' variants and ours load each other's checkpoints.
    """

    model = dict(model_config(content))
    saved_by = model.get("arch")
    if not saved_by or not same_model(saved_by, arch):
        return {}
    if saved_by != arch:
        model["arch"] = arch
        # A user's subclass may have types of its own, which its parent does not know.
        types = registry.get_model_class(arch).PRETRAINED_MODEL_CONFIG_DICT
        if model.get("model_type") not in types:
            model.pop("model_type", None)
    for key in ("mafa", "pretrained", "finetuned", "load_pretrained", "load_finetuned"):
        model.pop(key, None)
    return model


def config_of(arch: str, model_type: str, checkpoint: str, content: dict[str, Any]) -> DictConfig:
    """Return the ``model`` config that builds a checkpoint's model and loads its weights.

    The keys recorded in the checkpoint override the default YAML of the type.
    """
    model_cls = registry.get_model_class(arch)
    shipped = OmegaConf.load(model_cls.default_config_path(model_type)).model
    cfg = OmegaConf.merge(shipped, recorded_model(content, arch))
    assert isinstance(cfg, DictConfig)
    cfg.update(load_pretrained=False, load_finetuned=True, finetuned=checkpoint)
    cfg.pop("mafa", None)  # settings of training, including a Con-D that need not exist here
    return cfg


def registered_name(cls: type) -> str:
    """Return a model class's name in LAVIS's registry, or that of its nearest registered base.

    The first name if the class has several, the class's own if there is none.
    """
    names: Mapping[str, type] = registry.mapping["model_name_mapping"]
    for base in cls.__mro__:
        for name, known in names.items():
            if known is base:
                return name
    return cls.__name__


def check_origin(content: dict[str, Any], arch: str, tokenizer: Any, origin: str) -> None:
    """Refuse a checkpoint whose recorded config does not fit a model.

    Args:
        content: the checkpoint.
        arch: registered name of the model that is to load it.
        tokenizer: the model's; None leaves the vocabulary unchecked.
        origin: the checkpoint's path.

    Raises:
        ValueError: if a model of another family saved it, it is of stage 2 and the model of stage
            1, or it was trained with another vocabulary.
    """
    problem = problem_of_origin(content, arch, origin)
    if problem:
        raise ValueError(problem)
    then, now = content.get("vocabulary"), vocabulary_of(tokenizer)
    if then and now and then != now:
        used = model_config(content).get("tokenizer") or "BERT's"
        raise ValueError(
            f"{origin} was trained with another vocabulary (tokenizer: {used}) than the model's: "
            "the same token ids would mean other words. Give the model the same tokenizer"
        )


def problem_of_origin(content: dict[str, Any], arch: str, origin: str) -> str | None:
    """Say why a checkpoint cannot be loaded by a model ``arch``, by family and stage.

    Returns:
        None if it can, or does not record which model saved it.
    """

    saved_by = str(model_config(content).get("arch") or arch)
    before, now = traits_of(saved_by), traits_of(arch)
    # A user's model that is not registered here is known by what its checkpoint recorded.
    family = before.family or str(content.get("family") or "")
    if family != now.family and family and now.family:
        return (
            f"{origin} was saved by {saved_by}, which is of another family than {arch}: give a "
            f"checkpoint of family {now.family}, or a model of family {family} as arch"
        )
    if before.stage == 2 and now.stage == 1:
        return (
            f"{origin} was saved by {saved_by}, which is of stage 2: it has no text encoder and "
            f"no heads for ITC and ITM, which {arch} needs. Give the checkpoint of stage 1 that it "
            "was trained from"
        )
    return None


def load_state(model: torch.nn.Module, state: dict[str, Tensor], origin: str) -> Any:
    """Load the weights that fit, with position embeddings resized to the model's image size.

    ALBEF's pre-training models have BERT under ``text_encoder.bert.``, its retrieval models under
    ``text_encoder.``; both are understood.

    Returns:
        Missing and unexpected keys, as returned by ``load_state_dict``.

    Raises:
        ValueError: if no weight fits, or shapes differ.
    """
    own = model.state_dict()
    problem = problem_of_state(state, origin)
    if problem:
        raise ValueError(problem)
    state = {_own_name(key, own): value for key, value in state.items()}
    for name in ("visual_encoder", "visual_encoder_m"):
        encoder, prefix = getattr(model, name, None), f"{name}."
        part = {key[len(prefix) :]: v for key, v in state.items() if key.startswith(prefix)}
        if encoder is not None and part:
            resize_positions(encoder, part)
            state.update({prefix + key: value for key, value in part.items()})
    wrong = [
        f"{key}: {tuple(value.shape)} in the file, {tuple(own[key].shape)} in the model"
        for key, value in state.items()
        if key in own and value.shape != own[key].shape
    ]
    if wrong:
        raise ValueError(
            f"{origin} was saved by a model of other sizes:\n  " + "\n  ".join(wrong[:10])
        )
    if not own.keys() & state.keys():
        raise ValueError(f"{origin} holds no weight of {type(model).__name__}")
    result = model.load_state_dict(state, strict=False)
    logging.info("loaded %s", origin)
    missing = random_weights(model, result.missing_keys)
    if missing:
        logging.warning(
            "%d of %d weights are not in %s and keep their initial values, such as %s",
            len(missing),
            len(own),
            origin,
            missing[0],
        )
    return result


def random_weights(model: Any, missing: Collection[str]) -> list[str]:
    """Return the weights in ``missing`` that keep random initial values.

    Frozen weights were loaded from elsewhere when the model was built, unless the model lists them
    in ``random_parts``.
    """
    random_parts = getattr(model, "random_parts", ())
    return [
        name
        for name, value in model.named_parameters()
        if name in missing and (value.requires_grad or name.startswith(random_parts))
    ]


def require_weights(
    model: Any, missing: Collection[str], parts: tuple[str, ...], problem: str, cure: str
) -> None:
    """Refuse a checkpoint that leaves needed weights of a model random.

    Args:
        missing: keys that the checkpoint lacks.
        parts: prefixes of the weights that are needed; language heads never are.
        problem, cure: the beginning and the end of the message.

    Raises:
        ValueError: if a weight of ``parts`` is random, with counts by part.
    """
    lost: dict[str, list[str]] = {}
    for name in random_weights(model, missing):
        if name.startswith(parts) and not name.startswith(LANGUAGE_HEADS):
            lost.setdefault(name.split(".")[0], []).append(name)
    if lost:
        lines = [f"{part}: {len(names)}, such as {names[0]}" for part, names in lost.items()]
        count = sum(map(len, lost.values()))
        raise ValueError("\n  ".join([f"{problem} lacks {count} weights:", *lines]) + f"\n{cure}")


def resize_positions(encoder: Any, state: dict[str, Tensor]) -> None:
    """Resize the position embeddings in an image encoder's state to its image size, in place."""
    if "positional_embedding" in state and hasattr(encoder, "positional_embedding"):
        clip_vit.interpolate_pos_embed(encoder, state)
    elif state.get("pos_embed") is not None and state["pos_embed"].ndim == 3:
        state["pos_embed"] = interpolate_pos_embed(state["pos_embed"], encoder)


def init_momentum(model: Any, checkpoint: str | None) -> bool:
    """Copy the encoders into the momentum encoders if a checkpoint holds none.

    LAVIS copies them when a model is built, before its checkpoint is loaded: with a checkpoint
    without momentum encoders they would stay random. The image ids of the queue are reset.

    Returns:
        Whether they were copied.
    """
    if not checkpoint or not hasattr(model, "copy_params") or hasattr(model, "convert_pretrained"):
        return False  # models with `convert_pretrained` do this themselves while loading
    if hasattr(model, "idx_queue"):
        model.idx_queue.fill_(NO_IMAGE)  # ids of other data could match ours
    state = read_checkpoint(checkpoint)
    # Pre-training models have BERT one level deeper than retrieval models.
    saved = {key.replace("bert.", "") for key in state.get("model", state)}
    names = [name.replace("bert.", "") for name, _ in model.named_parameters() if "_m." in name]
    if all(name in saved for name in names):
        return False
    model.copy_params()
    logging.info("%s holds no momentum encoders: they start as copies of the encoders", checkpoint)
    return True


def _own_name(key: str, own: dict[str, Tensor]) -> str:
    part = key.split(".", 1)[0] + "."
    if key in own or part not in ("text_encoder.", "text_encoder_m."):
        return key
    longer = key.replace(part, f"{part}bert.", 1)
    shorter = key.replace(f"{part}bert.", part, 1)
    return next((name for name in (longer, shorter) if name in own), key)
