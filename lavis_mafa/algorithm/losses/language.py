"""Language losses: hide tokens for MLM, and predict the next token in LM."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.step_context import StepContext

IGNORED = -100  # cross_entropy's ignore_index
LM_SMOOTHING = 0.1  # label smoothing of LM in BLIP and BLIP-2


def mask_tokens(
    input_ids: Tensor,
    probability: float,
    mask_id: int,
    vocab_size: int,
    special_ids: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Hide tokens for MLM as BERT does: 80 % masked, 10 % replaced at random, 10 % unchanged.

    Args:
        input_ids: ``(P, L)`` int64.
        probability: share of tokens to predict, 0 to 1 (0.5 in GRIT-VLP 3 and MAFA).
        mask_id: id of the mask token.
        vocab_size: random tokens are drawn from ``[0, vocab_size)``.
        special_ids: tokens never hidden, such as [CLS] and padding.

    Returns:
        ``(P, L)`` ids with tokens hidden, and ``(P, L)`` targets, `IGNORED` at all other tokens.
    """
    # `torch.isin` would copy them to the device, and wait.
    special = reduce(torch.bitwise_or, [input_ids == one for one in special_ids])
    draw = torch.rand(input_ids.shape, device=input_ids.device)
    hidden = (draw < probability) & ~special
    fate = torch.rand(input_ids.shape, device=input_ids.device)
    random_ids = torch.randint(vocab_size, input_ids.shape, device=input_ids.device)
    replaced = torch.where(fate < 0.9, random_ids, input_ids)
    ids = torch.where(hidden, torch.where(fate < 0.8, mask_id, replaced), input_ids)
    return ids, torch.where(hidden, input_ids, IGNORED)


def next_token_losses(
    hidden: Tensor, ids: Tensor, mask: Tensor, head: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the losses ``(T,)`` of predicting every token but the first from those before it.

    Args:
        hidden: ``(P, L, D)``, output of a causal decoder.
        ids: ``(P, L)`` int64, its input.
        mask: ``(P, L)``, 0 for padding, which is not predicted.
        head: from ``(T, D)`` to logits over the vocabulary ``(T, V)``.
    """
    # Only positions before a real token, since the head multiplies by the whole vocabulary.
    rows = torch.nonzero(F.pad(mask[:, 1:], (0, 1)).flatten()).squeeze(1)
    logits = head(hidden.flatten(0, 1).index_select(0, rows)).float()
    targets = ids.flatten()[rows + 1]
    return F.cross_entropy(logits, targets, label_smoothing=LM_SMOOTHING, reduction="none")


def lm(step: StepContext) -> Tensor:
    """Return the language loss of the own pairs and of mined positives (MAFA eq. 4)."""
    batch, own = step.batch, step.batch.own_images.predicted
    if step.matched_and_predicted is not None:
        return batch.ranks.mean(step.matched_and_predicted[1])
    images, texts = step.language_pairs
    losses = []
    if own is not None:  # own pairs come first
        losses, images, texts = [own], images[len(batch.own) :], texts[len(batch.own) :]
    if own is None or len(images):
        losses.append(
            batch.backbone.language_losses(batch.images, batch.texts, images, texts, step.teacher)
        )
    return batch.ranks.mean(torch.cat(losses))
