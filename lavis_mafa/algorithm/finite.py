"""Refuse scores that are not finite: a sort puts NaN first or last, where it counts as a hit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MEANING = (
    "A model whose weights or features are not finite cannot be evaluated: check the checkpoint, "
    "or evaluate it in fp32 (run.amp: False)"
)


def require_finite(what: str, scores: NDArray[Any]) -> None:
    """Refuse scores of any shape if some are NaN or infinite.

    Args:
        what: names the scores in the message.

    Raises:
        ValueError: with their number and the place of the first.
    """
    bad = ~np.isfinite(scores)
    if bad.any():
        first = [int(place) for place in np.argwhere(bad)[0]]
        raise ValueError(
            f"{int(bad.sum())} of {bad.size} {what} are NaN or infinite, the first at {first}. "
            f"{MEANING}"
        )
