"""Momentum encoders, the queue of their features and what they add to a step (ALBEF 3.1, 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lavis_mafa.algorithm.backbone import Backbone, Images, Teacher, Texts
from lavis_mafa.algorithm.context import Compared, MiniBatch, MomentumView
from lavis_mafa.algorithm.pair_memory import MovingCopies, ring_places
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.tokens import captions_of

PARTS = ("visual_encoder", "text_encoder", "vision_proj", "text_proj")
SECOND_VIEW = "image_view2"  # key of other augmentations of a mini-batch's images
NO_IMAGE = -100  # image id of empty places in the queue, as in LAVIS
RAMP_EPOCHS = 2.0  # over which the weight of the soft labels grows to alpha, as in LAVIS


class Momentum(MovingCopies):
    """Exponential moving averages of a model's encoders, and a queue of their features.

    The copies and the queue are parts of the model, under LAVIS's names (``visual_encoder_m``, ...,
    ``image_queue``, ``text_queue``, ``idx_queue``, ``queue_ptr``), and are saved with it.

    Args:
        model: has `PARTS`.
        drive: returns the backbone that drives a model with these parts.
        width: of the features, E.
        queue_size: features kept of each modality, in any proportion to the batch size. 0: no
            queue, only momentum features of the mini-batch (MDNQ, MAFA Table 17).
        rate: share of a copy that is kept at each step, 0 to 1 (0.995).
        alpha: weight of the soft labels, 0 to 1 (0.4).
        ramp_epochs: first epochs over which their weight grows from 0 to alpha: 1 in ALBEF's
            pre-training, 2 in LAVIS and BLIP; 0: it is alpha from the start.
    """

    def __init__(
        self,
        model: Any,
        drive: Callable[[Any], Backbone],
        width: int,
        queue_size: int,
        rate: float = 0.995,
        alpha: float = 0.4,
        ramp_epochs: float = RAMP_EPOCHS,
    ) -> None:
        super().__init__(model, PARTS, rate)
        self.alpha, self.queue_size, self.ramp_epochs = alpha, queue_size, ramp_epochs
        for name in ("image_queue", "text_queue"):
            model.register_buffer(name, F.normalize(torch.randn(width, queue_size), dim=0))
        model.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        model.register_buffer("idx_queue", torch.full((1, queue_size), NO_IMAGE))
        self.backbone: Backbone = drive(_Copies(model))

    @torch.no_grad()
    def encode(self, samples: Mapping[str, Any]) -> tuple[Images, Texts]:
        """Update the copies, then encode images and captions with them."""
        self.move()
        images = self.backbone.encode_images(samples["image"])
        return images, self.backbone.encode_texts(captions_of(samples))

    def queued(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return features ``(Q, E)`` of earlier images and captions, and ``(Q,)`` image ids."""
        model = self.model
        # Copies: `enqueue` overwrites the queue before the backward pass reads them.
        return (
            model.image_queue.t().clone(),
            model.text_queue.t().clone(),
            model.idx_queue[0].clone(),
        )

    @torch.no_grad()
    def enqueue(self, images: Tensor, texts: Tensor, image_ids: Tensor | None = None) -> None:
        """Replace the oldest features in the queue with those of all ranks.

        There is one queue for all ranks, whether or not candidates come from all of them.

        Args:
            images, texts: ``(B, E)`` of this rank.
            image_ids: ``(B,)``; None if unknown.
        """
        if not self.queue_size:
            return
        ranks = Ranks(together=True)
        images, texts = ranks.gather(images), ranks.gather(texts)
        if image_ids is None:
            image_ids = torch.full((len(images),), NO_IMAGE, device=images.device)
        else:
            image_ids = ranks.gather(image_ids)
        model, count = self.model, min(len(images), self.queue_size)
        places, following = ring_places(int(model.queue_ptr), count, self.queue_size, images.device)
        model.image_queue[:, places] = images[:count].t().to(model.image_queue.dtype)
        model.text_queue[:, places] = texts[:count].t().to(model.text_queue.dtype)
        model.idx_queue[0, places] = image_ids[:count]
        model.queue_ptr[0] = following

    def compare(self, batch: MiniBatch) -> Compared:
        """Compare a mini-batch with what the momentum encoders make of all candidates.

        The momentum encoders' own similarities give the soft labels (ALBEF eq. 6).
        """
        similarity, temperature = batch.backbone.similarity, batch.temperature
        images, texts = batch.features()
        with torch.no_grad():
            samples = batch.samples
            seen = {**samples, "image": samples.get(SECOND_VIEW, samples["image"])}
            copied_images, copied_texts = self.encode(seen)
            own_images, own_texts = copied_images.features, copied_texts.features
            assert own_images is not None and own_texts is not None
            alpha, teacher = self.weight(samples), None
            if alpha and batch.settings.loss_weights.get("lm"):
                teacher = Teacher(self.backbone, batch.ranks.images(copied_images), alpha)
            queued_images, queued_texts, queued_ids = self.queued()
            all_images = torch.cat([batch.ranks.gather(own_images), queued_images])
            all_texts = torch.cat([batch.ranks.gather(own_texts), queued_texts])
            own_ids = queued_positives = None
            if batch.settings.same_image == "positive" and "image_id" in batch.numbers:
                own_ids = batch.numbers["image_id"][batch.own]
                queued_positives = own_ids[:, None] == queued_ids[None]
            self.enqueue(own_images, own_texts, own_ids)
            soft_i2t = similarity(own_images, all_texts) / temperature
            soft_t2i = similarity(all_images, own_texts).t() / temperature
        return Compared(
            similarity(images, all_texts) / temperature,
            similarity(all_images, texts).t() / temperature,
            soft_i2t,
            soft_t2i,
            alpha,
            queued_positives,
            MomentumView(
                self.backbone, copied_images, copied_texts, all_images, all_texts, teacher
            ),
        )

    def weight(self, samples: Mapping[str, Any]) -> float:
        """Return the weight of the soft labels; it grows to alpha over ``ramp_epochs``."""
        steps: int = samples.get("num_iters_per_epoch", 1)
        done: int = samples.get("epoch", 0) * steps + samples.get("iters", 0)
        ramp = self.ramp_epochs * steps
        return self.alpha * (min(1.0, done / ramp) if ramp else 1.0)


class _Copies:
    """A view of a model whose encoders are replaced by their momentum copies."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `copy` looks such names up before there is a model
            raise AttributeError(name)
        return getattr(self._model, f"{name}_m" if name in PARTS else name)
