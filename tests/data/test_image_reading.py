"""Every kind of image file is read as upright 8-bit RGB or raises an OSError that names it."""

from __future__ import annotations

import io
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from lavis_mafa.data.image_reading import read_rgb, read_size

RED, WHITE = (255, 0, 0), (255, 255, 255)


def pixels(path: Path) -> list[tuple[int, ...]]:
    image = read_rgb(path)
    assert image.mode == "RGB"
    return [image.getpixel((x, y)) for y in range(image.height) for x in range(image.width)]


def half_transparent(mode: str = "RGBA") -> Image.Image:
    """Return a 2 x 1 image: an opaque red (or grey) pixel and a transparent one."""
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 255, 0))
    if mode == "LA":
        image = Image.new("LA", (2, 1), (10, 255))
        image.putpixel((1, 0), (10, 0))
    return image if mode in ("RGBA", "LA") else image.convert("RGB")


def palette() -> Image.Image:
    image = half_transparent("RGB").quantize(4)
    image.info["transparency"] = image.getpixel((1, 0))
    return image


def keyed() -> Image.Image:
    image = half_transparent("RGB")  # one colour is declared transparent
    image.info["transparency"] = (0, 0, 255)
    return image


GREYS = np.array([[0, 128, 129, 257 * 100, 65535]], dtype=np.uint16)
IMAGES = {
    "rgba.png": (half_transparent(), [RED, WHITE]),
    "palette.png": (palette(), [RED, WHITE]),
    "key.png": (keyed(), [RED, WHITE]),
    "grey.png": (half_transparent("LA"), [(10, 10, 10), WHITE]),
    **{
        f"16_bit.{suffix}": (Image.fromarray(GREYS), [(k, k, k) for k in (0, 0, 1, 100, 255)])
        for suffix in ("png", "tif", "pgm")
    },
    "black_and_white.tif": (Image.new("1", (1, 1), 1), [WHITE]),
    "grey.tif": (Image.new("L", (1, 1), 255), [WHITE]),
    "cmyk.tif": (Image.new("CMYK", (1, 1), (0, 0, 0, 0)), [WHITE]),
}


@pytest.mark.parametrize("name", IMAGES)
def test_pictures_are_read_as_a_viewer_shows_them(name: str, tmp_path: Path) -> None:
    image, expected = IMAGES[name]
    more = {} if name != "key.png" else {"transparency": image.info["transparency"]}
    image.save(tmp_path / name, **more)
    assert pixels(tmp_path / name) == expected


@pytest.mark.parametrize("mode, value", [("F", 0.5), ("I", 1 << 20), ("I", -1)])
def test_values_without_a_defined_range_are_rejected(mode: str, value, tmp_path: Path) -> None:
    Image.new(mode, (2, 2), value).save(tmp_path / "a.tif")
    with pytest.raises(OSError, match=r"a\.tif.*no defined range"):
        read_rgb(tmp_path / "a.tif")


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_exif_orientation_is_applied_and_broken_exif_ignored(tmp_path: Path, monkeypatch) -> None:
    image = Image.new("RGB", (16, 8), RED)
    exif = Image.Exif()
    for orientation in range(1, 9):
        exif[0x0112] = orientation  # from 5 on it is stored rotated by 90 degrees
        image.save(tmp_path / "a.jpg", exif=exif)
        shown = (16, 8) if orientation < 5 else (8, 16)
        assert read_rgb(tmp_path / "a.jpg").size == read_size(tmp_path / "a.jpg") == shown
    image.save(tmp_path / "b.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xffgarbage")
    assert read_rgb(tmp_path / "b.jpg").size == (16, 8)
    monkeypatch.setattr(ImageOps, "exif_transpose", lambda image: {}[274])
    assert read_rgb(tmp_path / "b.jpg").size == (16, 8)


def jpeg() -> bytes:
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(stream, "JPEG")
    return stream.getvalue()


@pytest.mark.parametrize("lenient", [True, False])
def test_truncated_files_are_rejected_with_any_pillow_setting(
    lenient, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)  # importing LAVIS sets True
    path = tmp_path / "bad.jpg"
    path.write_bytes(jpeg()[:-200])
    with ThreadPool(4) as pool:
        for error in pool.map(error_of, [path] * 200):
            assert "bad.jpg" in error and "truncated" in error
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def error_of(path: Path) -> str:
    try:
        read_rgb(path)
    except OSError as error:
        return str(error)
    return "none"


def encoded(kind: str) -> bytes:
    stream = io.BytesIO()
    half_transparent().convert("RGB" if kind in ("JPEG", "BMP") else "RGBA").save(stream, kind)
    return stream.getvalue()


SAMPLES = {kind: encoded(kind) for kind in ("PNG", "GIF", "TIFF", "BMP", "JPEG", "WEBP")}


@pytest.mark.filterwarnings("ignore")  # Pillow warns about some of the damage
@settings(max_examples=150)
@given(
    kind=st.sampled_from(list(SAMPLES)),
    damage=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_damaged_files_give_rgb_or_an_oserror(kind, damage, tmp_path_factory) -> None:
    content = bytearray(SAMPLES[kind])
    for position, value in damage:
        content[position % len(content)] = value
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content)
    try:
        assert read_rgb(path).mode == "RGB"
    except OSError as error:
        assert "damaged" in str(error)
