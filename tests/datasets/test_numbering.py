"""Numbers of images, against a list."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lavis_mafa.datasets.pair_conversion import dense_ids


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_dense_ids_number_by_first_appearance(digests: list[tuple[int, int]]) -> None:
    ids, first = dense_ids(np.array(digests, np.uint64).tobytes())
    seen = list(dict.fromkeys(one for one in digests if one != (0, 0)))  # zeros: nothing
    assert ids.tolist() == [seen.index(one) if one in seen else -1 for one in digests]
    assert first.tolist() == [digests.index(one) for one in seen]
    assert ids.dtype == np.int64
