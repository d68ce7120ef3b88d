"""python -m lavis_mafa.export_checkpoint: a checkpoint in the form that a LAVIS model expects.

Our checkpoints hold no momentum encoders. LAVIS's models for downstream tasks have them: under
``runner_mafa``, ``albef_retrieval`` and ``albef_classification`` load our checkpoints as they are
(``model.pretrained``) and begin with momentum encoders equal to the encoders, while LAVIS's own
runner would leave them random; ``albef_vqa`` fails without them, and ``albef_nlvr`` wants fusion
layers that take two images in turn.
"""

from __future__ import annotations

import argparse
import re
import sys
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


def main(argv: list[str] | None = None) -> int:
    from lavis_mafa.checkpoints import read_checkpoint
    from lavis_mafa.runners.checkpoint import save_atomically

    parser = argparse.ArgumentParser(prog="export_checkpoint", description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True, choices=sorted(FORMS), help="LAVIS model")
    parser.add_argument("--fusion-layer", type=int, default=6, help="first fusion layer of BERT")
    args = parser.parse_args(argv)
    checkpoint = read_checkpoint(args.checkpoint)
    state = FORMS[args.model](checkpoint.get("model", checkpoint), args.fusion_layer)
    save_atomically({"model": state}, args.out)
    print(f"wrote {args.out}: {len(state)} tensors for {args.model}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
