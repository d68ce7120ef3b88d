"""Numbers of images, against a list."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lavis_mafa.datasets.numbering import dense_ids


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_dense_ids_number_by_first_appearance(digests: list[tuple[int, int]]) -> None:
    high, low = np.array(digests, dtype=np.uint64).T
    ids, first = dense_ids(high, low)
    seen = list(dict.fromkeys(digests))
    assert ids.tolist() == [seen.index(digest) for digest in digests]
    assert first.tolist() == [digests.index(digest) for digest in seen]
    assert ids.dtype == np.int64
