"""Momentum encoders and the queue of their features (ALBEF 3.1 and 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lavis_mafa.algorithm.backbone import Backbone, Images, Texts
from lavis_mafa.algorithm.pair_memory import MovingCopies
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.tokens import captions_of

PARTS = ("visual_encoder", "text_encoder", "vision_proj", "text_proj")
NO_IMAGE = -100  # LAVIS's filling of the queue of image ids
RAMP_EPOCHS = 2  # over which the weight of the soft labels grows to alpha


class Momentum(MovingCopies):
    """Slowly moving copies of a model's encoders, and a queue of features that they gave.

    The copies and the queue belong to the model, under LAVIS's names (``visual_encoder_m``, ...,
    ``image_queue``, ``text_queue``, ``idx_queue``, ``queue_ptr``), and are saved with it.

    Args:
        model: has `PARTS`.
        drive: gives the backbone that drives a model with these parts.
        width: of the features, E.
        queue_size: features kept of each modality; any number, no multiple of the batch. 0: no
            queue, momentum features of the mini-batch alone (MDNQ, MAFA Table 17).
        rate: share of a copy that is kept at each step, 0 to 1 (0.995).
        alpha: weight of the soft labels, 0 to 1 (0.4).
    """

    def __init__(
        self,
        model: Any,
        drive: Callable[[Any], Backbone],
        width: int,
        queue_size: int,
        rate: float = 0.995,
        alpha: float = 0.4,
    ) -> None:
        super().__init__(model, PARTS, rate)
        self.alpha, self.queue_size = alpha, queue_size
        for name in ("image_queue", "text_queue"):
            model.register_buffer(name, F.normalize(torch.randn(width, queue_size), dim=0))
        model.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        model.register_buffer("idx_queue", torch.full((1, queue_size), NO_IMAGE))
        self.backbone: Backbone = drive(_Copies(model))

    @torch.no_grad()
    def encode(self, samples: Mapping[str, Any]) -> tuple[Images, Texts]:
        """Move the copies, then encode images and captions with them."""
        self.move()
        images = self.backbone.encode_images(samples["image"])
        return images, self.backbone.encode_texts(captions_of(samples))

    def queued(self) -> tuple[Tensor, Tensor, Tensor]:
        """Features ``(queue_size, E)`` of earlier images and captions, and their image ids."""
        model = self.model
        return (
            model.image_queue.t().clone(),
            model.text_queue.t().clone(),
            model.idx_queue[0].clone(),
        )

    @torch.no_grad()
    def enqueue(self, images: Tensor, texts: Tensor, image_ids: Tensor | None = None) -> None:
        """Put this rank's features ``(B, E)``, and those of all others, in the place of the oldest,
        with the ids ``(B,)`` of their images if these are known.

        Of all ranks whatever the candidates are: the queue is one for all.
        """
        if not self.queue_size:
            return
        ranks = Ranks(together=True)
        images, texts = ranks.gather(images), ranks.gather(texts)
        if image_ids is None:
            image_ids = torch.full((len(images),), NO_IMAGE, device=images.device)
        else:
            image_ids = ranks.gather(image_ids)
        images, texts = images[: self.queue_size], texts[: self.queue_size]
        begin = int(self.model.queue_ptr)
        places = (begin + torch.arange(len(images), device=images.device)) % self.queue_size
        self.model.image_queue[:, places] = images.t().to(self.model.image_queue.dtype)
        self.model.text_queue[:, places] = texts.t().to(self.model.text_queue.dtype)
        self.model.idx_queue[0, places] = image_ids[: self.queue_size]
        self.model.queue_ptr[0] = (begin + len(images)) % self.queue_size

    def weight(self, samples: Mapping[str, Any]) -> float:
        """Weight of the soft labels at a step: it grows to alpha over the first two epochs."""
        steps = samples.get("num_iters_per_epoch", 1)
        done = samples.get("epoch", 0) * steps + samples.get("iters", 0)
        return self.alpha * min(1.0, done / (RAMP_EPOCHS * steps))


class _Copies:
    """A model seen with its momentum copies in the place of its encoders."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked of a copy in the making, which has no model yet
            raise AttributeError(name)
        return getattr(self._model, f"{name}_m" if name in PARTS else name)
