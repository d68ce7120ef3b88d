"""Numbers of images, against a list."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lavis_mafa.data.pair_conversion import dense_ids

VALUES = st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=20)


@given(st.lists(VALUES, min_size=1, max_size=3))
def test_dense_ids_number_by_first_appearance(chunks: list[list[str | None]]) -> None:
    ids, first = dense_ids(pa.chunked_array([pa.array(chunk, pa.string()) for chunk in chunks]))
    given = [value for chunk in chunks for value in chunk]
    seen = [value for value in dict.fromkeys(given) if value is not None]
    assert ids.tolist() == [-1 if value is None else seen.index(value) for value in given]
    assert first.tolist() == [given.index(value) for value in seen]
    assert ids.dtype == np.int64
