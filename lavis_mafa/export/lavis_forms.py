"""ALBEF checkpoints in the form that a LAVIS model for a downstream task expects.

Our checkpoints hold no momentum encoders. LAVIS's models for downstream tasks have them: under
``runner_mafa``, ``albef_retrieval`` and ``albef_classification`` load our checkpoints as they are
(``model.pretrained``) and begin with momentum encoders equal to the encoders, while LAVIS's own
runner would leave them random; ``albef_vqa`` fails without them, and ``albef_nlvr`` wants fusion
layers that take two images in turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

State = dict[str, Tensor]
LAYER = re.compile(r"(.*\.encoder\.layer\.)(\d+)(\..*)")


def with_momentum(state: State, fusion_layer: int = 6) -> State:
    """Add momentum encoders and projections equal to the others; use as ``model.pretrained``."""
    copies = {
        key.replace(part, f"{part}_m", 1): value
        for key, value in state.items()
        for part in ("visual_encoder", "text_encoder", "vision_proj", "text_proj")
        if key.startswith(f"{part}.")
    }
    return {**state, **copies}


def for_nlvr(state: State, fusion_layer: int) -> State:
    """Double every fusion layer, one for each image (ALBEF 4.2, Figure 3b), with momentum copies.

    Use as ``model.finetuned`` of ``albef_nlvr`` with ``load_finetuned: True``: its own
    ``load_pretrained`` fails. The classifier is new and gets no weights.
    """
    doubled: State = {}
    for key, value in state.items():
        if key.startswith("visual_encoder."):
            doubled[key] = value
        elif key.startswith("text_encoder.bert."):
            key = key.replace("bert.", "", 1)
            found = LAYER.fullmatch(key)
            number = int(found[2]) if found else -1
            if found is None or number < fusion_layer:
                doubled[key] = value
            else:
                first = fusion_layer + 2 * (number - fusion_layer)
                for layer in (first, first + 1):
                    doubled[f"{found[1]}{layer}{found[3]}"] = value
    return with_momentum(doubled)


FORMS: dict[str, Callable[[State, int], State]] = {
    "albef_classification": with_momentum,
    "albef_nlvr": for_nlvr,
    "albef_retrieval": with_momentum,
    "albef_vqa": with_momentum,
}


def export_lavis(checkpoint: str, out: Path, form: str, fusion_layer: int = 6) -> int:
    """Write ``checkpoint`` to the file ``out`` in one of `FORMS`.

    Returns:
        How many tensors were written.

    Raises:
        FileNotFoundError, ValueError: from reading the checkpoint.
    """
    from lavis_mafa.checkpoints import read_checkpoint
    from lavis_mafa.runners.checkpoint import save_atomically

    content = read_checkpoint(checkpoint)
    state = FORMS[form](content.get("model", content), fusion_layer)
    save_atomically({"model": state}, out)
    return len(state)
