"""Convert a decoded picture to 8-bit RGB as a viewer shows it; for everything that reads pictures.

Pillow's own ``convert("RGB")`` clips 16-bit grey values at 255 and gives transparent parts the
arbitrary colour that their pixels have.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

_WHITE = (255, 255, 255, 255)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return a picture in mode RGB: 16-bit grey values scaled, transparent parts over white.

    Raises:
        ValueError: if its pixels have no defined range, as 32-bit numbers.
    """
    if image.mode == "F":
        raise ValueError("32-bit float pixels have no defined range; store the image with 8 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _scaled_16_bit(image)
    if "transparency" in image.info or image.getbands()[-1] in ("A", "a"):
        if image.mode == "La":  # premultiplied grey converts to LA only
            image = image.convert("LA")
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _scaled_16_bit(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("32-bit integer pixels have no defined range; store it with 8 or 16 bits")
    scaled = (values.astype(np.uint32) * 255 + 32767) // 65535
    return Image.fromarray(scaled.astype(np.uint8)).convert("RGB")
