"""Losses that stand in for open_clip's.

::

    loss = ClipLoss(judge=judge)                                     # open_clip.ClipLoss's place
    open_clip_train.main.create_loss = create_loss(judge=judge)      # its command line
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from inspect import signature
from typing import Any

from torch import Tensor, nn

from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.integrations.pair_loss import PairLoss

# The losses are open_clip's for ``isinstance``, and work in other loops without it.
if find_spec("open_clip") is not None:
    from open_clip.loss import ClipLoss as _ClipLoss
    from open_clip.loss import CoCaLoss as _CoCaLoss
    from open_clip.loss import DistillClipLoss as _DistillClipLoss
    from open_clip.loss import SigLipLoss as _SigLipLoss
else:

    class _Absent:
        """Raises ImportError in place of a loss that needs open_clip."""

        def __new__(cls, *_: Any, **__: Any) -> Any:
            raise ImportError(f"{cls.__name__} needs open_clip: pip install open_clip_torch")

    _ClipLoss = _SigLipLoss = object
    _CoCaLoss = _DistillClipLoss = _Absent

# Keys of `lavis_mafa.run_step` that a loop may give with the features of a mini-batch.
SAMPLES = ("image_id", "group_id", "loaded_index", "epoch", "grouped", "text_input")


class _OfOpenClip(PairLoss):
    """What both losses share, see `ClipLoss`."""

    def __init__(
        self,
        settings: StepSettings | None = None,
        judge: Any = None,
        *,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ) -> None:
        known = {"cache_labels", "rank", "world_size", *signature(type(self).__init__).parameters}
        super().__init__(settings, judge, all_ranks=True, arguments=known, **options)
        self.cache_labels, self.rank, self.world_size = cache_labels, rank, world_size
        ranks = Ranks(together=True)
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
        sides = image_features, text_features
        loss = self.itc(sides, logit_scale, samples, self.training, bias=logit_bias)
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
        self,
        settings: StepSettings | None = None,
        judge: Any = None,
        *,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        use_horovod: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(settings, judge, **options)
        self.local_loss, self.gather_with_grad = local_loss, gather_with_grad
        self.use_horovod = use_horovod
        if use_horovod:
            raise ValueError("Horovod is not supported: start the processes with torchrun")
        if self.world_size > 1 and not (self.local_loss and self.gather_with_grad):
            raise ValueError(
                "on several ranks each computes the loss of its own rows and candidates pass "
                "gradients: give --local-loss and --gather-with-grad"
            )


class SigLipLoss(_OfOpenClip, _SigLipLoss):  # type: ignore[misc]
    """The same in place of ``open_clip.SigLipLoss``: a sigmoid a pair, with the model's bias.

    Args:
        settings, judge, options: as in `ClipLoss`.
        cache_labels, rank, world_size, dist_impl: open_clip's; features are always gathered.
    """

    def __init__(
        self,
        settings: StepSettings | None = None,
        judge: Any = None,
        *,
        dist_impl: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(settings, judge, model_bias=True, **options)
        self.dist_impl = dist_impl or "gather"
        if self.dist_impl not in ("bidir", "shift", "reduce", "gather"):
            raise ValueError(f"dist_impl: got {dist_impl!r}, expected bidir, shift, reduce, gather")


class CoCaLoss(_CoCaLoss, ClipLoss):  # type: ignore[misc]
    """ITC as `ClipLoss` with a captioning loss, in place of ``open_clip.CoCaLoss``.

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
        ClipLoss.__init__(self, **named)
        self.caption_loss_weight, self.clip_loss_weight = caption_loss_weight, clip_loss_weight
        self.caption_loss = nn.CrossEntropyLoss(ignore_index=pad_id)


class DistillClipLoss(_DistillClipLoss, ClipLoss):  # type: ignore[misc]
    """ITC as `ClipLoss` and a teacher's distribution, in place of ``open_clip.DistillClipLoss``."""

    def __init__(self, **named: Any) -> None:
        ClipLoss.__init__(self, **named)

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        *teacher: Tensor,
        output_dict: bool = False,
        **named: Any,
    ) -> Any:
        """Return the contrastive loss, and the distillation loss as open_clip computes it.

        Args:
            image_features, text_features, logit_scale, output_dict: as in `ClipLoss`.
            teacher, named: features and scale of the teacher (``dist_image_features``,
                ``dist_text_features``, ``dist_logit_scale``), and keys in `SAMPLES`.
        """
        samples = {name: named.pop(name) for name in SAMPLES if name in named}
        clip = ClipLoss.forward(self, image_features, text_features, logit_scale, **samples)
        theirs: Any = super()
        _, distill = theirs.forward(image_features, text_features, logit_scale, *teacher, **named)
        if output_dict:
            return {"contrastive_loss": clip, "distill_loss": distill}
        return clip, distill


def create_loss(**named: Any) -> Callable[[Any], ClipLoss | SigLipLoss]:
    """Return a function of open_clip's arguments, in place of ``open_clip.create_loss``.

    Args:
        named: ``judge``, ``settings`` and plain settings, see `ClipLoss`.
    """

    from open_clip.factory import create_loss as chosen_by

    ours = {one.__name__: one for one in (ClipLoss, SigLipLoss, CoCaLoss, DistillClipLoss)}

    def create(args: Any) -> ClipLoss | SigLipLoss:
        theirs = chosen_by(args)
        known = signature(type(theirs).__init__).parameters
        given = {name: value for name, value in vars(theirs).items() if name in known}
        name = type(theirs).__name__
        if name not in ours:
            raise ValueError(f"open_clip chose {name}, expected one of {', '.join(ours)}")
        return ours[name](**(given | named))

    return create
