"""Any LAVIS model that scores pairs by ``forward(samples, match_head="itm")``, for judging only."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class MatchHead:
    """Drives ``blip_image_text_matching`` and ``blip2_image_text_matching`` as a Con-D.

    These models tell no more than the ITM logits of a batch of pairs, so every pair is encoded by
    itself.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def match_captions(self, images: Tensor, captions: list[str]) -> Tensor:
        """ITM logits ``(P, 2)`` of images ``(P, 3, H, W)`` with P captions."""
        # Blip2ITM does not pad, so captions of one length go together.
        by_length: dict[int, list[int]] = defaultdict(list)
        for row, caption in enumerate(captions):
            by_length[len(self.model.tokenizer(caption).input_ids)].append(row)
        logits = images.new_zeros(len(captions), 2, dtype=torch.float32)
        for rows in by_length.values():
            samples = {"image": images[rows], "text_input": [captions[row] for row in rows]}
            logits[rows] = self.model(samples, match_head="itm").float()
        return logits
