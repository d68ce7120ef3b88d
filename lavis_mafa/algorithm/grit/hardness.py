"""Hardness schedules: which quantile q GRIT's chain moves to in every epoch.

A schedule is a function ``(grouped_epochs, hardness) -> q``, or a class whose instance has settings
or state (`HardnessSchedule`); register it in `HARDNESS` to use its name as ``run.grit.schedule``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.algorithm.registry import Registry, Section

# Its other keys are the fields of `lavis_mafa.algorithm.grit.grit_settings.GritSettings`.
GRIT = Section("run.grit")
# Functions, and classes whose instances are a `HardnessSchedule`.
HARDNESS: Registry[Callable[..., Any]] = Registry("hardness schedule", GRIT)


@dataclass(frozen=True)
class StepAhead:
    """An optimizer step that is about to be taken, as a schedule may observe it.

    Attributes:
        number: number of the step, from 0 on.
        model: the model in training; ``model.step_backbone`` drives it.
        samples: the last mini-batch of the step, with its ``index`` ``(B,)``.
        seed: a number that differs between steps.
        autocast: returns the context of the run's mixed precision.
    """

    number: int
    model: Any
    samples: Mapping[str, Any]
    seed: int = 0
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext


# Called after an optimizer step with False if the step was skipped; returns figures to log.
AfterStep: TypeAlias = Callable[[bool], dict[str, float]]


class HardnessSchedule:
    """A schedule whose q depends on the number of grouped epochs only.

    Args:
        of_epoch: function from the number of earlier grouped epochs (0 in the first) to q.

    Attributes:
        learns: whether it has state, which ``state_dict`` and ``load_state_dict`` save and restore,
            and draws q; ``research/falcon.py`` is an example.
    """

    learns = False

    def __init__(self, of_epoch: Callable[[int], float]) -> None:
        self.of_epoch = of_epoch

    def before_step(self, step: StepAhead, together: bool) -> AfterStep | None:
        """Observe an optimizer step of a grouped epoch; all ranks must call it.

        Args:
            together: there are several ranks.

        Returns:
            A function that all ranks must call after the step; None: there is none.
        """
        return None

    def at(self, grouped_epochs: int) -> Any:
        """Return q of an epoch.

        A class of your own may return an object that draws q for every anchor, as in
        ``research/falcon.py``; chains then compare pairs by the sum of the similarities in both
        directions. The object has:

        - ``choice_bytes``: bytes that record what led to a pair, and follow it to its mini-batch;
        - ``draws(seeds)``: called in the training thread, returns a function for each sub-queue
          from both sums of similarities ``(M, M)`` to q ``(M,)``, used in another thread; its
          method ``along(chain)`` returns the choices ``(M, choice_bytes)`` uint8 of a chain;
        - the schedule's ``remember(plan, leftover, orders, choices)``: keeps what formed an epoch's
          mini-batches; the first ``leftover`` samples of the plan were not grouped, and ``orders``
          ``(W, n)`` and ``choices`` are of all ranks; returns the mean of q for the log, or None.

        Raises:
            ValueError: if the schedule's q is not above 0 and at most 1.
        """
        q = float(self.of_epoch(grouped_epochs))
        check_hardness(q)
        return q

    def describe(self, first: int, last: int) -> str:
        """Describe q of the grouped epochs ``first`` to ``last`` in words.

        Args:
            first, last: numbers of epochs of the run.
        """
        begin, end = self.at(0), self.at(max(0, last - first))
        if begin == end:
            return f"hardness {begin:g}"
        return f"hardness {begin:g} in epoch {first} to {end:g} in epoch {last}"


def check_hardness(hardness: float) -> None:
    """Raise an error unless a hardness is above 0 and at most 1.

    Raises:
        ValueError: naming the value.
    """
    if not 0.0 < hardness <= 1.0:
        raise ValueError(f"hardness must be above 0 and at most 1, got {hardness}")


@HARDNESS.register("constant", source="lavis_mafa")
def _constant(grouped_epochs: int, hardness: float) -> float:
    """Use the same hardness in every epoch.

    Args:
        grouped_epochs: number of grouped epochs before this one.
        hardness: ``run.grit.hardness``.

    Returns:
        q, above 0 and at most 1.
    """
    return hardness


@dataclass(frozen=True)
class _Ramp(Checked):
    """Settings of the schedules that move from one hardness to another."""

    start: float = option(
        0.5,
        "q of the first grouped epoch: below run.grit.hardness mini-batches become harder, above "
        "it softer",
        source="FALCON, baselines",
        low=0,
        above=True,
        high=1,
    )
    epochs: int = option(
        10, "grouped epochs until q is run.grit.hardness", source="FALCON, baselines", low=1
    )


@HARDNESS.register("linear", settings=_Ramp, source="FALCON, baselines")
def _linear(grouped_epochs: int, hardness: float, own: _Ramp) -> float:
    """Move from one hardness to another in equal steps.

    FALCON's baselines: progressive hardening (``start`` below ``hardness``) and softening.

    Args and returns as `_constant`.
    """
    return _between(own.start, hardness, grouped_epochs / own.epochs)


@HARDNESS.register("cosine", settings=_Ramp, source="lavis_mafa")
def _cosine(grouped_epochs: int, hardness: float, own: _Ramp) -> float:
    """Move from one hardness to another along half a cosine: slowly at both ends.

    Args and returns as `_constant`.
    """
    share = min(1.0, grouped_epochs / own.epochs)
    return _between(own.start, hardness, 0.5 - 0.5 * math.cos(math.pi * share))


def _between(start: float, end: float, share: float) -> float:
    # Rounding must not let the final hardness differ from the one that the config names.
    return end if share >= 1.0 else start + (end - start) * share
