"""Mined connections for the loggers: a table, and the two images of each side by side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PIL import Image, ImageOps

from lavis_mafa.algorithm.mining import DIRECTIONS
from lavis_mafa.loggers import EPOCH
from lavis_mafa.runners.run_log import RunLog

Show = Callable[[int], tuple[Image.Image, str]]

_COLUMNS = ("pairs", "Con-D", "state", "truth", "anchor", "mined")
_PER_EPOCH = 8  # connections shown
_SIDE = 224  # pixels of a picture
_TRUTHS = {True: "really match", False: "do not match", None: "truth unknown"}


def show_connections(
    log: RunLog, records: Sequence[Mapping[str, Any]], show: Show, epoch: int
) -> None:
    """Send pictures and a table of an epoch's connections, evenly spread, to the loggers.

    A connection that cannot be shown is skipped with a warning, since logging must not stop a run.
    ``lavis-mafa report`` shows all of them with their captions.

    Args:
        log: of the run; nothing is shown if it has no loggers.
        records: lines of ``connections.jsonl``.
        show: returns picture and caption of a sample by its index.
        epoch: of the connections.
    """
    if not log.loggers or not records:
        return
    count = min(_PER_EPOCH, len(records))
    rows = []
    for place in range(count):
        record = records[place * len(records) // count]
        both = Image.new("RGB", (2 * _SIDE, _SIDE), "white")
        captions = []
        try:
            for left, name in enumerate(("anchor_index", "mined_index")):
                picture, caption = show(int(record[name]))
                fitted = ImageOps.pad(picture.convert("RGB"), (_SIDE, _SIDE), color="white")
                both.paste(fitted, (left * _SIDE, 0))
                captions.append(caption)
        except Exception as error:
            logging.warning("a connection cannot be shown: %s: %s", type(error).__name__, error)
            continue
        log.loggers.picture(f"connections/{place}", both, epoch, EPOCH)
        about = [DIRECTIONS[record["direction"]], f"{record['probability']:.3f}", record["state"]]
        rows.append([*about, _TRUTHS[record["truth"]], *captions])
    log.loggers.table("connections", _COLUMNS, rows, epoch, EPOCH)
