"""Double the fusion layers of ALBEF's text encoder, for tasks with two images (ALBEF 4.2)."""

from __future__ import annotations

import re

from torch import Tensor

State = dict[str, Tensor]
LAYER = re.compile(r"(text_encoder\.encoder\.layer\.)(\d+)(\..*)")


def double_fusion_layers(state: State, fusion_layer: int) -> State:
    """Repeat every layer of the text encoder from ``fusion_layer`` on: 6, 6, 7, 7, ..."""
    doubled: State = {}
    for key, value in state.items():
        match = LAYER.fullmatch(key)
        number = int(match[2]) if match else -1
        if match is None or number < fusion_layer:
            doubled[key] = value
            continue
        first = fusion_layer + 2 * (number - fusion_layer)
        for layer in (first, first + 1):
            doubled[f"{match[1]}{layer}{match[3]}"] = value
    return doubled
