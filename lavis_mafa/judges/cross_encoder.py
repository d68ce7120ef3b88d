"""Con-D as a cross-encoder of sentence-transformers for images and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor

from lavis_mafa.algorithm.options import option
from lavis_mafa.integrations.cross_encoders import match_probabilities, require_one_verdict
from lavis_mafa.judges.discriminators import DISCRIMINATORS
from lavis_mafa.judges.pair_reader import PLACE, Pair, PairReader, checkpoint_of, explain_not_loaded

# Older versions read images from 5.4 on, but import a module that lies in the model's folder in
# spite of ``trust_remote_code=False``.
_NAME, _PACKAGE, _LEAST = "cross_encoder", "sentence-transformers", 6
_INSTALL = f'pip install "{_PACKAGE}>={_LEAST}"'


@dataclass(frozen=True)
class _CrossEncoderSettings:
    """Settings of `_CrossEncoderDiscriminator`."""

    prompt: str | None = option(None, "instruction to the model; null: its own")
    batch_size: int = option(16, "pairs in one forward pass", low=1)


@DISCRIMINATORS.register(_NAME, settings=_CrossEncoderSettings, source="lavis_mafa")
class _CrossEncoderDiscriminator(PairReader):
    """Any CrossEncoder of sentence-transformers that reads an image and a text.

    The probability is the sigmoid of its score, or with two scores the softmax's second.

    Args:
        encoder: the CrossEncoder.
        settings: prompt and batch size.
        precision, longest: see `PairReader`.

    Raises:
        ValueError: if it reads no images, or has more than two scores.
    """

    def __init__(
        self,
        encoder: Any,
        settings: _CrossEncoderSettings,
        precision: str = "fp32",
        longest: int | None = None,
    ) -> None:
        if not encoder.supports("image"):
            raise ValueError(
                f"the cross-encoder reads {', '.join(map(str, encoder.modalities))} but no "
                "images, or has no image processor; name a multimodal one"
            )
        require_one_verdict(encoder)
        super().__init__(encoder, precision, longest, settings.batch_size)
        self.settings = settings

    @classmethod
    def from_config(
        cls, cfg: Mapping[str, Any], settings: _CrossEncoderSettings
    ) -> _CrossEncoderDiscriminator:
        """Load the cross-encoder of a ``model.mafa.con_d`` config; no code of it is run.

        Raises:
            ValueError: if it cannot be loaded, or not without running code of its folder.
        """
        problem = problem_of_package(_NAME)
        if problem:
            raise ValueError(f"{PLACE}.arch: {problem}")
        from sentence_transformers import CrossEncoder

        path = checkpoint_of(cfg)
        with explain_not_loaded(path, f"is not a cross-encoder that {_PACKAGE} can load"):
            encoder = CrossEncoder(path, device="cpu", trust_remote_code=False)
        try:
            return cls(encoder, settings, cfg.get("precision", "fp32"), cfg.get("image_size"))
        except ValueError as error:
            raise ValueError(f"{PLACE}.checkpoint: {path}: {error}") from error

    def probabilities(self, pairs: Sequence[Pair]) -> Tensor:
        """Return the probabilities ``(P,)`` of the pairs."""
        return match_probabilities(self.model, pairs, self.batch_size, self.settings.prompt)


def problem_of_package(arch: str) -> str | None:
    """Return what is wrong with the installed sentence-transformers; None: nothing."""
    try:
        found = version(_PACKAGE)
    except PackageNotFoundError:
        return f"{arch} needs the package {_PACKAGE}, which is not installed; {_INSTALL}"
    if int(found.split(".")[0]) < _LEAST:
        return (
            f"{arch} needs {_PACKAGE} >= {_LEAST}, this is {found}, which may run code that lies "
            f"in a model's folder; {_INSTALL}"
        )
    return None
