"""Masked language modelling (MLM): which tokens are hidden."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100  # cross_entropy's ignore_index


def mask_tokens(
    input_ids: Tensor,
    probability: float,
    mask_id: int,
    vocab_size: int,
    special_ids: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Hide tokens for MLM as BERT does: 80 % masked, 10 % replaced at random, 10 % left.

    Args:
        input_ids: ``(P, L)`` int64.
        probability: share of tokens to predict, 0 to 1 (0.5 in GRIT-VLP 3 and MAFA).
        mask_id: id of the mask token.
        vocab_size: random tokens are drawn from ``[0, vocab_size)``.
        special_ids: tokens never hidden, such as [CLS] and padding.

    Returns:
        ``(P, L)`` ids with tokens hidden, and ``(P, L)`` targets, `IGNORED` where nothing is to be
        predicted.
    """
    special = torch.isin(input_ids, torch.tensor(special_ids, device=input_ids.device))
    draw = torch.rand(input_ids.shape, device=input_ids.device)
    hidden = (draw < probability) & ~special
    fate = torch.rand(input_ids.shape, device=input_ids.device)
    random_ids = torch.randint(vocab_size, input_ids.shape, device=input_ids.device)
    ids = torch.where(hidden & (fate < 0.8), mask_id, input_ids)
    ids = torch.where(hidden & (fate >= 0.8) & (fate < 0.9), random_ids, ids)
    return ids, torch.where(hidden, input_ids, IGNORED)
