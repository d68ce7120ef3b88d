"""The input of every loss: what one step encoded, compared and found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lavis_mafa.algorithm.context import Compared, MiniBatch
from lavis_mafa.algorithm.mining import Connections
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

    @property
    def soft_labels_active(self) -> bool:
        """Return whether the labels of ITC are soft in this epoch, see `SoftLabels.active`."""
        samples = self.batch.samples
        epoch, grouped = samples.get("epoch", 0), bool(samples.get("grouped", True))
        return self.settings.soft_labels.active(epoch, grouped)
