"""Losses that stand in for open_clip's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lavis_mafa.algorithm.discriminator import Discriminator
from lavis_mafa.algorithm.features_step import PLAIN, FeaturesLoss
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.settings import StepSettings

# Keys of `lavis_mafa.run_step` that a loop may give with the features of a mini-batch.
SAMPLES = ("image_id", "group_id", "loaded_index", "epoch", "grouped", "text_input")


class ClipLoss(FeaturesLoss):
    """ITC with any setting of this package, in place of ``open_clip.ClipLoss``.

    With the default settings it is ``open_clip.ClipLoss(local_loss=True, gather_with_grad=True)``.
    The candidates are those of all ranks.

    Args:
        settings: see docs/false_negatives.md.
        judge: judges hard negatives, see `lavis_mafa.Discriminator`.
        local_loss, gather_with_grad, rank, world_size, use_horovod, dist_impl: as open_clip's
            ``create_loss`` gives them. On several ranks the first two must be set, and the ranks
            are those of torch.distributed.
        cache_labels: not needed here; there is nothing to cache.

    Raises:
        ValueError: if the arguments ask for a gathering that this loss does not have.
    """

    def __init__(
        self,
        settings: StepSettings = PLAIN,
        judge: Discriminator | None = None,
        *,
        local_loss: bool | None = None,
        gather_with_grad: bool | None = None,
        cache_labels: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        use_horovod: bool = False,
        dist_impl: str | None = None,
    ) -> None:
        super().__init__(replace(settings, all_ranks=True), judge)
        ranks = Ranks(together=True)
        if world_size not in (None, ranks.world) or rank not in (None, ranks.rank):
            raise ValueError(
                f"got rank {rank} of {world_size}, but torch.distributed has rank {ranks.rank} of "
                f"{ranks.world}: start the processes with torchrun"
            )
        if use_horovod or dist_impl == "horovod":
            raise ValueError("Horovod is not supported: start the processes with torchrun")
        if ranks.world > 1 and False in (local_loss, gather_with_grad):
            raise ValueError(
                "on several ranks each computes the loss of its own rows and candidates pass "
                "gradients: give --local-loss and --gather-with-grad"
            )

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        mines: bool = True,
        **samples: Any,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss of a mini-batch.

        Args:
            image_features, text_features: ``(B, E)``, normalised, as models return them.
            logit_scale: 1 / temperature, as models return it.
            logit_bias: used by `SigLipLoss`; it changes no softmax.
            output_dict: return ``{"contrastive_loss": loss}``.
            mines: whether the judge judges.
            samples: optional keys of `lavis_mafa.run_step`, see `SAMPLES`.

        Raises:
            TypeError: if a key of ``samples`` is unknown.
            ValueError: if `SigLipLoss` gets no ``logit_bias``.
        """
        unknown = sorted(samples.keys() - set(SAMPLES))
        if unknown:
            raise TypeError(f"got {', '.join(unknown)}, expected some of {', '.join(SAMPLES)}")
        scale = image_features.new_tensor(1.0) * logit_scale
        self._use_bias(scale, logit_bias)
        loss = self.loss(image_features, text_features, 1 / scale.reshape(()), samples, mines)
        if logit_bias is not None:
            # DDP waits for the gradients of all parameters, and this one changes no softmax.
            loss = loss + 0.0 * logit_bias.sum()
        return {"contrastive_loss": loss} if output_dict else loss

    def _use_bias(self, logit_scale: Tensor, logit_bias: Tensor | None) -> None:
        pass


class SigLipLoss(ClipLoss):
    """The same in place of ``open_clip.SigLipLoss``: a sigmoid a pair, with the model's bias."""

    def __init__(
        self,
        settings: StepSettings = PLAIN,
        judge: Discriminator | None = None,
        **of_open_clip: Any,
    ) -> None:
        super().__init__(replace(settings, itc_loss="sigmoid"), judge, **of_open_clip)
        del self.parts.form.relative_bias  # type: ignore[attr-defined]

    def _use_bias(self, logit_scale: Tensor, logit_bias: Tensor | None) -> None:
        if logit_bias is None:
            raise ValueError("SigLipLoss needs logit_bias, which SigLIP's models return")
        # A logit is (cosine - bias of the form) / temperature.
        self.parts.form.relative_bias = -logit_bias / logit_scale  # type: ignore[attr-defined]
