"""Captions and questions as ALBEF, GRIT-VLP, MAFA and FNE process them."""

from __future__ import annotations

import re
from typing import Any

from lavis.common.registry import registry
from lavis.processors.blip_processors import BlipCaptionProcessor, BlipQuestionProcessor

_MAX_WORDS = 30  # the authors' limit; evaluation of VQA has 50

# LAVIS puts a blank in place of some of these, and leaves the others: "dog's" stays "dog's".
_CHARACTERS = str.maketrans("-/", "  ", ",.'!?\"()*#:;~")
_BLANKS = re.compile(r"\s{2,}")


@registry.register_processor("albef_caption")
class AlbefCaptionProcessor(BlipCaptionProcessor):  # type: ignore[misc]
    """Process a caption: lower case, without punctuation, at most ``max_words`` words.

    The characters ``, . ' ! ? " ( ) * # : ; ~`` are removed, ``-`` and ``/`` become blanks,
    ``<person>`` (of Conceptual Captions) becomes ``person``, and repeated blanks become one.
    """

    def __init__(self, prompt: str = "", max_words: int = _MAX_WORDS) -> None:
        super().__init__(prompt=prompt, max_words=max_words)

    @classmethod
    def from_config(cls, cfg: Any = None) -> AlbefCaptionProcessor:
        """Build from a config with ``prompt`` and ``max_words``, both optional."""
        return cls(**_given(cfg, "prompt", "max_words"))

    def pre_caption(self, caption: str) -> str:
        text = caption.lower().translate(_CHARACTERS).replace("<person>", "person")
        return _first_words(_BLANKS.sub(" ", text).rstrip("\n").strip(" "), self.max_words)


@registry.register_processor("albef_question")
class AlbefQuestionProcessor(BlipQuestionProcessor):  # type: ignore[misc]
    """Process a question: lower case, without punctuation, at most ``max_words`` words.

    Characters are replaced as in `AlbefCaptionProcessor`; repeated blanks are kept.
    """

    def __init__(self, max_words: int = _MAX_WORDS) -> None:
        super().__init__(max_words=max_words)

    @classmethod
    def from_config(cls, cfg: Any = None) -> AlbefQuestionProcessor:
        """Build from a config with an optional ``max_words``."""
        return cls(**_given(cfg, "max_words"))

    def pre_question(self, question: str) -> str:
        return _first_words(question.lower().translate(_CHARACTERS).rstrip(" "), self.max_words)


def _given(cfg: Any, *names: str) -> dict[str, Any]:
    """Return the named keys that a config has."""
    return {name: cfg[name] for name in names if cfg is not None and name in cfg}


def _first_words(text: str, count: int) -> str:
    return " ".join(text.split(" ")[:count])
