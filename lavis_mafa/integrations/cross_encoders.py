"""Probabilities from a CrossEncoder of sentence-transformers; imports no other library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


def require_one_verdict(encoder: Any) -> None:
    """Raise ValueError if a CrossEncoder has more than two scores."""
    if encoder.num_labels > 2:
        raise ValueError(
            f"the cross-encoder has {encoder.num_labels} scores, expected one, or two of "
            "which the second means match"
        )


def match_probabilities(
    encoder: Any, pairs: Sequence[Any], batch_size: int, prompt: str | None = None
) -> Tensor:
    """Return the probabilities ``(P,)`` that pairs match: the sigmoid of a CrossEncoder's score, or
    with two scores the softmax's second.

    Args:
        batch_size: pairs in one forward pass.
        prompt: instruction to the model; None: its own.
    """
    two = encoder.num_labels == 2
    scores: Tensor = encoder.predict(
        list(pairs),
        prompt=prompt,
        batch_size=batch_size,
        show_progress_bar=False,
        # Not its own, which leaves the scores of some models as they are.
        activation_fn=nn.Softmax(dim=1) if two else nn.Sigmoid(),
        convert_to_tensor=True,
        device=str(next(encoder.parameters()).device),
    )
    return scores[:, 1] if two else scores.reshape(-1)
