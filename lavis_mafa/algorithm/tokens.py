"""Captions as token ids, made where data are loaded or where a model reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

TOKENS = "text_tokens"  # key of a mini-batch's captions as the model in training reads them
CON_D_TOKENS = "con_d_text_tokens"  # and as Con-D reads them
# Keys of numbers of a mini-batch: captions that are cut, and those without any word that is known.
CUT, UNKNOWN = COUNTS = ("captions_cut", "captions_unknown")


class Tokens(NamedTuple):
    """Captions as ``input_ids`` and ``attention_mask`` ``(B, L)`` int64, padded to the longest.

    A named tuple: data loaders send those from worker to worker and pin their memory.
    """

    input_ids: Tensor
    attention_mask: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Tokens:
        """These tokens on a device."""
        return Tokens(*(tensor.to(device, non_blocking=non_blocking) for tensor in self))


Captions = Sequence[str] | Tokens


def captions_of(samples: Mapping[str, Any], key: str = TOKENS) -> Captions:
    """A mini-batch's captions, tokenised where it brings that: as `TOKENS` or `CON_D_TOKENS`.

    Who changes ``text_input`` of a mini-batch must take the tokens out.
    """
    return samples.get(key, samples["text_input"])


def tokens_of(tokenizer: Any, captions: Sequence[str], max_length: int) -> Tokens:
    """Tokens ``(B, L)`` of B captions by a Hugging Face tokenizer, cut at ``max_length``."""
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
    """How a model reads captions, for the workers of a data loader.

    Args:
        tokenizer: a Hugging Face tokenizer.
        max_length: tokens at which a caption is cut.
    """

    tokenizer: Any
    max_length: int

    @classmethod
    def of(cls, model: Any) -> Tokenizer:
        """That of a model with ``tokenizer`` and ``max_txt_len``."""
        return cls(model.tokenizer, model.max_txt_len)

    def __call__(self, captions: Sequence[str]) -> Tokens:
        return self.counted(captions)[0]

    def counted(self, captions: Sequence[str]) -> tuple[Tokens, dict[str, int]]:
        """Tokens, and how many captions were cut (`CUT`) and how many have no token but special
        ones and that of unknown words (`UNKNOWN`).

        Tokenizers in Python do not tell what they cut; there captions of exactly ``max_length``
        tokens count as cut.
        """
        if get_worker_info() is not None:
            # A forked worker would wait for ever for the threads that the main process had.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        made = _tokenised(self.tokenizer, captions, self.max_length)
        if made.encodings is None:
            cut = int((made.attention_mask.sum(dim=1) >= self.max_length).sum())
        else:
            cut = sum(bool(encoding.overflowing) for encoding in made.encodings)
        known = ~torch.isin(made.input_ids, self._special)
        counts = {CUT: cut, UNKNOWN: int((~known.any(dim=1)).sum())}
        return Tokens(made.input_ids, made.attention_mask), counts

    @cached_property
    def _special(self) -> Tensor:
        """Ids of padding, [CLS], [UNK] and the like."""
        return torch.tensor(self.tokenizer.all_special_ids)

    def agrees_with(self, other: Tokenizer) -> bool:
        """Whether both give the same tokens for every caption: same rules, words and length."""
        return self.max_length == other.max_length and self._rules() == other._rules()

    def _rules(self) -> Any:
        """All that decides on tokens but their number."""
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:  # a tokenizer in Python is like itself alone
            return id(tokenizer)
        told = json.loads(backend.to_str())
        told["padding"] = told["truncation"] = None  # left by the last call
        return told, tokenizer.padding_side, tokenizer.truncation_side, tokenizer.pad_token_id
