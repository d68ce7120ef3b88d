"""Self-contained pages: embedded images, and jinja2 templates that run no script but their own."""

from __future__ import annotations

import base64
import hashlib
import io
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from lavis_mafa.io.files import atomic_write
from lavis_mafa.tools.charts import as_number, format_number

_TINY = 64  # longest side, pixels


def data_uri(image: Image.Image, longest: int) -> str:
    """Return the image as a ``data:`` address, at most ``longest`` pixels wide and high.

    Drawings are smaller, and exact, as PNG, photographs as JPEG: the smaller one is taken, for tiny
    images always PNG, as JPEG would blur their colours over a good part of them.
    """
    image = image.convert("RGB")  # as the models read it, transparency dropped
    image.thumbnail((longest, longest))
    files = []
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 80})):
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        files.append((len(buffer.getvalue()), kind, buffer.getvalue()))
    _, kind, data = files[0] if max(image.size) <= _TINY else min(files)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


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
