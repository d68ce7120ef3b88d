"""Check that an exported folder gives the same outputs as the LAVIS model."""

from __future__ import annotations

from pathlib import Path

import torch

from lavis_mafa.export.hub_form import HubForm, load_exported

# Relative to the largest output of a kind; the float32 noise of a deep model is well below it.
TOLERANCE = 1e-4


def compare(form: HubForm, folder: Path, batch: int = 2, length: int = 9, seed: int = 0) -> str:
    """Compare the outputs of a LAVIS model and of its exported folder on random input.

    Args:
        form: with the LAVIS model, its weights in float32.
        folder: written by `lavis_mafa.export.hugging_face.write_folder`.
        batch, length, seed: of the random input, see `HubForm.inputs`.

    Returns:
        A text with the largest absolute difference of each output.

    Raises:
        ValueError: if one is above `TOLERANCE` times the largest output of its kind (or 1).
    """
    inputs = form.inputs(batch, length, seed)
    with torch.no_grad():
        ours = form.ours(*inputs)
        theirs = form.theirs(load_exported(type(form), folder), *inputs)
    lines = []
    for name, expected in ours.items():
        # The exported vocabulary may have grown: compare the logits that LAVIS has.
        output = theirs[name][..., : expected.shape[-1]]
        difference = float((expected - output).abs().max())
        allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
        if not difference <= allowed:
            cause = f" If the difference is small: {form.cause()}" if form.cause() else ""
            raise ValueError(
                f"{name} of the exported model differ by {difference:.2g} from LAVIS's (at most "
                f"{allowed:.2g} is allowed).{cause}"
            )
        lines.append(f"{name}: largest difference from LAVIS {difference:.2g}")
    return "\n".join(lines)
