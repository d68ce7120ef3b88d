"""Tokenise captions, in the workers of a data loader or in a model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

TOKENS = "text_tokens"  # key of a mini-batch's captions, tokenised for the model in training
CON_D_TOKENS = "con_d_text_tokens"  # and for Con-D
# Keys of a mini-batch: how many captions were cut, and how many have no known word.
CUT, UNKNOWN = COUNTS = ("captions_cut", "captions_unknown")


class Tokens(NamedTuple):
    """Captions as ``input_ids`` and ``attention_mask`` ``(B, L)`` int64, padded to the longest.

    A named tuple, which data loaders can pass between processes and pin in memory.
    """

    input_ids: Tensor
    attention_mask: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Tokens:
        """Return these tokens on a device."""
        return Tokens(*(tensor.to(device, non_blocking=non_blocking) for tensor in self))


Captions = Sequence[str] | Tokens


def captions_of(samples: Mapping[str, Any], key: str = TOKENS) -> Captions:
    """Return a mini-batch's captions: its tokens if it has them, otherwise its ``text_input``.

    Code that changes ``text_input`` of a mini-batch must remove its tokens.

    Args:
        key: `TOKENS` or `CON_D_TOKENS`.
    """
    captions: Captions = samples[key] if key in samples else samples["text_input"]
    return captions


def tokens_of(tokenizer: Any, captions: Sequence[str], max_length: int) -> Tokens:
    """Tokenise B captions with a Hugging Face tokenizer, cut at ``max_length`` tokens."""
    made = _tokenised(tokenizer, captions, max_length)
    return Tokens(made.input_ids, made.attention_mask)


def _tokenised(tokenizer: Any, captions: Sequence[str], max_length: int) -> Any:
    return tokenizer(
        list(captions),
        padding="longest",
        truncation=True,
        max_length=max_length,
        return_token_type_ids=False,
        return_tensors="pt",
    )


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a model, for the workers of a data loader.

    Args:
        tokenizer: a Hugging Face tokenizer.
        max_length: tokens at which a caption is cut.
    """

    tokenizer: Any
    max_length: int

    @classmethod
    def of(cls, model: Any) -> Tokenizer:
        """Return the tokenizer of a model with ``tokenizer`` and ``max_txt_len``."""
        return cls(model.tokenizer, model.max_txt_len)

    def __call__(self, captions: Sequence[str]) -> Tokens:
        return self.counted(captions)[0]

    def counted(
        self, captions: Sequence[str], cut_before: Sequence[bool] = ()
    ) -> tuple[Tokens, dict[str, int]]:
        """Return tokens, and how many captions were cut and are unknown.

        `CUT` counts captions that were cut, here or before; `UNKNOWN` counts captions that consist
        of special tokens and unknown words. Slow tokenizers do not report cuts, so with them every
        caption of exactly ``max_length`` tokens counts as cut.

        Args:
            cut_before: whether each caption was cut before; empty if none was.
        """
        if get_worker_info() is not None:
            # A forked worker does not have the threads of the main process, and would wait for them
            # forever.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        made = _tokenised(self.tokenizer, captions, self.max_length)
        if made.encodings is None:
            cut_here = (made.attention_mask.sum(dim=1) >= self.max_length).tolist()
        else:
            cut_here = [bool(encoding.overflowing) for encoding in made.encodings]
        cut = sum(map(any, zip_longest(cut_here, cut_before, fillvalue=False)))
        known = ~torch.isin(made.input_ids, self._special)
        counts = {CUT: cut, UNKNOWN: int((~known.any(dim=1)).sum())}
        return Tokens(made.input_ids, made.attention_mask), counts

    @cached_property
    def _special(self) -> Tensor:
        """Return the ids of padding, [CLS], [UNK] and other special tokens."""
        return torch.tensor(self.tokenizer.all_special_ids)

    def agrees_with(self, other: Tokenizer) -> bool:
        """Return whether two tokenizers give equal tokens for every caption."""
        return self.max_length == other.max_length and self._rules() == other._rules()

    def _rules(self) -> Any:
        """Return everything that the tokens depend on, except their maximum number."""
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:  # a slow tokenizer equals only itself
            return id(tokenizer)
        rules = json.loads(backend.to_str())
        rules["padding"] = rules["truncation"] = None  # settings of the last call, not rules
        return rules, tokenizer.padding_side, tokenizer.truncation_side, tokenizer.pad_token_id
