"""Losses that are called as open_clip's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lavis_mafa.algorithm.discriminator import Discriminator
from lavis_mafa.algorithm.features_step import PLAIN, FeaturesLoss
from lavis_mafa.algorithm.settings import StepSettings


class ClipLoss(FeaturesLoss):
    """ITC with any setting of this package, in place of ``open_clip.ClipLoss``.

    With the default settings it is ``open_clip.ClipLoss(local_loss=True, gather_with_grad=True)``.
    The candidates are those of all ranks.

    Args:
        settings: see docs/false_negatives.md.
        con_d: judges hard negatives, see `lavis_mafa.Discriminator`.
    """

    def __init__(self, settings: StepSettings = PLAIN, con_d: Discriminator | None = None) -> None:
        super().__init__(replace(settings, all_ranks=True), con_d)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        **samples: Any,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss of a mini-batch.

        Args:
            image_features, text_features: ``(B, E)``, normalised, as models return them.
            logit_scale: 1 / temperature, as models return it.
            logit_bias: used by `SigLipLoss`; it changes no softmax.
            output_dict: return ``{"contrastive_loss": loss}``.
            samples: optional keys of `lavis_mafa.run_step`, such as ``loaded_index``.

        Raises:
            ValueError: if `SigLipLoss` gets no ``logit_bias``.
        """
        self._use_bias(logit_scale, logit_bias)
        loss = self.loss(image_features, text_features, 1 / logit_scale, samples)
        return {"contrastive_loss": loss} if output_dict else loss

    def _use_bias(self, logit_scale: Tensor, logit_bias: Tensor | None) -> None:
        pass


class SigLipLoss(ClipLoss):
    """The same in place of ``open_clip.SigLipLoss``: a sigmoid a pair, with the model's bias."""

    def __init__(self, settings: StepSettings = PLAIN, con_d: Discriminator | None = None) -> None:
        super().__init__(replace(settings, itc_loss="sigmoid"), con_d)
        del self.parts.form.relative_bias  # type: ignore[attr-defined]

    def _use_bias(self, logit_scale: Tensor, logit_bias: Tensor | None) -> None:
        if logit_bias is None:
            raise ValueError("SigLipLoss needs logit_bias, which SigLIP's models return")
        # A logit is (cosine - bias of the form) / temperature.
        self.parts.form.relative_bias = -logit_bias / logit_scale  # type: ignore[attr-defined]
