"""Image-text matching loss (ITM) with labels corrected by Con-D."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.algorithm.step_context import StepContext

_GUESS_WIDTH = 0.02  # tolerance relative to the loss of a guess


def is_loss_of_guess(loss: float, matches: float) -> bool:
    """Return whether a mean loss equals the loss of a model that ignores the pair.

    Such a model always predicts the share of matches, whose loss is its entropy, or one half.

    Args:
        matches: share of matches among the pairs, 0 to 1.
    """
    guesses = [math.log(2)]
    if 0 < matches < 1:
        guesses.append(-matches * math.log(matches) - (1 - matches) * math.log(1 - matches))
    return any(abs(loss - guess) <= _GUESS_WIDTH * guess for guess in guesses)


def matching_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy ``(P,)`` of every image-text pair, class 1 = match (MAFA eq. 3).

    Args:
        logits: ``(P, 2)``.
        labels: ``(P,)``, 1 for pairs that match; probabilities from 0 to 1 are allowed.
    """
    labels = labels.float()
    return F.cross_entropy(
        logits.float(), torch.stack([1.0 - labels, labels], dim=1), reduction="none"
    )


def itm(step: StepContext) -> Tensor:
    """Return ITM of the own pairs and of the hard negatives of both directions."""
    batch, (image_of, text_of, labels) = step.batch, step.itm_pairs
    if step.matched_and_predicted is None:
        logits = batch.backbone.match(batch.images, batch.texts, image_of, text_of)
    else:
        logits = step.matched_and_predicted[0]
    return batch.ranks.mean(matching_losses(logits, labels))
