"""LAVIS's image augmentation, mended."""

from __future__ import annotations

from typing import Any

import numpy as np
from lavis.processors import randaugment

_auto_contrast = randaugment.func_dict["AutoContrast"]


def auto_contrast(image: np.ndarray, cutoff: float = 0) -> np.ndarray:
    """Stretch each channel of ``(H, W, 3)`` uint8 to 0..255, as Pillow's ``autocontrast``.

    LAVIS negates a uint8, which wraps: a channel whose darkest value is above 0 would become white.
    """
    stretched: Any = _auto_contrast(image.astype(np.int32), cutoff)
    return np.asarray(stretched).astype(np.uint8)


randaugment.func_dict["AutoContrast"] = auto_contrast
