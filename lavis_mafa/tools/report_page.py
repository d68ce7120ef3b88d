"""One self-contained HTML page of results: a sentence, pictures of pairs, bars and tables.

The file loads nothing, opens from disk and has no script. Every string (captions, paths) is
escaped.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from lavis_mafa.tools.charts import Bars, Table
from lavis_mafa.tools.html import data_uri, write_page

THUMBNAIL = 192  # longest side of an embedded image, pixels


@dataclass
class ShownPair:
    """A judged pair of an image and a caption.

    Attributes:
        image: None if it cannot be read or shall not be shown.
        own_caption: another caption of the image, from its own pair.
        verdict: of the judge, in words.
        truth: whether image and caption match; None if unknown.
    """

    image: Image.Image | None
    caption: str
    own_caption: str
    verdict: str
    truth: bool | None = None


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    headline: str,
    pairs: Iterable[ShownPair] = (),
    bars: Sequence[Bars] = (),
    tables: Iterable[Table] = (),
    notes: Iterable[str] = (),
    figure: str | None = None,
) -> Path:
    """Write the page atomically, creating its folder, and return the path.

    Args:
        headline: the results in sentences.
        pairs: may be a generator, whose images are read one at a time.
        figure: an SVG file, shown as an image: nothing inside can reach the page.

    Raises:
        ValueError: for a table whose rows do not fit its columns.
    """
    shown = [
        {
            "image": None if one.image is None else data_uri(one.image, THUMBNAIL),
            "caption": one.caption,
            "own_caption": one.own_caption,
            "verdict": one.verdict,
            "truth": one.truth,
        }
        for one in pairs
    ]
    if figure is not None:
        content = base64.b64encode(figure.encode("utf-8", "replace")).decode()
        figure = f"data:image/svg+xml;base64,{content}"
    return write_page(
        Path(path),
        "report_page.html",
        title=title,
        headline=headline,
        pairs=shown,
        bars=bars,
        figure=figure,
        tables=list(tables),
        notes=[note for note in notes if note],
    )
