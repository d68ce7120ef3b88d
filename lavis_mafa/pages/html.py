"""Parts of self-contained pages: embedded images and data, and the only script that may run."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from lavis_mafa.io.files import atomic_write

TINY = 64  # longest side, pixels


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
    _, kind, data = files[0] if max(image.size) <= TINY else min(files)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def script_json(value: object) -> str:
    """Return JSON that is safe inside a script element: without ``<`` it cannot end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Put texts, escaped by the caller, in the places of ``{{name}}``.

    ``{{script_hash}}`` becomes the digest of the template's only ``<script>`` without attributes,
    for its content security policy.
    """
    script = template.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    known = {**parts, "script_hash": f"sha256-{digest}"}
    # One pass: a placeholder's name inside a caption is text, not a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: known[found[1]], template)


def write_page(path: Path, page: str) -> Path:
    """Write the page in one step, so that a reader never sees a partial file; return its path."""
    with atomic_write(path) as file:
        file.write(page.encode("utf-8", "replace"))  # lone surrogates of odd file names
    return path
