"""Read an image file of any format as 8-bit RGB, or fail with an OSError that names it.

Accepted, as a viewer shows them: all sizes from 1 x 1; grey, palette, CMYK, transparent, 16-bit;
the first frame of an animation; files with broken EXIF data; files whose suffix is not that of
their format.

Refused: missing or empty files, folders, pipes and devices; files that are no image; images that
are damaged or cut short, even by their last bytes only; more pixels than Pillow's
``MAX_IMAGE_PIXELS`` (89,478,485), however small the file; text or profiles that unpack to more than
Pillow allows; pixels without a defined range; PostScript, which is a program.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

WHITE = (255, 255, 255, 255)
STRIP = 2**22  # pixels to convert at a time

# Pillow warns of conditions that this module handles: broken metadata are ignored, decompression
# bombs are refused. Its texts differ by file, so that every worker would log every one.
warnings.filterwarnings("ignore", module=r"PIL\.")

_strict_lock = threading.Lock()
_strict_readers = 0
_lenient_outside = False


def read_rgb(path: str | os.PathLike[str], data: bytes | None = None) -> Image.Image:
    """Return the picture as a viewer shows it, in mode RGB.

    The EXIF orientation is applied; transparent parts become white; an animation is read as its
    first frame; 16-bit grey values 0..65535 are scaled to 0..255. Reading takes 8 bytes per pixel,
    so less than a gigabyte (in addition to the decoder's memory for WebP and AVIF).

    Args:
        path: the file.
        data: its content, if it has been read already; ``path`` is then only its name.

    Raises:
        OSError: naming the path, for everything that the module's docstring lists as refused.
    """
    with _named(path), _opened(path, data) as image:
        image.load()
        return _to_rgb(_upright(image))


def read_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return the stored width and height of a picture, from its header only.

    Raises:
        OSError: naming the path, for refused files that are recognised without decoding.
    """
    with _named(path), _opened(path) as image:
        return image.size


def require_file(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless ``path`` is a plain file: opening a pipe would wait forever, and a
    device may never end."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(f"{os.fspath(path)} is a pipe, a socket or a device, not a file")


def as_png(image: Image.Image) -> tuple[bytes, str]:
    """Return the picture as the bytes of a PNG file, and ``png``."""
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue(), "png"


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every exception inside into an OSError that names the path."""
    try:
        yield
    except MemoryError:
        raise
    except UnidentifiedImageError as error:  # for bytes Pillow reports their memory address
        raise UnidentifiedImageError(f"cannot identify image file {os.fspath(path)!r}") from error
    except OSError as error:
        if os.fspath(path) in str(error):
            raise
        raise OSError(f"cannot read image {os.fspath(path)}: {error}") from error
    except Exception as error:  # Pillow's decoders fail on broken files with almost any class
        reason = f"{type(error).__name__}: {error}"
        raise OSError(f"cannot read image {os.fspath(path)}: {reason}") from error


@contextmanager
def _opened(path: str | os.PathLike[str], data: bytes | None = None) -> Iterator[Image.Image]:
    """Open a picture and check its header."""
    if data is None:
        require_file(path)
    with (
        _truncated_is_an_error(),
        Image.open(path if data is None else io.BytesIO(data)) as image,
    ):
        pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
        if most is not None and pixels > most:  # below twice as many Pillow only warns
            raise Image.DecompressionBombError(f"{pixels} pixels, more than the {most} allowed")
        if image.format == "EPS":  # Pillow would let Ghostscript run it
            raise ValueError("PostScript is a program, not a picture")
        yield image


@contextmanager
def _truncated_is_an_error() -> Iterator[None]:
    """Switch Pillow's filling of missing pixels off while any thread is inside.

    The switch is global to the process, and importing LAVIS turns it on: half-downloaded images
    would silently be trained on as grey areas.
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
    except Exception:  # broken EXIF data do not affect the pixels, which are loaded
        pass
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("32-bit float pixels have no defined range; store the image with 8 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _in_strips(image, _scaled_16_bit)
    if "transparency" in image.info or image.getbands()[-1] in ("A", "a"):
        return _in_strips(image, _over_white)
    return image if image.mode == "RGB" else image.convert("RGB")


def _in_strips(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Convert an image to RGB strip by strip, to limit the memory that ``convert`` needs."""
    rows = max(1, STRIP // image.width)
    if rows >= image.height:
        return convert(image)
    made = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        made.paste(convert(image.crop((0, top, image.width, bottom))), (0, top))
    return made


def _over_white(image: Image.Image) -> Image.Image:
    if image.mode == "La":  # premultiplied grey converts to LA only
        image = image.convert("LA")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image).convert("RGB")


def _scaled_16_bit(image: Image.Image) -> Image.Image:
    """Scale grey values 0..65535 to 0..255; Pillow's own conversion clips at 255."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("32-bit integer pixels have no defined range; store it with 8 or 16 bits")
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
