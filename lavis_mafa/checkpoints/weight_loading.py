"""Load checkpoints into models: check that they fit, and adapt names and sizes."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Container, Mapping
from typing import Any

import torch
from lavis.common.registry import registry
from lavis.models import clip_vit
from lavis.models.vit import interpolate_pos_embed
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from lavis_mafa.algorithm.momentum import NO_IMAGE
from lavis_mafa.checkpoints.checkpoints import (
    model_config,
    problem_of_state,
    problem_of_types,
    read_checkpoint,
    vocabulary_of,
    weights_of,
)
from lavis_mafa.checkpoints.recorded_sizes import recorded_model
from lavis_mafa.compat.traits import shipped_config, traits_of

_LANGUAGE_HEADS = ("text_encoder.cls.", "Qformer.cls.")
_LAYER = re.compile(r"(.+\.(?:blocks|layer|resblocks))\.(\d+)\.")
_TOKEN_TYPES, _POSITIONS = "token_type_embeddings.weight", "position_embeddings.weight"


def config_of(
    arch: str,
    model_type: str | None,
    checkpoint: str,
    content: dict[str, Any],
    given: Mapping[str, Any] | None = None,
    known: Mapping[str, Any] | None = None,
) -> DictConfig:
    """Return the ``model`` config that builds a checkpoint's model and loads its weights.

    The sizes recorded in the checkpoint override the default YAML of the type, and ``given``
    overrides both.

    Args:
        model_type: None: the first of the model's.
        given: keys that the user set for this model.
        known: the ``model`` config of the user's run, see `recorded_model`.

    Raises:
        ValueError: as `recorded_model`.
    """
    model_cls = registry.get_model_class(arch)
    shipped = shipped_config(model_cls, model_type).model
    recorded = recorded_model(content, arch, checkpoint, given, known)
    cfg = OmegaConf.merge(shipped, recorded)
    assert isinstance(cfg, DictConfig)
    cfg.update(load_pretrained=False, load_finetuned=True, finetuned=checkpoint)
    cfg.pop("mafa", None)  # settings of training, including a Con-D that need not exist here
    cfg.merge_with(OmegaConf.create(dict(given or {})))
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
    problem = _problem_of_origin(content, arch, origin)
    if problem:
        raise ValueError(problem)
    check_vocabulary(content, tokenizer, origin)


def check_vocabulary(content: Mapping[str, Any], tokenizer: Any, origin: str) -> None:
    """Refuse a checkpoint that was trained with another vocabulary, see `check_origin`.

    Raises:
        ValueError: if it was.
    """
    then, now = content.get("vocabulary"), vocabulary_of(tokenizer)
    if then and now and then != now:
        used = model_config(content).get("tokenizer") or "BERT's"
        raise ValueError(
            f"{origin} was trained with another vocabulary (tokenizer: {used}) than the model's: "
            "the same token ids would mean other words. Give the model the same tokenizer"
        )


def _problem_of_origin(content: dict[str, Any], arch: str, origin: str) -> str | None:
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


def _fold_token_types(state: dict[str, Tensor], own: Container[str]) -> dict[str, Tensor]:
    """Add the first token type to the positions wherever a model has no token types.

    The published ALBEF, GRIT-VLP and MAFA add the embedding of token type 0 to every token; LAVIS's
    BERT has no token types. Its sums stay the same if the positions contain that row.

    Args:
        state: weights under the names of the file.
        own: the names of the model's weights; empty: it has no token types anywhere.

    Returns:
        A copy of ``state`` without the token types that were added.

    Raises:
        ValueError: if the shapes of token type and position embeddings do not match.
    """
    folded = dict(state)
    for key in state:
        beside = key.removesuffix(_TOKEN_TYPES) + _POSITIONS
        if not key.endswith(_TOKEN_TYPES) or _own_name(key, own) in own or beside not in state:
            continue
        positions, types = state[beside], folded.pop(key)
        if types.ndim != 2 or not len(types) or types.shape[1:] != positions.shape[1:]:
            raise ValueError(
                f"{key} has shape {tuple(types.shape)}, which does not fit {beside} with "
                f"{tuple(positions.shape)}: expected (types, {positions.shape[-1]})"
            )
        dtype = torch.promote_types(positions.dtype, torch.float32)
        folded[beside] = positions.to(dtype) + types[0].to(dtype)
    return folded


def complete_lavis_loading(model: torch.nn.Module, checkpoint: str | None) -> None:
    """Complete what LAVIS's code has loaded into a model of its own.

    LAVIS ignores names that do not match, knows no token types, and copies the encoders into the
    momentum encoders before it loads. Models of this package need none of this.

    Args:
        checkpoint: the file or URL that was loaded; None: none.

    Raises:
        ValueError: as `load_state`.
    """
    traits = traits_of(model)
    if not checkpoint or traits.loads_with_our_loader or not traits.pretrained_is_file:
        return
    if hasattr(model, "idx_queue"):
        model.idx_queue.fill_(NO_IMAGE)  # type: ignore[operator]  # ids of other data
    if not hasattr(model, "itm_head"):
        return  # LAVIS rearranges the weights of its other models itself
    state, own = weights_of(read_checkpoint(checkpoint, mapped=True)), model.state_dict()
    load_state(model, state, checkpoint)
    fill_momentum(model, own.keys() - {_own_name(key, own) for key in state})


def fill_momentum(model: torch.nn.Module, missing: Collection[str]) -> None:
    """Copy the encoders into those weights of their momentum encoders that a checkpoint lacks."""
    # Not by the state dict, which lists a tied head again: its copy was loaded as embeddings.
    own, filled = dict(model.named_parameters()), []
    for name in own.keys() & set(missing):
        part, _, rest = name.partition(".")
        encoder = f"{part.removesuffix('_m')}.{rest}"
        if part.endswith("_m") and encoder in own:
            own[name].data.copy_(own[encoder].data)
            filled.append(name)
    if filled:
        logging.info(
            "%d weights of momentum encoders are not in the checkpoint and start as copies of the "
            "encoders, such as %s",
            len(filled),
            min(filled),
        )


def load_state(
    model: torch.nn.Module, state: dict[str, Tensor], origin: str, say_dropped: bool = True
) -> Any:
    """Load the weights that fit, with position embeddings resized to the model's image size.

    ALBEF's pre-training models have BERT under ``text_encoder.bert.``, its retrieval models under
    ``text_encoder.``; both are understood. Token types that the model lacks become part of its
    positions, see `_fold_token_types`.

    Args:
        say_dropped: log the weights of the file that the model lacks.

    Returns:
        Missing and unexpected keys, as returned by ``load_state_dict``.

    Raises:
        ValueError: if no weight fits, or shapes or kinds of numbers differ.
    """
    own = model.state_dict()
    problem = problem_of_state(state, origin)
    if problem:
        raise ValueError(problem)
    state = _fold_token_types(state, own)
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
    wrong += _other_depths(state, own)
    if wrong:
        raise ValueError(
            f"{origin} was saved by a model of other sizes:\n  " + "\n  ".join(wrong[:10])
        )
    problem = problem_of_types(state, own)
    if problem:
        raise ValueError(f"{origin} cannot be loaded: {problem}")
    if not own.keys() & state.keys():
        begins = f" begin with {min(state)[:120]!r}, expected such as" if state else " are none:"
        raise ValueError(
            f"{origin} holds no weight of {type(model).__name__}: its names{begins} "
            f"{min(own)!r}. Save its weights under these names, as {{'model': state_dict}}"
        )
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
    if say_dropped:
        _say_dropped(model, result.unexpected_keys, origin)
    return result


def _other_depths(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Describe each encoder whose number of layers differs between a file and the model."""
    counts: list[dict[str, int]] = [{}, {}]
    for names, count in zip((state, own), counts, strict=True):
        for match in filter(None, map(_LAYER.match, names)):
            count[match[1]] = max(count.get(match[1], 0), int(match[2]) + 1)
    return [
        f"{part}: {counts[0][part]} layers in the file, {number} in the model"
        for part, number in counts[1].items()
        if counts[0].get(part, number) != number
    ]


def _say_dropped(model: Any, keys: Collection[str], origin: str) -> None:
    """Log the weights of a file that a model lacks, by their first word."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        if not key.endswith("position_ids"):  # a constant that some versions save
            groups.setdefault(key.split(".")[0], []).append(key)
    if groups:
        logging.warning(
            "%d weights of %s are dropped, because %s lacks them: %s",
            sum(map(len, groups.values())),
            origin,
            type(model).__name__,
            "; ".join(
                f"{name} ({len(one)}, such as {one[0]})" if one != [name] else name
                for name, one in groups.items()
            ),
        )


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
        if name.startswith(parts) and not name.startswith(_LANGUAGE_HEADS):
            lost.setdefault(name.split(".")[0], []).append(name)
    if lost:
        lines = [f"{part}: {len(names)}, such as {names[0]}" for part, names in lost.items()]
        count = sum(map(len, lost.values()))
        raise ValueError("\n  ".join([f"{problem} lacks {count} weights:", *lines]) + f"\n{cure}")


def resize_positions(encoder: Any, state: dict[str, Tensor]) -> None:
    """Resize the position embeddings in an image encoder's state to its image size, in place."""
    if "positional_embedding" in state and hasattr(encoder, "positional_embedding"):
        clip_vit.interpolate_pos_embed(encoder, state)
    elif getattr(state.get("pos_embed"), "ndim", 0) == 3 and hasattr(encoder, "pos_embed"):
        state["pos_embed"] = interpolate_pos_embed(state["pos_embed"], encoder)


def _own_name(key: str, own: Container[str]) -> str:
    part = key.split(".", 1)[0] + "."
    if key in own or part not in ("text_encoder.", "text_encoder_m."):
        return key
    longer = key.replace(part, f"{part}bert.", 1)
    shorter = key.replace(f"{part}bert.", part, 1)
    return next((name for name in (longer, shorter) if name in own), key)
