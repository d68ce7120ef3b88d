"""Text assignment (ALBEF 4.2, NLVR2): which of two images does a text describe, or neither?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FIRST, SECOND, NEITHER = 0, 1, 2  # labels


@dataclass
class _Assignment:
    """Two images for each of B texts, as positions in the mini-batch.

    Attributes:
        first, second: ``(B,)`` positions of the images.
        labels: ``(B,)`` `FIRST` or `SECOND` where the text is that image's, else `NEITHER`.
    """

    first: Tensor
    second: Tensor
    labels: Tensor


def assign_texts(image_ids: Tensor, preference: Tensor | None = None) -> _Assignment:
    """Draw the two images of each text: `FIRST`, `SECOND` and `NEITHER` with probability 1/3 each.

    The other images are never the text's own. Where neither is the text's they differ from
    each other, unless the mini-batch has only two. All draws use PyTorch's CPU generator, so that
    they are the same on any device.

    Args:
        image_ids: ``(B,)``, equal where samples show one image.
        preference: ``(B, B)`` logits; row i draws its other images from their softmax. None: each
            sample of another image is equally likely.

    Raises:
        ValueError: if all samples show the same image.
    """
    ids = image_ids.cpu()
    size = len(ids)
    other = ids[:, None] != ids[None]
    if not other.any():
        raise ValueError(
            f"text assignment needs two different images in a mini-batch, got {size} sample(s) of "
            "one: use a larger run.batch_size_train"
        )
    scores = torch.zeros(size, size) if preference is None else preference.detach().float().cpu()
    # The best of logits plus Gumbel noise is a draw from their softmax; the next best of the same
    # sums is a second draw without replacement.
    scores = scores - torch.empty(size, size).exponential_().log()
    scores = scores.masked_fill(~other, -torch.inf)
    one = scores.argmax(dim=1)
    further = other & (ids[None] != ids[one][:, None])
    another = scores.masked_fill(~further, -torch.inf).argmax(dim=1)
    another = torch.where(further.any(dim=1), another, one)

    labels = torch.randint(3, (size,))
    own = torch.arange(size)
    first = torch.where(labels == FIRST, own, one)
    second = torch.where(labels == FIRST, one, torch.where(labels == SECOND, own, another))
    device = image_ids.device
    return _Assignment(first.to(device), second.to(device), labels.to(device))
