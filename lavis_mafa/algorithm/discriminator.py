"""The interface between Con-D and the training step (MAFA 4.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from lavis_mafa.algorithm.ranks import Ranks

Truth = Callable[[np.ndarray, np.ndarray], np.ndarray]
VIEW = "con_d_image"  # key of a mini-batch's images as Con-D wants them, where they differ


class Discriminator(Protocol):
    """Judges pairs of the candidates."""

    def judge(
        self,
        samples: dict[str, Any],
        image_of: Tensor,
        text_of: Tensor,
        ranks: Ranks | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Probability ``(P,)`` in [0, 1] that image ``image_of[p]`` and text ``text_of[p]`` match.

        Args:
            samples: this rank's mini-batch: ``image`` ``(B, 3, H, W)`` and ``text_input``, B
                captions; `VIEW` ``(B, 3, H', W')`` if the discriminator has a view of its own;
                ``loaded_index`` ``(C,)`` of all candidates.
            image_of, text_of: ``(P,)`` numbers of candidates.
            ranks: whose mini-batches the candidates are; None: this rank's. If they are of several
                ranks, all must call it, also with P = 0.
            seen: what the model in training got from its image encoder for ``image``.
        """
