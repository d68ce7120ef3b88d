"""Make LAVIS's decoders generate in every supported version of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Inputs of a decoder that need one row per beam.
_PER_BEAM = ("query_embeds", "encoder_hidden_states", "encoder_attention_mask")


class OneRowPerBeam:
    """Mixin for a decoder of LAVIS that gives every beam exactly one row of each input.

    LAVIS repeats images for every beam before it calls ``generate``; newer versions of transformers
    repeat them again, and older versions do not repeat all inputs.
    """

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        for name in _PER_BEAM:
            if kwargs.get(name) is not None:
                kwargs[name] = _rows(kwargs[name], len(input_ids))
        decoder: Any = super()
        inputs: dict[str, Any] = decoder.prepare_inputs_for_generation(
            input_ids, past=past_key_values, **kwargs
        )
        return inputs


def _rows(tensor: Tensor, count: int) -> Tensor:
    """Repeat the rows of ``(n, ...)``, or drop repeated ones, to get ``(count, ...)``."""
    if len(tensor) > count:
        return tensor[:: len(tensor) // count]
    return tensor.repeat_interleave(count // len(tensor), dim=0)
