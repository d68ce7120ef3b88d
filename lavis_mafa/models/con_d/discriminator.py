"""Con-D: the frozen discriminator that detects hard negatives which match (MAFA 4.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lavis_mafa.algorithm.backbone import Images, Texts
from lavis_mafa.algorithm.discriminator import VIEW, Discriminator, Truth
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.registry import Registry, Section
from lavis_mafa.algorithm.tokens import CON_D_TOKENS, captions_of
from lavis_mafa.models.con_d.settings import ConDSettings
from lavis_mafa.models.families import backbone_of
from lavis_mafa.models.families.base import image_size_of

# Discriminators that are no LAVIS models, for ``model.mafa.con_d.arch``: classes that implement
# `Discriminator`, constructed without arguments or with an object of their settings class.
DISCRIMINATORS: Registry[Callable[..., Discriminator]] = Registry(
    "discriminator", Section("model.mafa.con_d", [one.name for one in fields(ConDSettings)])
)


class Kept(Protocol):
    """A cache of an image encoder's outputs, such as `KeptRows`."""

    def get(self, image_ids: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``(B, S, V)`` of images by id ``(B,)``; ``make`` computes those that are not
        cached, given their places in the mini-batch."""


class ModelDiscriminator:
    """Con-D as a LAVIS model with an ITM head: frozen, in evaluation and inference mode.

    The model keeps its own tokenizer and image size; if a mini-batch has no images of that size,
    those of the model in training are resized. It is not part of the training model's parameters
    and checkpoints.

    Args:
        model: a LAVIS model of any family that `backbone_of` knows.
        precision: ``fp32``, or ``bf16``: autocast, with weights stored in bf16 if autocast would
            convert them.
        processor: creates the model's input from a picture; None: it has no view of its own.
        own_view: whether to use ``processor`` on the decoded picture; None: only if the training
            model has another image size.

    Attributes:
        shares_encoder: whether its image encoder is the training model's, see `share_encoder`.
        kept: a cache of its image encoder's outputs by ``image_id``; None: the image encoder runs
            for every mini-batch.

    Raises:
        TypeError: if no backbone can drive the model.
    """

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
        self.image_size = image_size_of(model)
        self.shares_encoder = False
        self.kept: Kept | None = None
        _forget_momentum(model)
        if precision == "bf16":
            _keep_in_bf16(model)

    def wants_view(self, model: Any) -> bool:
        """Return whether mini-batches of the model in training need images in Con-D's own view."""
        if self.processor is None or self._own_view is not None:
            return bool(self._own_view and self.processor)
        return self.image_size != image_size_of(model)

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
        if type(theirs) is not type(own) or image_size_of(model) != self.image_size:
            return False
        mine, other = own.state_dict(), theirs.state_dict()
        if mine.keys() != other.keys() or not all(
            _equal(value.cpu(), other[key].cpu()) for key, value in mine.items()
        ):
            return False
        self.model.visual_encoder = theirs
        self.shares_encoder = True
        return True

    def judge(
        self,
        samples: dict[str, Any],
        image_of: Tensor,
        text_of: Tensor,
        ranks: Ranks | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        ranks = ranks or Ranks(together=False)
        images = samples.get(VIEW, samples["image"])
        device = images.device
        if next(self.model.parameters()).device != device:
            self.model.to(device)
        if not self.shares_encoder:
            seen = None
        elif any(weight.requires_grad for weight in self.model.visual_encoder.parameters()):
            raise RuntimeError(
                "Con-D shares the image encoder of the model in training, which is no longer "
                "frozen: Con-D would change with it; set model.freeze_vit before training"
            )
        with torch.inference_mode():
            if seen is None and self.image_size not in (None, images.shape[-1]):
                size = (self.image_size, self.image_size)
                images = F.interpolate(
                    images, size, mode="bicubic", align_corners=False, antialias=True
                )
            with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                if seen is None and self.kept is not None and "image_id" in samples:
                    own = ranks.own(len(images), device)  # image_id is that of all ranks
                    ids = samples["image_id"][own]
                    seen = self.kept.get(
                        ids, lambda which: self.backbone.image_tokens(images[which])
                    )
                encoded = self.backbone.encode_images(images, seen, for_matching=True)
                captions = captions_of(samples, CON_D_TOKENS)
                texts = self.backbone.encode_texts(captions, for_matching=True)
                encoded, texts = ranks.images(encoded), ranks.texts(texts)
                logits = self._match(encoded, texts, image_of, text_of)
        # Cloned outside, because autograd cannot save tensors of inference mode.
        return torch.softmax(logits.clone().float(), dim=1)[:, 1]

    def _match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        if not len(image_of):
            return images.embeds.new_zeros(0, 2)
        return self.backbone.match(images, texts, image_of, text_of)


def _equal(own: Tensor, theirs: Tensor) -> bool:
    if own.dtype is torch.bfloat16 and theirs.dtype is torch.float32:
        theirs = theirs.to(torch.bfloat16)
    return own.dtype == theirs.dtype and torch.equal(own, theirs)


def _keep_in_bf16(part: nn.Module) -> None:
    """Store in bf16 the weights that autocast would convert at every step anyway."""
    # Except a language head's that are an embedding's too, which autocast does not convert.
    embedded = {id(m.weight) for m in part.modules() if isinstance(m, nn.Embedding)}
    for module in part.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and module.weight.dtype is torch.float32:
            if id(module.weight) not in embedded:
                module.to(torch.bfloat16)


def _forget_momentum(model: Any) -> None:
    """Delete momentum encoders and queues, half of a retrieval model, unused when judging."""
    for name in [name for name, _ in model.named_children() if name.endswith("_m")]:
        delattr(model, name)
    for name in ("image_queue", "text_queue", "idx_queue", "queue_ptr", "model_pairs"):
        if hasattr(model, name):
            delattr(model, name)


@DISCRIMINATORS.register("oracle", source="lavis_mafa")
class Oracle:
    """A Con-D that returns the ground truth of a data set that has it, such as ``toy_scenes``."""

    needs_self_check = False  # the truth about random pairs needs no check

    def __init__(self) -> None:
        self.truth: Truth | None = None

    def judge(
        self,
        samples: dict[str, Any],
        image_of: Tensor,
        text_of: Tensor,
        ranks: Ranks | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        if self.truth is None:
            raise RuntimeError(
                "the oracle needs a training set whose truth is known (toy_scenes, or a local "
                "builder with build_info.truth); use a model as model.mafa.con_d, or such data"
            )
        numbers = samples["loaded_index"].cpu().numpy()
        valid = self.truth(numbers[image_of.cpu().numpy()], numbers[text_of.cpu().numpy()])
        return torch.from_numpy(np.asarray(valid)).float().to(image_of.device)
