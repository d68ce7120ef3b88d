"""Check that LAVIS's AutoContrast equals Pillow's for channels of any range."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from lavis.processors import randaugment
from PIL import Image, ImageOps

import lavis_mafa  # noqa: F401  (mends it)


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), min_size=3, max_size=3))
def test_auto_contrast_equals_pillow(ranges):
    rng = np.random.default_rng(0)
    image = np.stack(
        [rng.integers(min(r), max(r) + 1, (12, 9), dtype=np.uint8) for r in ranges], axis=-1
    )
    expected = np.asarray(ImageOps.autocontrast(Image.fromarray(image)))
    output = randaugment.func_dict["AutoContrast"](image)
    assert output.dtype == np.uint8
    assert np.abs(output.astype(int) - expected.astype(int)).max() <= 1
