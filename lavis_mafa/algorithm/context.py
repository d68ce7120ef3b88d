"""The data of one step: what was encoded and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.backbone import Backbone, Images, Teacher, Texts
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.tokens import captions_of

HARD_TEXTS = "hard_texts"  # key of samples: features (M, E) of texts that are in no pair
NO_GROUP = -1  # ``group_id`` of a pair that is in no group


def known_positives(
    numbers: Mapping[str, Tensor],
    own: Tensor,
    count: int,
    same_image: str = "positive",
    same_group: str = "dropped",
) -> Tensor:
    """Return which candidates ``(B, C)`` bool are known to match each anchor.

    These are its own pair, all pairs of its image (with ``same_image: positive``), and all pairs of
    its group (with ``same_group: positive``).

    Args:
        numbers: ``image_id`` and ``group_id`` ``(C,)`` of the candidates, where they are known.
        own: ``(B,)``, the anchors' numbers among the candidates.
        count: C, the number of candidates.
        same_image, same_group: see `StepSettings`.
    """
    positives = own[:, None] == torch.arange(count, device=own.device)
    if same_image == "positive" and "image_id" in numbers:
        ids = numbers["image_id"]
        positives = positives | (ids[own][:, None] == ids[None, :])
    if same_group == "positive" and "group_id" in numbers:
        positives = positives | of_one_group(numbers["group_id"][own], numbers["group_id"])
    return positives


def of_one_group(groups: Tensor, others: Tensor) -> Tensor:
    """Return which of N pairs ``(B, N)`` bool belong to the anchors' groups.

    Args:
        groups: ``(B,)`` int64 of the anchors; `NO_GROUP` matches nothing, not even itself.
        others: ``(N,)`` of the pairs.
    """
    return (groups[:, None] == others[None, :]) & (groups != NO_GROUP)[:, None]


@torch.no_grad()
def within_modalities(images: Tensor, texts: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return cosine similarities ``(B, C)`` of images to images and of texts to texts, float32.

    Args:
        images, texts: ``(B, E)`` vectors of this rank.
        ranks: the ranks whose vectors are the candidates; all of them must call this function.
    """
    images, texts = (F.normalize(one.float(), dim=-1) for one in (images, texts))
    return images @ ranks.gather(images).t(), texts @ ranks.gather(texts).t()


@dataclass
class MiniBatch:
    """A mini-batch after encoding: B pairs of this rank among the C candidates.

    Attributes:
        backbone: the model in training.
        settings: the step's `lavis_mafa.algorithm.settings.StepSettings`, which is not imported
            here because it would be a circular import by way of the scores.
        samples: the mini-batch as the data loader gave it.
        ranks: the ranks whose mini-batches are the candidates.
        own: ``(B,)`` numbers of this rank's pairs among the candidates.
        numbers: ``image_id``, ``loaded_index`` and ``group_id`` ``(C,)`` of the candidates, where
            known.
        own_images, own_texts: encoded images and texts of this rank, with gradients.
        images, texts: encoded images and texts of all candidates; with ``settings.detach_other``
            their features are detached.
    """

    backbone: Backbone
    settings: Any
    samples: Mapping[str, Any]
    ranks: Ranks
    own: Tensor
    numbers: dict[str, Tensor]
    own_images: Images
    own_texts: Texts
    images: Images
    texts: Texts

    @classmethod
    def encode(cls, backbone: Backbone, samples: Mapping[str, Any], settings: Any) -> MiniBatch:
        """Encode the mini-batch, once per modality, and gather the candidates of all ranks."""
        ranks = Ranks(settings.all_ranks)
        together = getattr(backbone, "encode_pairs", None)
        if together is not None and settings.loss_weights.get("lm"):
            images, texts = together(samples["image"], captions_of(samples))
        else:
            images = backbone.encode_images(samples["image"])
            texts = backbone.encode_texts(captions_of(samples))
        detach = settings.detach_other is not False
        own = ranks.own(len(texts.ids), images.embeds.device)
        return cls(
            backbone,
            settings,
            samples,
            ranks,
            own,
            _numbers(samples, ranks, own.device),
            images,
            texts,
            ranks.images(images, detach),
            ranks.texts(texts, detach),
        )

    @property
    def count(self) -> int:
        """C, the number of candidates."""
        return len(self.texts.ids)

    @cached_property
    def positives(self) -> Tensor:
        """`known_positives` ``(B, C)`` of this rank's pairs."""
        same_image, same_group = self.settings.same_image, self.settings.same_group
        return known_positives(self.numbers, self.own, self.count, same_image, same_group)

    @cached_property
    def own_groups(self) -> Tensor | None:
        """Groups ``(B,)`` of this rank's pairs; None if there are none, or they have no effect."""
        if self.settings.same_group == "negative" or "group_id" not in self.numbers:
            return None
        return self.numbers["group_id"][self.own]

    @cached_property
    def dropped(self) -> Tensor | None:
        """Candidates ``(B, C)`` bool that are left out of all losses, because they are of the
        anchor's group but not positives; None if there are no groups or groups are not dropped."""
        if self.own_groups is None or self.settings.same_group != "dropped":
            return None
        return of_one_group(self.own_groups, self.numbers["group_id"]) & ~self.positives

    @cached_property
    def never_negative(self) -> Tensor:
        """Candidates ``(B, C)`` bool that are not negatives: known positives and dropped
        candidates."""
        return self.positives if self.dropped is None else self.positives | self.dropped

    @property
    def temperature(self) -> Tensor:
        """The learnable temperature (scalar)."""
        return self.backbone.temperature

    def features(self) -> tuple[Tensor, Tensor]:
        """Return this rank's image and text features, ``(B, E)`` or ``(B, Q, E)``."""
        images, texts = self.own_images.features, self.own_texts.features
        assert images is not None and texts is not None, "encoded for matching only"
        return images, texts

    @cached_property
    def vectors(self) -> tuple[Tensor, Tensor]:
        """One vector ``(B, E)`` per image and per caption of this rank, detached."""
        return self.backbone.grit_vectors(self.own_images, self.own_texts)

    @cached_property
    def intra_modal(self) -> tuple[Tensor, Tensor]:
        """Cosine similarities ``(B, C)`` of this rank's images to the images of all candidates,
        and of its texts to their texts; detached.

        An image with several query features (BLIP-2) is represented by the one most similar to its
        own text, as in GRIT. The first access gathers over ranks, so all ranks must make it at the
        same point of the step.
        """
        return within_modalities(*self.vectors, self.ranks)

    def compare(self) -> Compared:
        """Compare this rank's images and texts with all candidates."""
        images, texts = self.features()
        assert self.images.features is not None and self.texts.features is not None
        similarity = self.backbone.similarity
        i2t = similarity(images, self.texts.features)
        t2i = similarity(self.images.features, texts).t()
        if HARD_TEXTS in self.samples:  # further columns, such as a queue's
            hard = self.ranks.gather(self.samples[HARD_TEXTS], with_grad=True)
            i2t = torch.cat([i2t, similarity(images, hard)], dim=1)
        return Compared(i2t / self.temperature, t2i / self.temperature)

    def candidates_of(self, anchors: Tensor) -> Tensor:
        """Return the numbers of anchors, 0 to B - 1, among the candidates."""
        return anchors if self.ranks.world == 1 else self.own[anchors]

    def zero_of_gathered(self) -> Tensor | None:
        """Return 0 that depends on all gathered embeddings; None in a single process.

        Gathering must take part in the backward pass on all ranks or on none: without this term, a
        rank whose losses use no other rank's embeddings would leave the others waiting.
        """
        if self.ranks.world == 1:
            return None
        embeds = [self.images.embeds, self.texts.embeds]
        return torch.stack([0.0 * e.float().sum() for e in embeds if e is not None]).sum()


def _numbers(samples: Mapping[str, Any], ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """Gather the ids and ``loaded_index`` of all candidates, where samples have them."""
    known = [name for name in ("image_id", "loaded_index", "group_id") if name in samples]
    if not known:
        return {}
    own = torch.stack([torch.as_tensor(samples[name]).to(device) for name in known], dim=1)
    return dict(zip(known, ranks.gather(own).unbind(dim=1), strict=True))


@dataclass
class MomentumView:
    """A mini-batch as momentum encoders see it.

    Attributes:
        backbone: the driver of the momentum encoders.
        images, texts: this rank's images and texts, encoded by them.
        all_images, all_texts: features ``(N, E)`` of all candidates, followed by the queue's.
        teacher: the teacher of the language loss; None if it does not learn from momentum encoders.
    """

    backbone: Backbone
    images: Images
    texts: Texts
    all_images: Tensor
    all_texts: Tensor
    teacher: Teacher | None = None


@dataclass
class Compared:
    """Similarities of the anchors to all candidates, divided by the temperature.

    The N columns are the C candidates of the mini-batches, then the Q entries of the queue.

    Attributes:
        i2t, t2i: ``(B, N)`` of images to texts and of texts to images.
        soft_i2t, soft_t2i: ``(B, N)`` from momentum encoders, to compute soft labels.
        alpha: weight of the soft labels.
        queued_positives: ``(B, Q)`` bool, which entries of the queue show the anchor's image.
        momentum: the mini-batch as the momentum encoders see it.
        queued_dropped: ``(B, Q)`` bool, which entries of the queue are left out, as in
            `MiniBatch.dropped`.
    """

    i2t: Tensor
    t2i: Tensor
    soft_i2t: Tensor | None = None
    soft_t2i: Tensor | None = None
    alpha: float = 0.0
    queued_positives: Tensor | None = None
    momentum: MomentumView | None = None
    queued_dropped: Tensor | None = None
