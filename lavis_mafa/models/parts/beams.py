"""Generation with LAVIS's decoders in every supported version of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# What stands beside the tokens, one row for each of them.
BESIDE = ("query_embeds", "encoder_hidden_states", "encoder_attention_mask")


class OneRowPerBeam:
    """Mixin before a decoder of LAVIS.

    LAVIS repeats images for every beam before it calls ``generate``; newer versions of transformers
    repeat them once more, and older ones do not repeat all of them.
    """

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        for name in BESIDE:
            if kwargs.get(name) is not None:
                kwargs[name] = rows(kwargs[name], len(input_ids))
        decoder: Any = super()
        return decoder.prepare_inputs_for_generation(input_ids, past=past_key_values, **kwargs)


def rows(beside: Tensor, count: int) -> Tensor:
    """``(n, ...)`` as ``(count, ...)``, each row repeated, or of equal neighbours one kept."""
    if len(beside) > count:
        return beside[:: len(beside) // count]
    return beside.repeat_interleave(count // len(beside), dim=0)
