"""Losses that stand in for open_clip's.

::

    loss = ClipLoss(judge=judge)                                     # open_clip.ClipLoss's place
    open_clip_train.main.create_loss = create_loss(judge=judge)      # its command line
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.integrations.pair_loss import PairLoss

# The losses are open_clip's for ``isinstance``, and work in other loops without it.
if find_spec("open_clip") is not None:
    from open_clip.loss import ClipLoss as _ClipLoss
    from open_clip.loss import SigLipLoss as _SigLipLoss
else:
    _ClipLoss = _SigLipLoss = object

# Keys of `lavis_mafa.run_step` that a loop may give with the features of a mini-batch.
SAMPLES = ("image_id", "group_id", "loaded_index", "epoch", "grouped", "text_input")


class _OfOpenClip(PairLoss):
    """What both losses share, see `ClipLoss`."""

    def __init__(
        self,
        settings: StepSettings | None = None,
        judge: Any = None,
        *,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        grit: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(settings, judge, grit=grit, all_ranks=True, **options)
        self.local_loss, self.gather_with_grad = local_loss, gather_with_grad
        self.cache_labels, self.rank, self.world_size = cache_labels, rank, world_size
        self.use_horovod = use_horovod
        ranks = Ranks(together=True)
        if use_horovod:
            raise ValueError("Horovod is not supported: start the processes with torchrun")
        if world_size > 1 and (rank, world_size) != (ranks.rank, ranks.world):
            raise ValueError(
                f"got rank {rank} of {world_size}, but torch.distributed has rank {ranks.rank} of "
                f"{ranks.world}: start the processes with torchrun"
            )

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        **samples: Any,
    ) -> Any:
        """Return the loss of a mini-batch.

        Args:
            image_features, text_features: ``(B, E)``, normalised, as models return them.
            logit_scale: 1 / temperature, as models return it.
            logit_bias: used by `SigLipLoss`; it changes no softmax.
            output_dict: return ``{"contrastive_loss": loss}``.
            samples: optional keys of `lavis_mafa.run_step`, see `SAMPLES`.

        Raises:
            TypeError: if a key of ``samples`` is unknown.
            ValueError: if `SigLipLoss` gets no ``logit_bias``, or ``grit`` no ``loaded_index``.
        """
        unknown = sorted(samples.keys() - set(SAMPLES))
        if unknown:
            raise TypeError(f"got {', '.join(unknown)}, expected some of {', '.join(SAMPLES)}")
        sides, numbers = (image_features, text_features), samples.get("loaded_index")
        given = self.samples_of(numbers, sides, self.training, samples)
        loss = self.with_scale(sides, logit_scale, logit_bias, given, mines=True)
        return {"contrastive_loss": loss} if output_dict else loss


class ClipLoss(_OfOpenClip, _ClipLoss):  # type: ignore[misc]
    """ITC with any setting of this package, in place of ``open_clip.ClipLoss``.

    Without settings it is ``open_clip.ClipLoss(local_loss=True, gather_with_grad=True)``. The
    candidates are those of all ranks.

    Args:
        settings: all settings of the step; None: from ``options``.
        judge: judges hard negatives, see `lavis_mafa.Discriminator`.
        local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod: open_clip's. On
            several ranks the first two must be set.
        grit: a `lavis_mafa.GritSchedule`; the loss collects the features, and needs the keyword
            ``loaded_index``, the rows of the mini-batch.
        options: plain settings such as ``rule``, ``margin``, ``high`` and ``action``, see
            `lavis_mafa.integrations.pair_loss.settings_of`.

    Raises:
        TypeError: for an unknown argument.
        ValueError: for a value out of its range, and for a gathering that this loss does not have.
    """

    def __init__(
        self, settings: StepSettings | None = None, judge: Any = None, **named: Any
    ) -> None:
        super().__init__(settings, judge, **named)
        if self.world_size > 1 and not (self.local_loss and self.gather_with_grad):
            raise ValueError(
                "on several ranks each computes the loss of its own rows and candidates pass "
                "gradients: give --local-loss and --gather-with-grad"
            )


class SigLipLoss(_OfOpenClip, _SigLipLoss):  # type: ignore[misc]
    """The same in place of ``open_clip.SigLipLoss``: a sigmoid a pair, with the model's bias.

    Args:
        settings, judge, named: as in `ClipLoss`.
        cache_labels, rank, world_size, dist_impl: open_clip's.
    """

    def __init__(
        self,
        settings: StepSettings | None = None,
        judge: Any = None,
        *,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        **named: Any,
    ) -> None:
        super().__init__(
            settings,
            judge,
            cache_labels=cache_labels,
            rank=rank,
            world_size=world_size,
            model_bias=True,
            **named,
        )
        self.dist_impl = dist_impl or "gather"


class CoCaLoss(ClipLoss):
    """The same in place of ``open_clip.CoCaLoss``: ITC and a captioning loss.

    Args:
        caption_loss_weight, clip_loss_weight: of the terms.
        pad_id: of the tokenizer; it is not a target.
        named: arguments of `ClipLoss`.
    """

    def __init__(
        self,
        caption_loss_weight: float,
        clip_loss_weight: float,
        pad_id: int = 0,
        **named: Any,
    ) -> None:
        super().__init__(**named)
        self.caption_loss_weight, self.clip_loss_weight = caption_loss_weight, clip_loss_weight
        self.pad_id = pad_id

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logits: Tensor,
        labels: Tensor,
        logit_scale: Tensor | float,
        output_dict: bool = False,
        **samples: Any,
    ) -> Any:
        """Return the weighted contrastive and captioning losses.

        Args:
            logits: ``(B, L, V)`` of the next tokens.
            labels: ``(B, L)`` tokens.
            image_features, text_features, logit_scale, output_dict, samples: as in `ClipLoss`.
        """
        clip = logits.new_zeros(())
        if self.clip_loss_weight:
            found = super().forward(image_features, text_features, logit_scale, **samples)
            clip = self.clip_loss_weight * found
        of_tokens = F.cross_entropy(logits.permute(0, 2, 1), labels, ignore_index=self.pad_id)
        caption = self.caption_loss_weight * of_tokens
        if output_dict:
            return {"contrastive_loss": clip, "caption_loss": caption}
        return clip, caption


class DistillClipLoss(ClipLoss):
    """The same in place of ``open_clip.DistillClipLoss``: ITC and a teacher's distribution."""

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        dist_image_features: Tensor,
        dist_text_features: Tensor,
        dist_logit_scale: Tensor | float,
        output_dict: bool = False,
        **samples: Any,
    ) -> Any:
        """Return the contrastive and the distillation loss.

        Args:
            dist_image_features, dist_text_features, dist_logit_scale: of the teacher.
            image_features, text_features, logit_scale, output_dict, samples: as in `ClipLoss`.
        """
        clip = super().forward(image_features, text_features, logit_scale, **samples)
        get_logits: Any = self.get_logits
        own = get_logits(image_features, text_features, logit_scale)
        teacher = get_logits(dist_image_features, dist_text_features, dist_logit_scale)
        i2t, t2i = (
            F.cross_entropy(sim, of_teacher.softmax(1))
            for sim, of_teacher in zip(own, teacher, strict=True)
        )
        distill = (i2t + t2i) / 2
        if output_dict:
            return {"contrastive_loss": clip, "distill_loss": distill}
        return clip, distill


def create_loss(**named: Any) -> Callable[[Any], ClipLoss | SigLipLoss]:
    """Return a function of open_clip's arguments, in place of ``open_clip.create_loss``.

    Args:
        named: ``judge``, ``settings`` and plain settings, see `ClipLoss`.
    """

    def create(args: Any) -> ClipLoss | SigLipLoss:
        ranks = {"rank": args.rank, "world_size": args.world_size}
        if args.siglip and not args.distill:
            return SigLipLoss(dist_impl=args.loss_dist_impl, **ranks, **named)
        own: dict[str, Any] = {
            "local_loss": args.local_loss,
            "gather_with_grad": args.gather_with_grad,
            "use_horovod": args.horovod,
            **ranks,
        }
        if args.distill:
            return DistillClipLoss(**own, **named)
        if "coca" in args.model.lower():
            caption, clip = args.coca_caption_loss_weight, args.coca_contrastive_loss_weight
            return CoCaLoss(caption, clip, **own, **named)
        return ClipLoss(**own, **named)

    return create
