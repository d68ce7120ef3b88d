"""Metrics of retrieval, captions, answers and boxes; a registry for further retrieval metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from numpy.typing import NDArray

from lavis_mafa.algorithm.registry import Registry

# (scores_i2t (I, T), scores_t2i (T, I), LAVIS's retrieval evaluation set) -> value by name
RetrievalMetric: TypeAlias = Callable[[NDArray[Any], NDArray[Any], Any], dict[str, float]]

METRICS: Registry[RetrievalMetric] = Registry("metric")
