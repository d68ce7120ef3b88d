"""A base class for LAVIS's models with what transformers' `PreTrainedModel` once had."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import modeling_utils
from transformers.generation.utils import GenerationMixin

# Models of older versions can all generate.
_BASES: tuple[Any, ...] = (GenerationMixin, modeling_utils.PreTrainedModel)
if issubclass(modeling_utils.PreTrainedModel, GenerationMixin):
    _BASES = (modeling_utils.PreTrainedModel,)

# T5Config of transformers 5 sets `tie_word_embeddings` to True, ties all weights that a file has
# once, and keeps the file's value under this name. LAVIS's T5 scales its logits by the file's.
_SCALES = "scale_decoder_outputs"


class LavisPreTrainedModel(*_BASES):  # type: ignore[misc]
    """`PreTrainedModel` as LAVIS expects it."""

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        if hasattr(config, _SCALES):
            config.tie_word_embeddings = getattr(config, _SCALES)
        super().__init__(config, *inputs, **kwargs)

    @classmethod
    def can_generate(cls) -> bool:
        """Return whether the class prepares inputs for generation itself."""
        return "prepare_inputs_for_generation" in {
            name for one in cls.__mro__ if one is not GenerationMixin for name in vars(one)
        }

    def _supports_default_dynamic_cache(self) -> bool:
        """Keep earlier keys and values as the tuples that LAVIS's models return and index."""
        return False

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, mode: Any, batch_size: int, *others: Any
    ) -> Any:
        """Restore the attention mask ``(rows, L)`` that `generate` drops when it has only ones.

        LAVIS's OPT would make one without the soft prompts before the text.
        """
        length = getattr(generation_config, "_mask_length", None)
        if length and model_kwargs.get("attention_mask", False) is None:
            per_image = max(generation_config.num_beams, generation_config.num_return_sequences)
            mask = torch.ones(batch_size * per_image, length, dtype=torch.long, device=self.device)
            model_kwargs["attention_mask"] = mask
        return super()._prepare_cache_for_generation(
            generation_config, model_kwargs, mode, batch_size, *others
        )

    def save_pretrained(self, folder: Any, *others: Any, **options: Any) -> Any:
        """Save a shared weight once, under the first of its names.

        Newer versions refuse to guess, since LAVIS's models do not declare what they share.
        """
        given = options.pop("state_dict", None) or self.state_dict()
        repeated = _repeated_names(self)
        kept = {name: weight for name, weight in given.items() if name not in repeated}
        return super().save_pretrained(folder, *others, state_dict=kept, **options)

    def init_weights(self) -> None:
        """Initialise and tie the weights; LAVIS's BERT calls it where others call `post_init`."""
        if hasattr(self, "all_tied_weights_keys"):  # `post_init` has begun
            super().init_weights()
        else:
            self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return what shared weights are tied to: a first name by each further name.

        Newer versions tie what `_tied_weights_keys` names, which LAVIS's models lack: without this,
        their heads would silently be weights of their own.
        """
        if all_submodels:
            of_parts: dict[str, str] = super().get_expanded_tied_weights_keys(all_submodels=True)
            return of_parts
        # A head's bias has two names: a file has one, and what seems missing would become zero.
        found = _repeated_names(self)
        output, config = self.get_output_embeddings(), self.config
        # Transformers unties what a file has separately, as Flan-T5's has.
        tied = getattr(config, "tie_word_embeddings", True) or hasattr(config, _SCALES)
        if output is None or not tied:
            return found
        names = {id(module): name for name, module in self.named_modules()}
        tied_to = f"{names[id(self.get_input_embeddings())]}.weight"
        return {**found, f"{names[id(output)]}.weight": tied_to}

    def get_output_embeddings(self) -> Any:
        """Return the head that predicts tokens; None: the model has none."""
        return None

    def invert_attention_mask(self, mask: Tensor) -> Tensor:
        """Return what to add to logits ``(B, 1, 1 or L, L)``: 0 where the mask is 1."""
        extended = mask[:, None, :, :] if mask.ndim == 3 else mask[:, None, None, :]
        return (1.0 - extended.to(self.dtype)) * torch.finfo(self.dtype).min

    def get_extended_attention_mask(
        self, attention_mask: Tensor, input_shape: Any, device: Any = None, dtype: Any = None
    ) -> Tensor:
        """Return the mask to add to the logits of self-attention, causal in a decoder."""
        dtype = dtype or self.dtype
        mask = attention_mask[:, None, :, :] if attention_mask.ndim == 3 else None
        if mask is None:
            mask = attention_mask[:, None, None, :]
            if self.config.is_decoder:
                length, width = input_shape[1], attention_mask.shape[1]
                causal = torch.ones(length, width, device=attention_mask.device, dtype=dtype)
                mask = causal.tril(width - length)[None, None] * mask
        return (1.0 - mask.to(dtype)) * torch.finfo(dtype).min

    def get_head_mask(
        self, head_mask: Tensor | None, num_hidden_layers: int, is_attention_chunked: bool = False
    ) -> Any:
        """Return a mask for each layer; without a given one, None for each."""
        if head_mask is not None:
            raise NotImplementedError(
                "head_mask is not supported with this version of transformers"
            )
        return [None for _ in range(num_hidden_layers)]


def _repeated_names(model: Any) -> dict[str, str]:
    """Return the first name of each parameter by its further names."""
    named = list(model.named_parameters(remove_duplicate=False))
    first = {id(weight): name for name, weight in reversed(named)}
    return {name: first[id(weight)] for name, weight in named if first[id(weight)] != name}
