"""Pairs that a command analyses, with what encodes and judges them, however these were built."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.grit import GritSettings
from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.io.processes import is_main_process


@dataclass(frozen=True)
class Usual:
    """How mini-batches are formed and pairs judged unless the arguments of a command say otherwise.

    Attributes:
        batch_size: B.
        grit: how mini-batches are grouped, with M.
        rule: thresholds, and candidates of an anchor.
        same_image: pairs of one image are positives of each other.
        same_group: pairs of one group are never negatives of each other.
    """

    batch_size: int
    grit: GritSettings
    rule: MiningRule = field(default_factory=MiningRule)
    same_image: bool = True
    same_group: bool = True


@dataclass
class Encoded:
    """Features of a mini-batch of B samples.

    Attributes:
        vectors: ``(B, E)``, the single vector of each image that GRIT groups by.
        texts: ``(B, E)``.
        images: ``(B, Q, E)`` if the model has Q queries for an image; None: they are ``vectors``.
        captions: as they were encoded.
        errors: of each sample, "" if it was read.
    """

    vectors: Tensor
    texts: Tensor
    images: Tensor | None
    captions: list[str]
    errors: list[str]


class AnalysedPairs:
    """The pairs that a command analyses.

    Attributes:
        data: a `TrainingSet`, or `TrainPairs`.
        device: where to compute.
        batch_size: samples that are encoded at once.
        judges: by name, on all ranks the same: a `SampleJudge`, what has ``judge`` as
            `lavis_mafa.Discriminator`, or None for the share of own pairs that are less similar.
        configs: those of the judges, by name.
        about: what later commands need to load the same data.
        encoder: what encodes, for the record.
        notes: sentences about the judges, for the results.
        by_truth: without a judge, the ground truth of the data judges.
        most_unreadable: share of samples that may be unreadable.
        images_at_once: that are in memory while their pairs are judged.
    """

    data: Any
    device: torch.device
    batch_size: int
    judges: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]
    about: Mapping[str, Any]
    encoder: Mapping[str, Any]
    notes: Sequence[str] = ()
    by_truth = False
    most_unreadable = 1.0
    images_at_once = 64

    @property
    def usual(self) -> Usual:
        """How mini-batches are formed and judged."""
        raise NotImplementedError

    def encode(self, batches: Sequence[NDArray[Any]]) -> Iterator[Encoded]:
        """Yield the features of mini-batches of samples, given by number."""
        raise NotImplementedError

    def pictures(self, drawn: Sequence[NDArray[Any]], judge: Any) -> Iterator[dict[str, Any]]:
        """Yield mini-batches of samples with ``image`` as a judge reads it, ``image_id``,
        ``text_input`` and ``load_error``."""
        raise NotImplementedError

    def similarity(self, images: Tensor, texts: Tensor) -> Tensor:
        """Return the similarities ``(I, T)`` of features."""
        return images @ texts.t()

    def identity(self) -> dict[str, str]:
        """Return what the features depend on, by name."""
        raise NotImplementedError


def log_on_main(text: str, *values: Any) -> None:
    """Log a message on the main process only."""
    if is_main_process():
        logging.info(text, *values)
