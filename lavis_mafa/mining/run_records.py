"""Read the logs of a training run, which may have been resumed or be in progress."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.algorithm.mining import DIRECTIONS
from lavis_mafa.algorithm.scores import CON_D
from lavis_mafa.runners.con_d_check import RECORD
from lavis_mafa.runners.run_log import CONNECTIONS, LOG, read_json_lines

_COUNTS = ("false", "picked", "found", "judged")
_MOST_LOSSES = 100  # each is a column of all steps, however few lines name it
_COLUMNS = {"global_step", "lr", "temperature"} | {f"{n}_{d}" for n in _COUNTS for d in DIRECTIONS}


@dataclass
class RunRecords:
    """A run's ``log.jsonl`` and ``connections.jsonl``.

    If a run was resumed from an earlier checkpoint and repeated steps or epochs, only the last
    repetition is kept.

    Attributes:
        folder: the folder of the run.
        config: the last recorded config; None if there is none.
        columns: values of the steps, in order, each ``(S,)`` float64: ``global_step``, losses,
            learning rate, temperature and counts of hard negatives; NaN where a step has none.
        epochs: figures by epoch.
        histograms: of Con-D's probabilities by epoch.
        evaluations: figures by split and epoch (a number, or a string such as "best").
        connections: the logged records.
        self_check: figures of Con-D's self-check by its name; {} if there was none.
        first, last: seconds since 1970 of the first and the last record.
    """

    folder: Path
    config: dict[str, Any] | None = None
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    epochs: dict[int, dict[str, Any]] = field(default_factory=dict)
    histograms: dict[int, dict[str, Any]] = field(default_factory=dict)
    evaluations: dict[tuple[str, Any], dict[str, Any]] = field(default_factory=dict)
    connections: list[dict[str, Any]] = field(default_factory=list)
    self_check: dict[str, dict[str, Any]] = field(default_factory=dict)
    first: float | None = None
    last: float | None = None

    @property
    def steps(self) -> int:
        """Number of steps done."""
        done = self.columns.get("global_step")
        return int(done[-1]) if done is not None and len(done) else 0

    @property
    def score(self) -> str:
        """The score that judged hard negatives in Con-D's place; empty: Con-D."""
        mafa = ((self.config or {}).get("model") or {}).get("mafa") or {}
        score = (mafa.get("connections") or {}).get("score") or CON_D
        return "" if score == CON_D else str(score)


def read_run(folder: Path) -> RunRecords:
    """Read the logs in the folder of a run.

    Raises:
        FileNotFoundError: if it contains no ``log.jsonl``.
        ValueError: if it has records that no run writes.
    """
    path = folder / LOG
    if not path.is_file():
        raise FileNotFoundError(f"no run in {folder}: log.jsonl does not exist")
    run = RunRecords(folder)
    # Arrays: lists of floats of a run of millions of steps would take gigabytes.
    columns: dict[str, array[float]] = {"global_step": array("d")}
    try:
        for record in read_json_lines(path):
            _add(run, columns, record)
        path = folder / CONNECTIONS
        run.connections = _read_connections(path)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} has a record that no run writes: {error!r}") from error
    run.columns = {name: np.array(values) for name, values in columns.items()}
    return run


def _add(run: RunRecords, columns: dict[str, array[float]], record: dict[str, Any]) -> None:
    kind, epoch = record.get("kind"), record.get("epoch", -1)
    run.last = record.get("time", run.last)
    run.first = run.last if run.first is None else run.first
    if kind == "config":
        run.config = record.get("config")
    elif kind == "step":
        _add_step(run, columns, record)
    elif kind == "epoch":
        run.epochs[epoch] = _figures(record)
    elif kind == RECORD:
        run.self_check = {str(record.get("name")): record}
    elif kind == "con_d_histogram":
        rows = [row for d in DIRECTIONS for row in (record.get(d) or {}).values()]
        if not rows or {len(row) for row in rows} != {len(rows[0])}:
            raise ValueError(f"histogram of epoch {epoch} with rows of different lengths, or none")
        run.histograms[epoch] = record
    elif kind == "eval":
        # Removed first, so that a repeated evaluation also moves to the end of the order.
        run.evaluations.pop((record["split"], epoch), None)
        run.evaluations[record["split"], epoch] = _figures(record)


def _figures(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k not in ("kind", "time", "split", "epoch")}


def _add_step(run: RunRecords, columns: dict[str, array[float]], record: dict[str, Any]) -> None:
    done = columns["global_step"]
    now = float(record["global_step"])
    if done and now <= done[-1]:  # the run was resumed from an earlier step: drop what it repeats
        length = bisect_left(done, now)
        for values in columns.values():
            del values[length:]
        for kept in (run.epochs, run.histograms):
            for epoch in [e for e in kept if e >= record["epoch"]]:
                del kept[epoch]
        for split, at in list(run.evaluations):
            if not isinstance(at, int) or at >= record["epoch"]:
                del run.evaluations[split, at]
    for name in record:
        known = name in _COLUMNS or name.startswith("loss")
        if known and name not in columns:
            if len(columns) > len(_COLUMNS) + _MOST_LOSSES:
                raise ValueError(f"more than {_MOST_LOSSES} losses")
            columns[name] = array("d", [np.nan]) * len(done)
    for name, values in columns.items():
        value = record.get(name)
        values.append(np.nan if value is None else float(value))


def _read_connections(path: Path) -> list[dict[str, Any]]:
    """Read ``connections.jsonl``; of repeated steps only the last repetition is kept."""
    kept: list[dict[str, Any]] = []
    for record in read_json_lines(path):
        at = (record["epoch"], record["step"])
        while kept and (kept[-1]["epoch"], kept[-1]["step"]) > at:
            kept.pop()
        kept.append(record)
    names = ("epoch", "step", "direction", "anchor_index", "mined_index")
    return list({tuple(record[n] for n in names): record for record in kept}.values())
