"""Read an image file as 8-bit RGB, whatever it holds, or fail with an OSError that names it.

Read, as a viewer shows them: every size from 1 x 1 on; grey, palette, CMYK, transparent, 16-bit;
the first frame of an animation; files whose EXIF data are broken; files whose name has another
ending than their format.

Refused: what is missing, empty, a folder, a pipe or a device; what is no picture; what is cut short
or damaged, also where only its last bytes are gone; more pixels than Pillow's ``MAX_IMAGE_PIXELS``
(89,478,485), however small the file; text or profiles that unpack to more than Pillow allows;
pixels without a defined range; PostScript, which is a program.
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
STRIP = 2**22  # pixels that are converted at a time

# Pillow warns of what is decided here: broken metadata are passed over, bombs are refused. Its
# texts differ from file to file, so that every one would be told, by every worker.
warnings.filterwarnings("ignore", module=r"PIL\.")

_strict_lock = threading.Lock()
_strict_readers = 0
_lenient_outside = False


def read_rgb(path: str | os.PathLike[str], data: bytes | None = None) -> Image.Image:
    """The picture as a viewer shows it, in mode RGB.

    Args:
        path: the file.
        data: its content, if it has been read already; ``path`` is then its name alone.

    The EXIF orientation is applied; transparent parts show white; of an animation the first frame
    is taken; 16-bit grey values 0..65535 are scaled to 0..255. A picture takes 8 bytes a pixel
    while it is read, so less than a gigabyte in all (WebP and AVIF: their decoders' memory beside).

    Raises:
        OSError: naming the path, for everything that the module's docstring calls refused.
    """
    with _named(path), _opened(path, data) as image:
        image.load()
        return _to_rgb(_upright(image))


def read_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Width and height of the picture as it is stored, from its header alone.

    Raises:
        OSError: naming the path, for what is refused and can be told without decoding.
    """
    with _named(path), _opened(path) as image:
        return image.size


def require_file(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless ``path`` is a plain file: opening a pipe would wait for ever, and a
    device may never end."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(f"{os.fspath(path)} is a pipe, a socket or a device, not a file")


def as_png(image: Image.Image) -> tuple[bytes, str]:
    """The picture as the bytes of a PNG file, and ``png``."""
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue(), "png"


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make an OSError that names the path of everything that goes wrong inside."""
    try:
        yield
    except MemoryError:
        raise
    except UnidentifiedImageError as error:  # of bytes Pillow tells their address in memory
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
    """The picture, its header read and found acceptable."""
    if data is None:
        require_file(path)
    with (
        _truncated_is_an_error(),
        Image.open(path if data is None else io.BytesIO(data)) as image,
    ):
        pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
        if most is not None and pixels > most:  # up to twice as many Pillow only warns
            raise Image.DecompressionBombError(f"{pixels} pixels, more than the {most} allowed")
        if image.format == "EPS":  # Pillow would have Ghostscript run it
            raise ValueError("PostScript is a program, not a picture")
        yield image


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
        return _in_strips(image, _scaled_16_bit)
    if "transparency" in image.info or image.getbands()[-1] in ("A", "a"):
        return _in_strips(image, _over_white)
    return image if image.mode == "RGB" else image.convert("RGB")


def _in_strips(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """``convert`` of an image, to RGB, a strip at a time: what it needs itself stays small."""
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
    """Grey values 0..65535 rounded to 0..255. Pillow's own conversion clips at 255."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("32-bit integer pixels have no defined range; store it with 8 or 16 bits")
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
