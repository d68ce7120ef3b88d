"""Give LAVIS's models a base class and a tokenizer with the methods that newer transformers
lack."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from transformers import BertTokenizer, PreTrainedTokenizerBase, modeling_utils
from transformers.generation.utils import GenerationMixin

# LAVIS's classes that derive from PreTrainedModel, by module.
_HEIRS = {
    "lavis.models.med": "BertPreTrainedModel",
    "lavis.models.blip2_models.Qformer": "BertPreTrainedModel",
    "lavis.models.blip_models.nlvr_encoder": "BertPreTrainedModel",
    "lavis.models.blip2_models.modeling_opt": "OPTPreTrainedModel",
    "lavis.models.blip2_models.modeling_t5": "T5PreTrainedModel",
}
# LAVIS's modules that load BERT's tokenizer.
_READERS = (
    "lavis.models.albef_models",
    "lavis.models.blip_models.blip",
    "lavis.models.blip2_models.blip2",
)
# In older versions, all models can generate.
_BASES: tuple[Any, ...] = (GenerationMixin, modeling_utils.PreTrainedModel)
if issubclass(modeling_utils.PreTrainedModel, GenerationMixin):
    _BASES = (modeling_utils.PreTrainedModel,)

# T5Config of transformers 5 sets `tie_word_embeddings` to True, ties all weights that a file has
# once, and keeps the file's own value under this name. LAVIS's T5 scales its logits by that value.
_SCALES = "scale_decoder_outputs"
_Parent: Any = BertTokenizer  # its methods have no types


def adopt() -> None:
    """Replace the base class and the tokenizer of LAVIS's models after their import, if needed."""
    if hasattr(modeling_utils.PreTrainedModel, "get_head_mask"):
        return
    for module, name in _HEIRS.items():
        heir: Any = getattr(importlib.import_module(module), name)
        if modeling_utils.PreTrainedModel in heir.__bases__:
            heir.__bases__ = (_LavisPreTrainedModel,)
    for module in _READERS:
        importlib.import_module(module).BertTokenizer = _LavisBertTokenizer  # type: ignore[attr-defined]


class _LavisPreTrainedModel(*_BASES):  # type: ignore[misc]
    """`PreTrainedModel` with the interface that LAVIS expects."""

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        if hasattr(config, _SCALES):
            config.tie_word_embeddings = getattr(config, _SCALES)
        super().__init__(config, *inputs, **kwargs)

    @classmethod
    def can_generate(cls) -> bool:
        """Return whether the class itself prepares inputs for generation."""
        return "prepare_inputs_for_generation" in {
            name for one in cls.__mro__ if one is not GenerationMixin for name in vars(one)
        }

    def _supports_default_dynamic_cache(self) -> bool:
        """Keep past keys and values as tuples, which LAVIS's models return and index."""
        return False

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, mode: Any, batch_size: int, *others: Any
    ) -> Any:
        """Restore the attention mask ``(rows, L)`` that `generate` drops when it has only ones.

        LAVIS's OPT would otherwise build a mask without the soft prompts before the text.
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
        """Save every shared weight once, under the first of its names.

        Newer versions raise an error, since LAVIS's models do not declare shared weights.
        """
        given = options.pop("state_dict", None) or self.state_dict()
        repeated = _repeated_names(self)
        kept = {name: weight for name, weight in given.items() if name not in repeated}
        return super().save_pretrained(folder, *others, state_dict=kept, **options)

    def init_weights(self) -> None:
        """Initialise and tie the weights; LAVIS's BERT calls this instead of `post_init`."""
        if hasattr(self, "all_tied_weights_keys"):  # `post_init` has begun
            super().init_weights()
        else:
            self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the first name of every shared weight by each of its other names.

        Newer versions tie the weights named in `_tied_weights_keys`, which LAVIS's models lack.
        Without this, their heads would silently have separate weights.
        """
        if all_submodels:
            of_parts: dict[str, str] = super().get_expanded_tied_weights_keys(all_submodels=True)
            return of_parts
        # A head's bias has two names, of which a file has one; the other would seem missing and
        # become zero.
        found = _repeated_names(self)
        output, config = self.get_output_embeddings(), self.config
        # transformers unties weights that a file has separately, as in Flan-T5.
        tied = getattr(config, "tie_word_embeddings", True) or hasattr(config, _SCALES)
        if output is None or not tied:
            return found
        names = {id(module): name for name, module in self.named_modules()}
        tied_to = f"{names[id(self.get_input_embeddings())]}.weight"
        return {**found, f"{names[id(output)]}.weight": tied_to}

    def get_output_embeddings(self) -> Any:
        """Return the head that predicts tokens, or None."""
        return None

    def invert_attention_mask(self, mask: Tensor) -> Tensor:
        """Return the tensor ``(B, 1, 1 or L, L)`` to add to logits: 0 where the mask is 1."""
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
        """Return a mask for each layer; None for each if no mask is given."""
        if head_mask is not None:
            raise NotImplementedError(
                "head_mask is not supported with this version of transformers"
            )
        return [None for _ in range(num_hidden_layers)]


def _repeated_names(model: Any) -> dict[str, str]:
    """Return the first name of each parameter by its other names."""
    named = list(model.named_parameters(remove_duplicate=False))
    first = {id(weight): name for name, weight in reversed(named)}
    return {name: first[id(weight)] for name, weight in named if first[id(weight)] != name}


class _LavisBertTokenizer(_Parent):  # type: ignore[misc]
    """`BertTokenizer` with the interface that LAVIS's models expect."""

    @classmethod
    def from_pretrained(cls, name: Any, *arguments: Any, **options: Any) -> Any:
        """Load the tokenizer.

        Raises:
            OSError: if no vocabulary is found.
        """
        return with_vocabulary(super().from_pretrained(name, *arguments, **options), str(name))

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """Return the ids of the tokens added as ``additional_special_tokens``."""
        return [self.convert_tokens_to_ids(token) for token in self.extra_special_tokens]


def with_vocabulary(loaded: Any, name: str) -> Any:
    """Return a loaded object, unless it is a tokenizer that knows only special tokens.

    From version 5 on, transformers returns such a tokenizer if it finds no vocabulary.

    Raises:
        OSError: if it is such a tokenizer.
    """
    if isinstance(loaded, PreTrainedTokenizerBase):
        if not set(loaded.get_vocab()) - set(loaded.all_special_tokens):
            raise OSError(f"{name} has no vocabulary")
    return loaded
