"""Read an image file as 8-bit RGB, whatever it holds, or fail with an OSError that names it."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, ImageFile, ImageOps

WHITE = (255, 255, 255, 255)

_strict_lock = threading.Lock()
_strict_readers = 0
_lenient_outside = False


def read_rgb(path: str | os.PathLike[str], data: bytes | None = None) -> Image.Image:
    """The picture as a viewer shows it, in mode RGB.

    Args:
        path: the file.
        data: its content, if it has been read already; ``path`` is then its name alone.

    The EXIF orientation is applied; transparent parts show white; of an animation the first frame
    is taken; 16-bit grey values 0..65535 are scaled to 0..255.

    Raises:
        OSError: naming the path, for a missing file, a truncated one and everything that Pillow
            cannot decode (its UnidentifiedImageError is one; decompression bombs, broken headers
            and pixel formats without a defined range, 32-bit integer and float, become one).
    """
    try:
        with (
            _truncated_is_an_error(),
            Image.open(path if data is None else io.BytesIO(data)) as image,
        ):
            image.load()
            return _to_rgb(_upright(image))
    except MemoryError:
        raise
    except OSError as error:
        if os.fspath(path) in str(error):
            raise
        raise OSError(f"cannot read image {os.fspath(path)}: {error}") from error
    except Exception as error:  # Pillow's decoders fail on broken files with almost any class
        reason = f"{type(error).__name__}: {error}"
        raise OSError(f"cannot read image {os.fspath(path)}: {reason}") from error


def as_png(image: Image.Image) -> tuple[bytes, str]:
    """The picture as the bytes of a PNG file, and ``png``."""
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue(), "png"


@contextmanager
def _truncated_is_an_error() -> Iterator[None]:
    """Switch Pillow's filling of missing pixels off while any thread is inside.

    The switch is one for the process, and importing LAVIS turns it on: half-downloaded images
    would train as grey areas without a word.
    """
    global _strict_readers, _lenient_outside
    with _strict_lock:
        if _strict_readers == 0:
            _lenient_outside = ImageFile.LOAD_TRUNCATED_IMAGES
            ImageFile.LOAD_TRUNCATED_IMAGES = False
        _strict_readers += 1
    try:
        yield
    finally:
        with _strict_lock:
            _strict_readers -= 1
            if _strict_readers == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES = _lenient_outside


def _upright(image: Image.Image) -> Image.Image:
    try:
        ImageOps.exif_transpose(image, in_place=True)  # else it copies every picture
    except Exception:  # broken EXIF data say nothing about the pixels, which are loaded
        pass
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("32-bit float pixels have no defined range; store the image with 8 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _scaled_16_bit(image).convert("RGB")
    if "transparency" in image.info or image.getbands()[-1] in ("A", "a"):
        if image.mode == "La":  # premultiplied grey converts to LA only
            image = image.convert("LA")
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _scaled_16_bit(image: Image.Image) -> Image.Image:
    """Grey values 0..65535 rounded to 0..255. Pillow's own conversion clips at 255."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("32-bit integer pixels have no defined range; store it with 8 or 16 bits")
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
