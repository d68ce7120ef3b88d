"""A frozen model whose similarities hard negatives are picked by (GRIT-VLP, Table 1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lavis_mafa.algorithm.discriminator import ENCODER_TOKENS, ENCODER_VIEW, EncodedByFrozen
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.tokens import captions_of
from lavis_mafa.judges.frozen import MATCHING_PARTS, PROJECTION_PARTS, FrozenModel


class ModelNegativesEncoder(FrozenModel):
    """The encoders of a LAVIS model that was trained with ITC; its fusion is not used.

    Args:
        model, precision, processor, own_view: see `FrozenModel`.

    Raises:
        TypeError: if no backbone can drive the model, or it has no temperature of ITC.
    """

    key, title = "model.mafa.negatives_encoder", "negatives_encoder"
    view, tokens = ENCODER_VIEW, ENCODER_TOKENS
    parts = (*MATCHING_PARTS, *PROJECTION_PARTS)
    purpose, trained = "compare", "the projections of ITC"

    def __init__(self, model: Any, *how: Any, **more: Any) -> None:
        super().__init__(model, *how, **more)
        if not hasattr(model, "temp"):
            raise TypeError(
                f"{type(model).__name__} cannot pick hard negatives: it has no temperature of ITC "
                "(temp); use a model of pre-training or of retrieval"
            )

    def compare(
        self, samples: dict[str, Any], ranks: Ranks | None = None, seen: Tensor | None = None
    ) -> EncodedByFrozen:
        ranks = ranks or Ranks(together=False)
        images, seen = self._inputs(samples, seen)
        backbone = self.step_backbone
        with torch.inference_mode():
            with self.autocast(images.device):
                own_images = backbone.encode_images(images, seen)
                own_texts = backbone.encode_texts(captions_of(samples, self.tokens))
            of_images, of_texts = own_images.features, own_texts.features
            assert of_images is not None and of_texts is not None
            temperature = backbone.temperature
            found = (
                backbone.similarity(of_images, ranks.gather(of_texts)) / temperature,
                backbone.similarity(ranks.gather(of_images), of_texts).t() / temperature,
                temperature,
                *backbone.grit_vectors(own_images, own_texts),
            )
        # Cloned outside: tensors of inference mode could not be changed in place by their users.
        return EncodedByFrozen(*(one.detach().clone() for one in found))
