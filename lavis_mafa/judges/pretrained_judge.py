"""A judge of pairs by a pretrained model of another library, without LAVIS."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lavis_mafa.integrations.cross_encoders import (
    Blip2CrossEncoder,
    DualEncoder,
    match_probabilities,
    require_one_verdict,
)
from lavis_mafa.integrations.pair_encoders import kind_of, load_two_towers
from lavis_mafa.io.processes import progress
from lavis_mafa.judges.discriminators import SampleJudge

_IMAGES = 32  # that are in memory at once
_PAIRS = 32  # in one forward pass
_FORMS = "BLIP-2 with a matching head, a SigLIP, a CrossEncoder, or captions"


class PretrainedJudge(SampleJudge):
    """Judges samples by a model that reads both sides of a pair together.

    Args:
        encoder: a CrossEncoder, or what works as one.
    """

    def __init__(self, encoder: Any) -> None:
        require_one_verdict(encoder)
        self.encoder = encoder

    def know(self, train_set: Any) -> None:
        """Take the pairs, whose method ``anchor`` returns an image or a text by number."""
        self.pairs = train_set
        _, first, image = np.unique(train_set.image_ids, return_index=True, return_inverse=True)
        self._first = first[image.reshape(-1)]

    def probability(self, images: NDArray[Any], texts: NDArray[Any]) -> NDArray[Any]:
        """Return P(match) ``(P,)``, NaN where the image cannot be read; each is read once."""
        size = len(self._first)
        keys, place = np.unique(self._first[images] * size + texts, return_inverse=True)
        image, text = np.divmod(keys, size)
        found = np.full(len(keys), np.nan, np.float32)
        number = np.unique(image, return_inverse=True)[1].reshape(-1) // _IMAGES
        with progress(total=len(keys), unit=" pairs", desc="judging") as bar:
            for rows in np.split(np.arange(len(keys)), np.flatnonzero(np.diff(number)) + 1):
                anchors = {int(one): self._anchor(int(one)) for one in np.unique(image[rows])}
                read = [row for row in rows if anchors[int(image[row])] is not None]
                pairs = [
                    (anchors[int(image[row])], self.pairs.caption(int(text[row]))) for row in read
                ]
                if pairs:
                    probability = match_probabilities(self.encoder, pairs, _PAIRS)
                    found[read] = probability.float().cpu().numpy()
                bar.update(len(rows))
        return found[place.reshape(-1)]

    def _anchor(self, number: int) -> Any:
        try:
            return self.pairs.anchor(number)
        except OSError:
            return None


def load_pretrained_judge(name: str, of_texts: bool, device: torch.device) -> PretrainedJudge:
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
        return PretrainedJudge(encoder)
    if kind.startswith("clip"):
        raise ValueError(f"a CLIP has learned no bound for a match; expected {_FORMS}")
    if kind.startswith("siglip"):
        return PretrainedJudge(DualEncoder(*load_two_towers(name, device)))
    from transformers import Blip2ForImageTextRetrieval, Blip2Processor

    model: Any = Blip2ForImageTextRetrieval.from_pretrained(name)
    return PretrainedJudge(
        Blip2CrossEncoder(model.to(device), Blip2Processor.from_pretrained(name))
    )
