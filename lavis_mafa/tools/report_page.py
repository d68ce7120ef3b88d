"""One self-contained HTML page of results: a sentence, pictures of pairs, bars and tables.

The file loads nothing, opens from disk and has no script. Every string (captions, paths) is
escaped.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from lavis_mafa.io.files import atomic_write
from lavis_mafa.tools.charts import Bars, Table, as_number, format_number

THUMBNAIL = 192  # longest side of an embedded image, pixels
_TINY = 64  # longest side, pixels


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
    path: Path,
    *,
    title: str,
    headline: str,
    pairs: Iterable[ShownPair] = (),
    bars: Sequence[Bars] = (),
    tables: Iterable[Table] = (),
    notes: Iterable[str] = (),
) -> Path:
    """Write the page atomically, creating its folder, and return the path.

    Args:
        headline: the results in sentences; further lines follow in plain type.
        pairs: may be a generator, whose images are read one at a time.

    Raises:
        ValueError: for a table whose rows do not fit its columns.
    """
    shown = [
        vars(one) | {"image": None if one.image is None else data_uri(one.image, THUMBNAIL)}
        for one in pairs
    ]
    return write_page(
        path,
        "report_page.html",
        title=title,
        headline=headline,
        pairs=shown,
        bars=bars,
        tables=list(tables),
        notes=[note for note in notes if note],
    )


def data_uri(image: Image.Image, longest: int) -> str:
    """Return the image as a ``data:`` address, at most ``longest`` pixels wide and high.

    Tiny images are PNG, as JPEG would blur their colours over a good part of them.
    """
    image = image.convert("RGB")  # as the models read it, transparency dropped
    image.thumbnail((longest, longest))
    kind = "png" if max(image.size) <= _TINY else "jpeg"
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=80)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def write_page(path: Path, template: str, **parts: Any) -> Path:
    """Fill a template of this folder and write the page atomically; return its path.

    Every part is escaped; ``script_hash`` is the digest of the template's only ``<script>`` without
    attributes, for its content security policy.

    Raises:
        ValueError: if ``path`` is a folder, or a part for the script has a number that is not
            finite.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder, expected the name of a page to write")
    source = Path(__file__).with_name(template).read_text(encoding="utf-8")
    script = source.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _environment().get_template(template).render(**parts, script_hash=f"sha256-{digest}")
    with atomic_write(path) as file:
        file.write(page.encode("utf-8", "replace"))  # lone surrogates of odd file names
    return path


@cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The filter tojson also escapes what could end a script element.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters.update(number=format_number, is_number=as_number)
    return environment
