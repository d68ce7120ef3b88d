"""Metrics of retrieval, captions, answers and boxes; a registry of those of the first two."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from lavis_mafa.algorithm.registry import Registry

KINDS = ("retrieval", "caption")
# (scores_i2t (I, T), scores_t2i (T, I), LAVIS's retrieval evaluation set) -> value by name
RetrievalMetric: TypeAlias = Callable[[NDArray[Any], NDArray[Any], Any], dict[str, float]]
# (references, captions), both tokenised, lists by image number 0 ... N - 1 -> value by name, or by
# name the values of all images in this order, whose mean is reported
CaptionMetric: TypeAlias = Callable[
    [dict[int, list[str]], dict[int, list[str]]], Mapping[str, float | Sequence[float]]
]


@dataclass(frozen=True)
class _MetricTraits:
    """What a metric scores: one of `KINDS`."""

    kind: str = "retrieval"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind of a metric: expected {' or '.join(KINDS)}, got {self.kind!r}")


METRICS: Registry[Callable[..., Any]] = Registry("metric", traits=_MetricTraits)


class MetricNames(Collection[str]):
    """The names of the metrics of one kind that are registered when it is asked."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __contains__(self, name: object) -> bool:
        return any(name == one for one in self)

    def __iter__(self) -> Iterator[str]:
        kinds = {name: entry.traits.kind for name, entry in METRICS.entries().items()}
        return (name for name, kind in kinds.items() if kind == self.kind)

    def __len__(self) -> int:
        return sum(1 for _ in self)
