"""The input of every loss: what one step encoded, compared and found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.backbone import Teacher
from lavis_mafa.algorithm.context import Compared, MiniBatch
from lavis_mafa.algorithm.mining import Connections
from lavis_mafa.algorithm.pickers import NONE
from lavis_mafa.algorithm.settings import StepSettings


@dataclass
class StepContext:
    """Everything that a loss may need.

    Attributes:
        batch: the encoded mini-batch.
        compared: the similarities.
        i2t, t2i: the hard negatives of images and of texts, with Con-D's verdicts.
        soft_label, extra_loss, form: parts of ITC, see `lavis_mafa.algorithm.parts.StepParts`.
    """

    batch: MiniBatch
    compared: Compared
    i2t: Connections
    t2i: Connections
    soft_label: Callable[..., Tensor]
    extra_loss: Callable[..., Tensor] | None
    form: Callable[..., Tensor]

    @property
    def settings(self) -> StepSettings:
        """The settings of the step."""
        settings: StepSettings = self.batch.settings
        return settings

    @cached_property
    def itm_pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Images, texts and labels ``(P,)`` of ITM's pairs: own, and hard negatives of both
        directions."""
        own, rule, number = self.batch.own, self.settings.connections, self.batch.candidates_of
        image_anchors, texts_picked, labels_i2t = self.i2t.itm_pairs(rule)
        text_anchors, images_picked, labels_t2i = self.t2i.itm_pairs(rule)
        labels = torch.ones_like(own), labels_i2t, labels_t2i
        return (
            torch.cat([own, number(image_anchors), images_picked]),
            torch.cat([own, texts_picked, number(text_anchors)]),
            torch.cat(labels).float(),
        )

    @cached_property
    def language_pairs(self) -> tuple[Tensor, Tensor]:
        """Images and texts ``(P,)`` of the language loss: own pairs and mined positives."""
        batch, rule = self.batch, self.settings.connections
        own = batch.own
        image_anchors, texts_mined = self.i2t.mined(rule)
        text_anchors, images_mined = self.t2i.mined(rule)
        images, texts = map(batch.candidates_of, (image_anchors, text_anchors))
        # D_MLM is a set (MAFA Algorithm 1): a pair that both its image and its text found enters
        # once, with its image. A pair's number is image * C + text.
        if rule.uses("lm"):
            from_images = images * batch.count + texts_mined
            # Gathering needs equal sizes on all ranks.
            missing = len(self.i2t.hard) - len(from_images)
            from_images = batch.ranks.gather(F.pad(from_images, (0, missing), value=NONE))
            if len(images_mined):
                new = ~torch.isin(images_mined * batch.count + texts, from_images)
                rows = torch.nonzero(new).flatten()
                texts, images_mined = texts[rows], images_mined[rows]
        return torch.cat([own, images, images_mined]), torch.cat([own, texts_mined, texts])

    @cached_property
    def matched_and_predicted(self) -> tuple[Tensor, Tensor] | None:
        """ITM logits and language losses in one pass; None if a loss is off or the family's
        passes differ."""
        weights, batch = self.settings.loss_weights, self.batch
        together = getattr(batch.backbone, "match_and_predict", None)
        if together is None or not (weights.get("itm") and weights.get("lm")):
            return None
        both: tuple[Tensor, Tensor] = together(
            batch.images, batch.texts, self.itm_pairs[:2], self.language_pairs, self.teacher
        )
        return both

    @property
    def teacher(self) -> Teacher | None:
        """Of the language loss; None: without momentum encoders."""
        view = self.compared.momentum
        return None if view is None else view.teacher
