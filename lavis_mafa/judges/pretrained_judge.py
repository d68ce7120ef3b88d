"""A judge of pairs by a pretrained model of another library, without LAVIS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.integrations.cross_encoders import (
    Blip2CrossEncoder,
    match_probabilities,
    require_one_verdict,
)
from lavis_mafa.integrations.pair_encoders import kind_of, load_dual_encoder

_PAIRS = 32  # in one forward pass
_FORMS = "BLIP-2 with a matching head, a SigLIP, a CrossEncoder, or captions"


class _PretrainedJudge:
    """Judges pairs by a model that reads both of their sides together.

    Args:
        encoder: a CrossEncoder, or what works as one.
    """

    def __init__(self, encoder: Any) -> None:
        require_one_verdict(encoder)
        self.encoder = encoder

    def judge(
        self,
        samples: dict[str, Any],
        image_of: Tensor,
        text_of: Tensor,
        ranks: Ranks | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Return P(match) ``(P,)`` of images, or texts, and captions; NaN where there is none."""
        images, captions = samples["image"], samples["text_input"]
        both = zip(image_of.tolist(), text_of.tolist(), strict=True)
        pairs = [(images[image], captions[text]) for image, text in both]
        read = torch.tensor([image is not None for image, _ in pairs], dtype=torch.bool)
        found = torch.full((len(pairs),), torch.nan)
        if read.any():
            given = [pair for pair in pairs if pair[0] is not None]
            found[read] = match_probabilities(self.encoder, given, _PAIRS).float().cpu()
        return found


def load_pretrained_judge(name: str, of_texts: bool, device: torch.device) -> Any:
    """Load a judge by the form of its folder or name; no code of it is run.

    Args:
        of_texts: whether pairs are of two texts, instead of an image and a text.

    Raises:
        OSError, ValueError, RuntimeError: if it cannot be loaded, or does not read such pairs.
    """
    kind = kind_of(name)
    if of_texts or not kind.startswith(("blip-2", "siglip", "clip")):
        from sentence_transformers import CrossEncoder
        from transformers import AutoConfig

        for form in AutoConfig.from_pretrained(name).architectures or []:
            if form.endswith("Model"):  # CrossEncoder would give it a head of random weights
                raise ValueError(f"got a {form}, which has no head that judges; expected {_FORMS}")
        encoder = CrossEncoder(name, device=str(device), trust_remote_code=False)
        if not of_texts and not encoder.supports("image"):
            raise ValueError(f"this CrossEncoder reads only texts; for images expected {_FORMS}")
        return _PretrainedJudge(encoder)
    if kind.startswith("clip"):
        raise ValueError(f"a CLIP has learned no bound for a match; expected {_FORMS}")
    if kind.startswith("siglip"):
        return _PretrainedJudge(load_dual_encoder(name, device))
    from transformers import Blip2ForImageTextRetrieval, Blip2Processor

    model: Any = Blip2ForImageTextRetrieval.from_pretrained(name)
    return _PretrainedJudge(
        Blip2CrossEncoder(model.to(device), Blip2Processor.from_pretrained(name))
    )
