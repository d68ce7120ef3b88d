"""LAVIS's tokenizer, and a check that a tokenizer has a vocabulary."""

from __future__ import annotations

from typing import Any

from transformers import BertTokenizer, PreTrainedTokenizerBase

_Parent: Any = BertTokenizer  # its methods have no types


class LavisBertTokenizer(_Parent):  # type: ignore[misc]
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
