"""Draw mined connections for the loggers."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from lavis_mafa.algorithm.mining import DIRECTIONS
from lavis_mafa.loggers import EPOCH
from lavis_mafa.runners.run_log import RunLog

Show = Callable[[int], tuple[Image.Image, str]]

COLUMNS = ("pairs", "Con-D", "state", "truth", "anchor", "mined")
PER_EPOCH = 8  # connections drawn
SIDE, GAP, LINE = 224, 12, 18  # pixels: side of a picture, margin, height of a line of text
LETTERS, LINES = 32, 5  # letters in a line and lines of a caption
TRUTHS = {True: "really match", False: "do not match", None: "truth unknown"}
BLUE, BLACK, GREY, WHITE = "#0b62a8", "#1b1f24", "#57606a", "#ffffff"


def show_connections(
    log: RunLog, records: Sequence[Mapping[str, Any]], show: Show, epoch: int
) -> None:
    """Send pictures and a table of an epoch's connections, evenly spread, to the loggers.

    A connection that cannot be drawn is skipped with a warning, since logging must not stop a run.

    Args:
        log: of the run; nothing is drawn if it has no loggers.
        records: lines of ``connections.jsonl``.
        show: returns picture and caption of a sample by its index.
        epoch: of the connections.
    """
    if not log.loggers or not records:
        return
    count = min(PER_EPOCH, len(records))
    rows = []
    for place in range(count):
        record = records[place * len(records) // count]
        try:
            pairs = [show(int(record[name])) for name in ("anchor_index", "mined_index")]
            picture = draw_connection(record, *pairs)
        except Exception as error:
            logging.warning("a connection cannot be shown: %s: %s", type(error).__name__, error)
            continue
        log.loggers.picture(f"connections/{place}", picture, epoch, EPOCH)
        about = [_arrow(record), f"{record['probability']:.3f}", record["state"]]
        rows.append([*about, TRUTHS[record["truth"]], *(caption for _, caption in pairs)])
    log.loggers.table("connections", COLUMNS, rows, epoch, EPOCH)


def draw_connection(
    record: Mapping[str, Any],
    anchor: tuple[Image.Image, str],
    mined: tuple[Image.Image, str],
) -> Image.Image:
    """Anchor and mined pair side by side, each picture above its own caption.

    What Con-D judged together, the image of one and the caption of the other, is framed and dark.
    """
    width, height = 2 * SIDE + 3 * GAP, SIDE + (LINES + 3) * LINE + 3 * GAP
    sheet = Image.new("RGB", (width, height), WHITE)
    pen, font = ImageDraw.Draw(sheet), _font()
    head = f"{_arrow(record)}   p = {record['probability']:.3f}   {record['state']}   "
    pen.text((GAP, GAP), head + TRUTHS[record["truth"]], BLACK, font)
    for place, (role, (picture, caption)) in enumerate((("anchor", anchor), ("mined", mined))):
        left, top = GAP + place * (SIDE + GAP), 2 * GAP + LINE
        image_judged = (record["direction"] == "i2t") == (role == "anchor")
        pen.text((left, top), f"{role} {record[f'{role}_index']}", GREY, font)
        fitted = ImageOps.pad(picture.convert("RGB"), (SIDE, SIDE), color=WHITE)
        sheet.paste(fitted, (left, top + LINE))
        if image_judged:
            box = (left, top + LINE, left + SIDE - 1, top + LINE + SIDE - 1)
            pen.rectangle(box, outline=BLUE, width=4)
        wrapped = textwrap.wrap(caption, LETTERS, max_lines=LINES, placeholder=" …")
        below = (left, top + LINE + SIDE + GAP // 2)
        pen.multiline_text(below, "\n".join(wrapped), GREY if image_judged else BLUE, font)
    return sheet


def _arrow(record: Mapping[str, Any]) -> str:
    return DIRECTIONS[record["direction"]]


def _font() -> Any:
    """Load matplotlib's font, which has the letters of most European languages, unlike Pillow's."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")), 13)
