"""Read an image file as 8-bit RGB, or fail with an OSError that names it.

Formats: those of `_FORMATS`, by content. Accepted, as a viewer shows them: any size from 1 x 1;
grey, palette, CMYK, transparent, 16-bit; the first frame of an animation; files with broken EXIF
data; files whose suffix is not that of their format.

Refused: missing or empty files, folders, pipes and devices; files that are not images; images that
are damaged or cut short, as far as their format lets it be noticed; more pixels than Pillow's
``MAX_IMAGE_PIXELS`` (89,478,485), however small the file; text or profiles that unpack to more than
Pillow allows; pixels without a defined range; every other format, because some of Pillow's readers
open what a file contains: PostScript, which is a program, or a picture of unchecked size.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from PIL import EpsImagePlugin, ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from lavis_mafa.io.pictures import to_rgb

_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_LYING = (5, 6, 7, 8)  # values of EXIF's orientation that exchange width and height
_LARGEST_FILE = 2**30  # bytes; uncompressed pixels of the most that Pillow reads take 0.7 GB

# Pillow warns of conditions that this module handles: broken metadata are ignored, decompression
# bombs are refused. Its texts differ by file, so that every worker would log every one.
warnings.filterwarnings("ignore", module=r"PIL\.")

# LAVIS's other data sets open pictures by Pillow itself: without this switch, PostScript among them
# would be run by Ghostscript.
EpsImagePlugin.gs_binary = False


def read_rgb(path: str | os.PathLike[str], data: bytes | None = None) -> Image.Image:
    """Return the picture as a viewer shows it, in mode RGB.

    The EXIF orientation is applied; transparent parts become white; an animation is read as its
    first frame; 16-bit grey values 0..65535 are scaled to 0..255.

    Args:
        path: the file.
        data: its content, if it has been read already; ``path`` is then only its name.

    Raises:
        OSError: naming the path, for everything that the module's docstring lists as refused.
    """
    with _named(path), _opened(path, data) as image:
        image.load()
        with suppress(Exception):  # broken EXIF data do not affect the pixels, which are loaded
            ImageOps.exif_transpose(image, in_place=True)  # else it copies every picture
        return to_rgb(image)


def read_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return width and height of the picture that `read_rgb` returns, by its header.

    Raises:
        OSError: as `read_rgb`, for what the header shows.
    """
    with _named(path), _opened(path) as image:
        try:
            lying = image.getexif().get(ExifTags.Base.Orientation) in _LYING
        except Exception:  # broken EXIF data are ignored, as in `read_rgb`
            lying = False
        return (image.height, image.width) if lying else image.size


def _require_file(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless ``path`` is a plain file of at most `_LARGEST_FILE` bytes.

    Opening a pipe would wait forever, and a device may never end.
    """
    found = os.stat(path)
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(f"{os.fspath(path)} is a pipe, a socket or a device, not a file")
    if found.st_size > _LARGEST_FILE:
        raise OSError(f"{os.fspath(path)} has {found.st_size} bytes, too many for an image")


def require_below(path: str | None, root: str | os.PathLike[str]) -> None:
    """Raise OSError unless ``path``, which begins with ``root`` unless it is absolute, leads to a
    place below it: an annotation file must not bring any picture of the machine into a data set or
    a page. Links in the folder are followed, as they are its owner's."""
    if path is None:
        return
    root = os.path.join(os.path.abspath(root), "")
    # Where a link is before "..", the path leads to another place than it says.
    as_it_says = ".." not in path.removeprefix(os.fspath(root)).split(os.sep)
    if as_it_says and os.path.abspath(path).startswith(root):
        return
    if os.path.realpath(path).startswith(os.path.join(os.path.realpath(root), "")):
        return
    raise PermissionError(
        f"image {path!r} is not read: it is outside of the image folder {root!r}; set "
        "build_info.images.storage (--images) to a folder that contains it"
    )


def read_file(path: str, root: str | os.PathLike[str]) -> bytes:
    """Return the content of an image file in an image folder.

    Raises:
        OSError: if it is not a plain file, or lies outside of the folder.
    """
    require_below(path, root)
    _require_file(path)
    with open(path, "rb") as file:
        return file.read()


def suffix_of(data: bytes) -> str:
    """Return a suffix for an image file, such as ``png``, by its content; ``jpg`` if the content is
    in none of `_FORMATS`."""
    try:
        with _opened("", data) as image:
            return str(image.format).lower()
    except Exception:  # Pillow fails on broken files with almost any class
        return "jpg"


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every exception inside into an OSError that names the path."""
    try:
        yield
    except MemoryError:
        raise
    except UnidentifiedImageError as error:  # for bytes Pillow reports their memory address
        raise UnidentifiedImageError(
            f"cannot identify image file {os.fspath(path)!r} as {', '.join(_FORMATS)}"
        ) from error
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
        _require_file(path)
    Image.init()
    formats = [name for name in _FORMATS if name in Image.OPEN]  # older Pillow has no AVIF
    # Importing LAVIS lets Pillow fill missing pixels: half-downloaded images would silently be
    # trained on as grey areas.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    with Image.open(path if data is None else io.BytesIO(data), formats=formats) as image:
        pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
        if most is not None and pixels > most:  # below twice as many Pillow only warns
            raise Image.DecompressionBombError(f"{pixels} pixels, more than the {most} allowed")
        yield image
