"""Frozen LAVIS models next to the model in training: Con-D and the encoder of hard negatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lavis_mafa.algorithm.backbone import Backbone, backbone_of
from lavis_mafa.algorithm.cached_batch import in_chunks

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
FROZEN_MODELS = ("con_d", "negatives_encoder")  # keys of ``model.mafa``, attributes of a model


class ModelBeside:
    """A model next to the one in training, which is neither trained nor saved with it.

    Attributes:
        key: its place in a config.
        title: for messages.
        view: key of a mini-batch's images made for this model.
        needs_view: whether it cannot use the images of the model in training.
        model: its weights.
        precision: ``fp32`` or ``bf16``.
        processor: creates its input from a picture; None: it has no view of its own.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    view: ClassVar[str]
    needs_view: ClassVar[bool] = False
    model: Any
    precision: str
    processor: Callable[[Any], Tensor] | None

    def wants_view(self, model: Any) -> bool:
        """Return whether mini-batches of the model in training need images in this one's view."""
        raise NotImplementedError

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the mixed precision that the model computes in."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16")


class FrozenModel(ModelBeside):
    """A LAVIS model in evaluation mode whose weights get no gradients.

    The model keeps its own tokenizer and image size; if a mini-batch has no images of that size,
    the images of the model in training are resized. It is not part of the training model's
    parameters and checkpoints.

    Args:
        model: a LAVIS model of any family that `backbone_of` knows.
        precision: ``fp32``, or ``bf16``: autocast, with weights stored in bf16 if autocast would
            convert them.
        processor: creates the model's input from a picture; None: it has no view of its own.
        own_view: whether to use ``processor`` on the decoded picture; None: only if the training
            model has another image size.

    Attributes:
        parts: prefixes of the weights that a checkpoint of it must have.
        purpose, trained: what the model does, and what it must have for that, for messages.
        tokens: key of a mini-batch's captions made for this model.
        shares_encoder: whether its image encoder is the training model's, see `share_encoder`.
        cached_batch: pairs that it computes at a time; None: all of a mini-batch.

    Raises:
        TypeError: if no backbone can drive the model.
    """

    parts: ClassVar[tuple[str, ...]]
    purpose: ClassVar[str]
    trained: ClassVar[str]
    tokens: ClassVar[str]
    cached_batch: int | None = None

    def __init__(
        self,
        model: Any,
        precision: str = "fp32",
        processor: Callable[[Any], Tensor] | None = None,
        own_view: bool | None = None,
    ) -> None:
        self.backbone = backbone_of(model)
        self.model = model.eval().requires_grad_(False)
        self.precision = precision
        self.processor = processor
        self._own_view = own_view
        self.image_size = _image_size_of(model)
        self.shares_encoder = False
        _forget_momentum(model)
        if precision == "bf16":
            keep_in_bf16(model)

    @property
    def step_backbone(self) -> Backbone:
        """The backbone, in chunks of ``cached_batch`` pairs if that is set."""
        return in_chunks(self.backbone, self.cached_batch)

    def wants_view(self, model: Any) -> bool:
        """Return whether mini-batches of the model in training need images in this one's view."""
        if self.processor is None or self._own_view is not None:
            return bool(self._own_view and self.processor)
        return self.image_size != _image_size_of(model)

    def share_encoder(self, model: Any) -> bool:
        """Use the image encoder of the model in training if it is frozen and equal, so that it
        runs once per mini-batch and is in memory once.

        Equal means: same images, same class, same sizes, and equal weights in the same type, or in
        fp32 if this one was converted from fp32 to bf16.

        Returns:
            Whether it is shared.
        """
        theirs, own = model.visual_encoder, self.model.visual_encoder
        if self.wants_view(model) or any(w.requires_grad for w in theirs.parameters()):
            return False
        if type(theirs) is not type(own) or _image_size_of(model) != self.image_size:
            return False
        mine, other = own.state_dict(), theirs.state_dict()
        if mine.keys() != other.keys() or not all(
            _equal(value.cpu(), other[key].cpu()) for key, value in mine.items()
        ):
            return False
        self.model.visual_encoder = theirs
        self.shares_encoder = True
        return True

    def _inputs(self, samples: dict[str, Any], seen: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return a mini-batch's images in this model's size, and what its image encoder makes of
        them if the model in training has computed that; move the model to their device.

        Args:
            seen: ``(B, S, V)`` output of the image encoder of the model in training.

        Raises:
            RuntimeError: if that image encoder is shared and no longer frozen.
        """
        images = samples.get(self.view, samples["image"])
        if next(self.model.parameters()).device != images.device:
            self.model.to(images.device)
        if not self.shares_encoder:
            seen = None
        elif any(weight.requires_grad for weight in self.model.visual_encoder.parameters()):
            raise RuntimeError(
                f"{self.title} shares the image encoder of the model in training, which is not "
                f"frozen now: {self.title} would change with it; set model.freeze_vit before "
                "training"
            )
        if seen is None and self.image_size not in (None, images.shape[-1]):
            size = (self.image_size, self.image_size)
            images = F.interpolate(
                images, size, mode="bicubic", align_corners=False, antialias=True
            )
        return images, seen


def models_beside(model: Any) -> list[ModelBeside]:
    """Return the frozen models of every kind that a model in training uses."""
    named = (getattr(model, name, None) for name in FROZEN_MODELS)
    return [one for one in named if isinstance(one, ModelBeside)]


def frozen_models(model: Any) -> list[FrozenModel]:
    """Return the frozen LAVIS models that a model in training uses."""
    return [one for one in models_beside(model) if isinstance(one, FrozenModel)]


def _equal(own: Tensor, theirs: Tensor) -> bool:
    if own.dtype is torch.bfloat16 and theirs.dtype is torch.float32:
        theirs = theirs.to(torch.bfloat16)
    return own.dtype == theirs.dtype and torch.equal(own, theirs)


def keep_in_bf16(part: nn.Module) -> None:
    """Store in bf16 the weights that autocast would convert at every step anyway."""
    # Except a language head's that are an embedding's too, which autocast does not convert.
    embedded = {id(m.weight) for m in part.modules() if isinstance(m, nn.Embedding)}
    for module in part.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and module.weight.dtype is torch.float32:
            if id(module.weight) not in embedded:
                module.to(torch.bfloat16)


def _image_size_of(model: Any) -> int | None:
    # Imported here: the judges of captions and of texts work without LAVIS.
    from lavis_mafa.compat.traits import image_size_of

    return image_size_of(model)


def _forget_momentum(model: Any) -> None:
    """Delete momentum encoders and queues, half of a retrieval model, unused when judging."""
    for name in [name for name, _ in model.named_children() if name.endswith("_m")]:
        delattr(model, name)
    for name in (
        "image_queue",
        "text_queue",
        "idx_queue",
        "group_queue",
        "queue_ptr",
        "model_pairs",
    ):
        if hasattr(model, name):
            delattr(model, name)
