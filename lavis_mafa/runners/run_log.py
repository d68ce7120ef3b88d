"""What a run tells: a progress bar, JSON lines and TensorBoard."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from lavis_mafa.files import plain

LOG, CONNECTIONS = "log.jsonl", "connections.jsonl"


class RunLog:
    """Writes figures on the main process; silent on others.

    Files in ``folder``: ``log.jsonl``, one object a line with its ``kind`` (``config``, ``step``,
    ``epoch``, ``con_d_histogram``, ``eval``, ``unreadable``, ...), and ``tensorboard/``.
    """

    def __init__(self, folder: Path, active: bool, tensorboard: bool = True) -> None:
        self.folder = folder
        self.active = active
        self._board: Any = None
        self._wants_board = tensorboard

    def write(self, kind: str, **figures: Any) -> None:
        """Append one line to ``log.jsonl``."""
        self.append(LOG, {"kind": kind, "time": round(time.time(), 3), **figures})

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append one JSON object to a file of the run."""
        if self.active:
            self._append(name, record)

    def append_from_rank(self, name: str, rank: int, record: Mapping[str, Any]) -> None:
        """Append from any rank, to a file of its own unless it is the main process."""
        stem, dot, ending = name.rpartition(".")
        self._append(f"{stem}_rank{rank}{dot}{ending}" if rank else name, record)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(plain(record), ensure_ascii=False) + "\n")

    def scalars(self, prefix: str, figures: Mapping[str, Any], step: int) -> None:
        """Send numbers to TensorBoard."""
        for name, value in figures.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._to_board("add_scalar", f"{prefix}/{name}", value, step)

    def histogram(self, name: str, counts: Sequence[float], step: int) -> None:
        """Send to TensorBoard how many values lie in each of B equal bins from 0 to 1."""
        count = len(counts)
        middles = [(place + 0.5) / count for place in range(count)]
        self._to_board(
            "add_histogram_raw",
            name,
            min=0.0,
            max=1.0,
            num=sum(counts),
            sum=sum(n * x for n, x in zip(counts, middles, strict=True)),
            sum_squares=sum(n * x * x for n, x in zip(counts, middles, strict=True)),
            bucket_limits=[(place + 1) / count for place in range(count)],
            bucket_counts=list(counts),
            global_step=step,
        )

    def image(self, name: str, picture: Image.Image, step: int) -> None:
        """Send an RGB picture to TensorBoard."""
        self._to_board("add_image", name, np.asarray(picture), step, dataformats="HWC")

    def text(self, name: str, text: str, step: int) -> None:
        """Send Markdown to TensorBoard."""
        self._to_board("add_text", name, text, step)

    @property
    def has_board(self) -> bool:
        """Whether this process writes TensorBoard files."""
        return self.active and self._wants_board

    def _to_board(self, method: str, *args: Any, **kwargs: Any) -> None:
        if not self.has_board:
            return
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.folder / "tensorboard"))
        getattr(self._board, method)(*args, **kwargs)

    def progress(self, steps: Iterable[int], name: str, done: int, total: int) -> Bar:
        """A bar with rate and time left."""
        return Bar(steps, name, done, total, self.active)

    def close(self) -> None:
        """Flush TensorBoard."""
        if self._board is not None:
            self._board.close()
            self._board = None


class Bar:
    """Iterates over steps and shows how far they are."""

    def __init__(
        self, steps: Iterable[int], name: str, done: int, total: int, active: bool
    ) -> None:
        # A file gets a line now and then, a terminal a moving bar.
        interval = 0.2 if sys.stderr.isatty() else 20.0
        self._bar = tqdm(
            steps,
            desc=name,
            initial=done,
            total=total,
            disable=not active,
            mininterval=interval,
            dynamic_ncols=True,
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self._bar)

    def show(self, **figures: float) -> None:
        """Put figures behind the bar."""
        self._bar.set_postfix({k: f"{v:.3g}" for k, v in figures.items()}, refresh=False)

    def close(self) -> None:
        self._bar.close()


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; none if it is not there.

    What a stopped or running process left half-written is left out, also where it ends inside of
    a character.
    """
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


def read_log(folder: Path, kind: str, once: str | None = None) -> list[dict[str, Any]]:
    """All records of a kind in a run's ``log.jsonl``.

    Args:
        once: a key, such as ``epoch``, of which every value counts once: a run that was resumed
            tells again what it does again, and the last time counts.
    """
    records = [record for record in lines_of(folder / LOG) if record.get("kind") == kind]
    if once is None:
        return records
    last = {record[once]: record for record in records if once in record}
    return [last[value] for value in sorted(last)]
