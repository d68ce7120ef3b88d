"""Images and captions with every kind of defect, and how each must be handled."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

# The expected (red, green, blue) of the top left pixel of images that are trained on.
EXPECTED_PIXEL = {
    "CMYK": (0, 255, 255),
    "16-bit grey": (100, 100, 100),
    "animated GIF": (255, 0, 0),
    "transparent PNG": (255, 255, 255),
    "turned by EXIF": (0, 0, 0),
    "PNG called .jpg": (1, 2, 3),
}
# Handling of captions: REPLACED like an unreadable image; TRAINED; trained and counted as CUT or as
# UNKNOWN to the vocabulary; REFUSED: `image_text_json` and shards refuse to start training.
REPLACED, TRAINED, CUT, UNKNOWN, REFUSED = "replaced", "trained", "cut", "unknown", "refused"
CAPTIONS = {
    "empty": ("", REPLACED),
    "blanks": (" \t\n\u00a0\u3000", REPLACED),
    "signs that the processor drops": ("...!! (~)", REPLACED),
    "control characters": ("\x01\x02\x7f", REPLACED),
    "zero-width": ("\u200b\u200d\ufeff", REPLACED),
    "half a surrogate pair": ("red circle \ud83d", REFUSED),
    "one word": ("red", TRAINED),
    "NUL inside": ("red\0 circle", TRAINED),
    "line breaks": ("red\ncircle\r\nbox\n", TRAINED),
    "zero-width inside": ("red\u200b circle\ufeff", TRAINED),
    "10,000 characters, many words": ("red circle " * 910, CUT),
    "emoji": ("\U0001f408 \U0001f469\u200d\U0001f680", UNKNOWN),
}
PIXELS = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str, **how: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **how)
    return stream.getvalue()


def png(width: int, height: int, pixels: bytes, bits: int = 8, kind: int = 0, extra: bytes = b""):
    """Return a PNG with any header and compressed pixels; kind 0 is grey, 6 RGBA."""
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    parts = [chunk(b"IHDR", header), extra, chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def chunk(name: bytes, content: bytes) -> bytes:
    checked = name + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def zeros(count: int) -> bytes:
    """Return ``count`` zero bytes, compressed."""
    packer = zlib.compressobj(1)
    blocks = [packer.compress(bytes(min(2**20, count - k))) for k in range(0, count, 2**20)]
    return b"".join(blocks) + packer.flush()


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n{} loop\n"


def iptc(content: bytes) -> bytes:
    """Return an IPTC file with another picture inside, which Pillow's reader of IPTC opens."""

    def field(record: int, number: int, value: bytes) -> bytes:
        return struct.pack(">BBBH", 0x1C, record, number, len(value)) + value

    head = field(3, 60, b"\1\0") + field(3, 20, b"\0\x09") + field(3, 30, b"\0\x09")
    head += field(3, 120, b"\0\5")
    parts = [content[k : k + 30_000] for k in range(0, len(content), 30_000)]
    return head + b"".join(field(8, 10, part) for part in parts)


def readable() -> dict[str, bytes]:
    """Return files that are trained on, by kind; `EXPECTED_PIXEL` has the images expected."""
    plain, red = Image.new("RGB", (8, 6), (1, 2, 3)), Image.new("RGB", (8, 6), "red")
    frames = {"save_all": True, "append_images": [Image.new("RGB", (8, 6), "lime")]}
    turned = Image.new("RGB", (8, 6), (250, 250, 250))
    turned.paste((0, 0, 0), (0, 3, 8, 6))  # dark at the bottom: on the left when upright
    exif = Image.Exif()
    exif[0x0112] = 6
    grey = Image.fromarray(np.full((6, 8), 25_700, np.uint16))
    return {
        "CMYK": encoded(Image.new("CMYK", (8, 6), (255, 0, 0, 0)), "JPEG", quality=100),
        "16-bit grey": encoded(grey, "PNG"),
        "animated GIF": encoded(red, "GIF", **frames),
        "transparent PNG": encoded(Image.new("RGBA", (8, 6), (0, 0, 255, 0)), "PNG"),
        "turned by EXIF": encoded(turned, "PNG", exif=exif),
        "PNG called .jpg": encoded(plain, "PNG"),
    }


def unreadable() -> dict[str, bytes]:
    """Return files that are replaced, by kind."""
    jpeg = encoded(Image.fromarray(PIXELS), "JPEG", quality=95)
    complete = encoded(Image.fromarray(PIXELS), "PNG")
    damaged = bytearray(complete)
    damaged[60] ^= 255
    text = chunk(b"zTXt", b"a\0\0" + zeros(200_000_000))
    pixels = zeros(61 * 80)
    return {
        "truncated JPEG": jpeg[:-1500],
        "damaged PNG": bytes(damaged),
        "zero bytes": b"",
        "text": b"<html>404 Not Found</html>",
        "PostScript inside IPTC": iptc(POSTSCRIPT),
        "PostScript": POSTSCRIPT,
        "bomb of 144 megapixels": png(12_000, 12_000, zeros(12_000 * 1501), bits=1),
        "text-chunk bomb": png(80, 60, pixels, extra=text),
    }


# `image_text_parquet` stands for image_text_json with a parquet file that contains the images.
PACKED = ("image_text_shards", "image_text_parquet")  # builders without image files
# Defects that cannot occur in these.
PATH_DEFECTS = (
    "missing file",
    "folder",
    "pipe",
    "path with NUL",
    "path with half a surrogate pair",
)


class DefectivePairs:
    """A folder of pairs, one of each kind among valid ones, with its annotations.

    Attributes:
        rows: ``image``, ``caption``, ``image_id`` of every pair; valid ones are interspersed.
        images, captions: row numbers by kind of image and of caption.
        bad: the rows that must be replaced.
        fates: how each caption is handled, by row.
    """

    def __init__(self, path: Path, builder: str) -> None:
        self.path, self.builder = path, builder
        self.rows: list[dict[str, str]] = []
        self.images: dict[str, int] = {}
        self.captions: dict[str, int] = {}
        self.bad: set[int] = set()
        self.handling: dict[int, str] = {}
        (path / "images").mkdir(parents=True)
        self._good()
        for kind, content in {**readable(), **unreadable()}.items():
            if not content and builder == "image_text_shards":
                content = b"\0"  # `write_shards` rejects empty files
            self.images[kind] = self._add(content, "red circle and big box")
            if kind not in EXPECTED_PIXEL:
                self.bad.add(self.images[kind])
        if builder not in PACKED:
            self._places()
        for kind, (caption, fate) in CAPTIONS.items():
            if self._never_read(caption):
                continue
            number = self.captions[kind] = self._good(caption)
            self.handling[number] = fate
            if fate in (REPLACED, REFUSED):
                self.bad.add(number)
        while len(self.rows) % 16:
            self._good()

    def _never_read(self, caption: str) -> bool:
        """Return whether our builders skip or refuse a caption when they read annotations."""
        ours = self.builder.startswith("image_text")
        return ours and (not caption.strip() or any("\ud800" <= c <= "\udfff" for c in caption))

    def _good(self, caption: str = "green box and small circle") -> int:
        shade = (37 * len(self.rows) % 256, 90, 200)
        return self._add(encoded(Image.new("RGB", (8, 6), shade), "PNG"), caption)

    def _add(self, content: bytes | None, caption: str, image: str = "") -> int:
        number = len(self.rows)
        image = image or f"{number:03d}.jpg"
        if content is not None:
            (self.path / "images" / image).write_bytes(content)
        self.rows.append({"image": image, "caption": caption, "image_id": f"{number}"})
        return number

    def _places(self) -> None:
        for kind in PATH_DEFECTS:
            name = {PATH_DEFECTS[3]: "a\0b.jpg", PATH_DEFECTS[4]: "\ud83d.jpg"}.get(kind, "")
            if kind == PATH_DEFECTS[4] and self.builder == "image_text_json":
                continue  # not encodable: rejected with its row
            number = self.images[kind] = self._add(None, "red circle", name)
            self.bad.add(number)
            place = self.path / "images" / f"{number:03d}.jpg"
            if kind == "folder":
                place.mkdir()
            elif kind == "pipe":
                os.mkfifo(place)

    def annotations(self) -> Path:
        """Write the annotation file or shards of the builder; return the path."""
        if self.builder == "image_text_parquet":
            contents = [(self.path / "images" / row["image"]).read_bytes() for row in self.rows]
            columns = {"jpg": contents, "txt": [row["caption"] for row in self.rows]}
            pq.write_table(pa.table(columns), self.path / "pairs.parquet")
            return self.path / "pairs.parquet"
        if self.builder != "image_text_shards":
            (self.path / "pairs.json").write_text(json.dumps(self.rows))
            return self.path / "pairs.json"
        from shard_files import write_shards

        if (self.path / "shards").exists():
            return self.path / "shards"
        images = self.path / "images"
        samples = (
            (f"{k:03d}", (images / row["image"]).read_bytes(), "jpg", row["caption"], {})
            for k, row in enumerate(self.rows)
        )
        return write_shards(self.path / "shards", samples, per_shard=7)
