"""Momentum encoders, the queue of their features, and their part in a step (ALBEF 3.1, 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lavis_mafa.algorithm.backbone import Backbone, Images, Teacher, Texts
from lavis_mafa.algorithm.cached_batch import in_chunks
from lavis_mafa.algorithm.context import (
    NO_GROUP,
    Compared,
    MiniBatch,
    MomentumView,
    of_one_group,
)
from lavis_mafa.algorithm.pair_memory import MovingCopies, ring_places
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.tokens import captions_of

PARTS = ("visual_encoder", "text_encoder", "vision_proj", "text_proj")
SECOND_VIEW = "image_view2"  # key of a second augmentation of a mini-batch's images
NO_IMAGE = -100  # image id of empty places in the queue, as in LAVIS
GROUP_QUEUE = "group_queue"  # buffer of the queue's groups, which LAVIS does not have
RAMP_EPOCHS = 2.0  # epochs until the weight of the soft labels is alpha, as in LAVIS


class Momentum(MovingCopies):
    """Exponential moving averages of a model's encoders, and a queue of their features.

    The copies and the queue are parts of the model, under LAVIS's names (``visual_encoder_m``, ...,
    ``image_queue``, ``text_queue``, ``idx_queue``, ``queue_ptr``), and are saved with it. Where
    the data have groups the model has a buffer ``group_queue`` as well.

    Args:
        model: a model with the attributes in `PARTS`.
        drive: a function from such a model to its driver.
        width: E, the width of the features.
        queue_size: number of features of each modality in the queue, which need not be a multiple
            of the batch size. 0: no queue, only momentum features of the mini-batch (MDNQ, MAFA
            Table 17).
        rate: share of a copy that is kept at each step, 0 to 1 (0.995).
        alpha: weight of the soft labels, 0 to 1 (0.4).
        ramp_epochs: number of epochs in which their weight grows from 0 to alpha: 1 in ALBEF's
            pre-training, 2 in LAVIS and BLIP; 0: alpha from the start.

    Attributes:
        cached_batch: number of pairs that the copies encode at a time; None: a whole mini-batch.
    """

    cached_batch: int | None = None

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

    def queue_groups(self) -> None:
        """Queue the groups of pairs as well; pairs that are queued already count as ungrouped."""
        if not hasattr(self.model, GROUP_QUEUE):
            groups = torch.full_like(self.model.idx_queue, NO_GROUP)
            self.model.register_buffer(GROUP_QUEUE, groups)

    @torch.no_grad()
    def encode(self, samples: Mapping[str, Any]) -> tuple[Images, Texts]:
        """Update the copies, then encode images and captions with them."""
        self.move()
        backbone = in_chunks(self.backbone, self.cached_batch)
        images = backbone.encode_images(samples["image"])
        return images, backbone.encode_texts(captions_of(samples))

    @torch.no_grad()
    def _enqueue(
        self,
        images: Tensor,
        texts: Tensor,
        image_ids: Tensor | None = None,
        group_ids: Tensor | None = None,
    ) -> None:
        """Replace the oldest features in the queue with the new features of all ranks.

        All ranks have the same queue, whether or not candidates come from all of them.

        Args:
            images, texts: ``(B, E)`` of this rank.
            image_ids, group_ids: ``(B,)``; None if unknown.
        """
        if not self.queue_size:
            return
        ranks = Ranks(together=True)
        images, texts = ranks.gather(images), ranks.gather(texts)
        if image_ids is None:
            image_ids = torch.full((len(images),), NO_IMAGE, device=images.device)
        else:
            image_ids = ranks.gather(image_ids)
        if group_ids is not None:
            self.queue_groups()
            group_ids = ranks.gather(group_ids)
        model, count = self.model, min(len(images), self.queue_size)
        places, following = ring_places(int(model.queue_ptr), count, self.queue_size, images.device)
        model.image_queue[:, places] = images[:count].t().to(model.image_queue.dtype)
        model.text_queue[:, places] = texts[:count].t().to(model.text_queue.dtype)
        model.idx_queue[0, places] = image_ids[:count]
        if hasattr(model, GROUP_QUEUE):
            groups = getattr(model, GROUP_QUEUE)
            groups[0, places] = NO_GROUP if group_ids is None else group_ids[:count]
        model.queue_ptr[0] = following

    def compare(self, batch: MiniBatch) -> Compared:
        """Compare a mini-batch with the momentum features of all candidates and of the queue.

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
            alpha, teacher = self._weight(samples), None
            if alpha and batch.settings.loss_weights.get("lm"):
                teacher = Teacher(self.backbone, batch.ranks.images(copied_images), alpha)
            # Copies: `_enqueue` overwrites the queue before the backward pass reads them.
            all_images = torch.cat([batch.ranks.gather(own_images), self.model.image_queue.t()])
            all_texts = torch.cat([batch.ranks.gather(own_texts), self.model.text_queue.t()])
            own_ids = queued_positives = None
            if batch.settings.same_image == "positive" and "image_id" in batch.numbers:
                own_ids = batch.numbers["image_id"][batch.own]
                queued_positives = own_ids[:, None] == self.model.idx_queue
            groups = batch.own_groups
            queued_positives, queued_dropped = self._with_groups(
                queued_positives, groups, batch.settings.same_group
            )
            self._enqueue(own_images, own_texts, own_ids, groups)
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
            queued_dropped,
        )

    def _with_groups(
        self, positives: Tensor | None, groups: Tensor | None, same_group: str
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return which entries of the queue ``(B, Q)`` are positives, and which are dropped.

        Args:
            positives: ``(B, Q)`` positives by image; None if images are unknown.
            groups: ``(B,)`` groups of the anchors; None if groups have no effect.
            same_group: see `lavis_mafa.algorithm.settings.StepSettings`.
        """
        queued = getattr(self.model, GROUP_QUEUE, None)
        if groups is None or queued is None:
            return positives, None
        mates = of_one_group(groups, queued[0])
        if same_group == "positive":
            return mates if positives is None else positives | mates, None
        return positives, mates if positives is None else mates & ~positives

    def _weight(self, samples: Mapping[str, Any]) -> float:
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
        if name.startswith("_"):  # `copy` looks up such names before the model is set
            raise AttributeError(name)
        return getattr(self._model, f"{name}_m" if name in PARTS else name)
