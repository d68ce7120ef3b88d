"""Measure the peak memory of a step with Con-D, and in chunks; see `research.benchmarks.steps`."""

from research.benchmarks.steps import memory_rows as rows

__all__ = ["rows"]
