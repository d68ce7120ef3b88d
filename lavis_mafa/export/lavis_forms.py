"""Convert ALBEF checkpoints to the format of LAVIS's models for downstream tasks.

Our checkpoints have no momentum encoders, but LAVIS's models for downstream tasks need them. Under
``runner_mafa``, ``albef_retrieval`` and ``albef_classification`` load our checkpoints directly
(``model.pretrained``), and momentum encoders start as copies of the encoders; under LAVIS's runner
they would stay random. ``albef_vqa`` fails without them, and ``albef_nlvr`` expects doubled fusion
layers, one for each of its two images.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from lavis_mafa.io.checkpoints import read_checkpoint
from lavis_mafa.models.families.albef.fusion_layers import double_fusion_layers
from lavis_mafa.models.weight_loading import check_origin, fold_token_types
from lavis_mafa.runners.checkpoint import save_atomically

_State = dict[str, Tensor]
FORMS = ("albef_classification", "albef_nlvr", "albef_retrieval", "albef_vqa")
_PARTS = ("visual_encoder.", "text_encoder.")


def with_momentum(state: _State) -> _State:
    """Add momentum encoders and projections as copies; use the result as ``model.pretrained``."""
    copies = {
        key.replace(part, f"{part}_m", 1): value
        for key, value in state.items()
        for part in ("visual_encoder", "text_encoder", "vision_proj", "text_proj")
        if key.startswith(f"{part}.")
    }
    return {**state, **copies}


def _for_nlvr(state: _State, fusion_layer: int) -> _State:
    """Double every fusion layer, one for each image (ALBEF 4.2, Figure 3b), with momentum copies.

    Use the result as ``model.finetuned`` of ``albef_nlvr`` with ``load_finetuned: True``, because
    its ``load_pretrained`` fails. The classifier is new and stays random. ``albef_nlvr_mafa`` needs
    no conversion.
    """
    encoders = {
        key.replace("encoder.bert.", "encoder.", 1): value
        for key, value in state.items()
        if key.startswith(("visual_encoder.", "text_encoder.bert."))
    }
    return with_momentum(double_fusion_layers(encoders, fusion_layer))


def _in_form(state: _State, form: str, fusion_layer: int) -> _State:
    """Convert the weights of a checkpoint to one of `FORMS`."""
    return _for_nlvr(state, fusion_layer) if form == "albef_nlvr" else with_momentum(state)


def export_lavis(checkpoint: str, out: Path, form: str, fusion_layer: int = 6) -> int:
    """Write ``checkpoint`` to the file ``out`` in one of `FORMS`.

    Returns:
        The number of tensors written.

    Raises:
        FileExistsError: if ``out`` exists.
        FileNotFoundError, ValueError: from reading the checkpoint, or if it is not one of ALBEF.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists already")
    content = read_checkpoint(checkpoint)
    check_origin(content, form, None, checkpoint)
    weights = content.get("model", content)
    lost = [part for part in _PARTS if not any(str(key).startswith(part) for key in weights)]
    if lost:
        raise ValueError(
            f"{checkpoint} has no weights below {' and '.join(lost)}: it is not one of ALBEF, "
            "and --to hf takes those of BLIP and BLIP-2"
        )
    if any(str(key).startswith(f"{_PARTS[0]}patch_embed.convs.") for key in weights):
        raise ValueError(f"{checkpoint} has a convolutional stem, which LAVIS's models lack")
    if f"{_PARTS[0]}proj.weight" in weights:
        raise ValueError(f"{checkpoint} reads features of images, which LAVIS's models cannot")
    state = _in_form(fold_token_types(weights, ()), form, fusion_layer)
    save_atomically({"model": state}, out)
    return len(state)
