"""Con-D: the frozen discriminator that detects hard negatives which match (MAFA 4.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.backbone import Images, Texts
from lavis_mafa.algorithm.discriminator import VIEW, Discriminator, Truth
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.registry import Registry, Section
from lavis_mafa.algorithm.tokens import CON_D_TOKENS, captions_of
from lavis_mafa.judges.con_d_settings import ConDSettings
from lavis_mafa.judges.frozen import MATCHING_PARTS, FrozenModel

# Discriminators that are not LAVIS models, for ``model.mafa.con_d.arch``: classes that implement
# `Discriminator`, constructed without arguments or with an object of their settings class.
DISCRIMINATORS: Registry[Callable[..., Discriminator]] = Registry(
    "discriminator", Section("model.mafa.con_d", [one.name for one in fields(ConDSettings)])
)


class ModelDiscriminator(FrozenModel):
    """Con-D as a LAVIS model with an ITM head.

    Args:
        model, precision, processor, own_view: see `FrozenModel`.

    Raises:
        TypeError: if no backbone can drive the model.
    """

    key, title, view, tokens = "model.mafa.con_d", "Con-D", VIEW, CON_D_TOKENS
    parts, purpose, trained = MATCHING_PARTS, "judge", "an ITM head"

    def judge(
        self,
        samples: dict[str, Any],
        image_of: Tensor,
        text_of: Tensor,
        ranks: Ranks | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        ranks = ranks or Ranks(together=False)
        images, seen = self._inputs(samples, seen)
        backbone = self.step_backbone
        with torch.inference_mode():
            with self.autocast(images.device):
                encoded = backbone.encode_images(images, seen, for_matching=True)
                captions = captions_of(samples, self.tokens)
                texts = backbone.encode_texts(captions, for_matching=True)
                encoded, texts = ranks.images(encoded), ranks.texts(texts)
                logits = self._match(encoded, texts, image_of, text_of)
        # Cloned outside, because autograd cannot save tensors of inference mode.
        return torch.softmax(logits.clone().float(), dim=1)[:, 1]

    def _match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        if not len(image_of):
            return images.embeds.new_zeros(0, 2)
        return self.step_backbone.match(images, texts, image_of, text_of)


class SampleJudge:
    """A Con-D that judges samples of the training data by their numbers, without their images.

    Attributes:
        processor: None: it needs no view of an image.
    """

    processor: ClassVar[None] = None

    def know(self, train_set: Any) -> None:
        """Take what it needs of a `TrainingSet`, before it judges.

        Raises:
            ValueError: if the data do not have it.
        """
        raise NotImplementedError

    def probability(self, images: NDArray[Any], texts: NDArray[Any]) -> NDArray[Any]:
        """Return P(match) ``(P,)`` of the images and captions of samples with these numbers."""
        raise NotImplementedError

    def judge(
        self,
        samples: dict[str, Any],
        image_of: Tensor,
        text_of: Tensor,
        ranks: Ranks | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        numbers = samples["loaded_index"].cpu().numpy()
        found = self.probability(numbers[image_of.cpu().numpy()], numbers[text_of.cpu().numpy()])
        return torch.from_numpy(np.asarray(found)).float().to(image_of.device)


@DISCRIMINATORS.register("oracle", source="lavis_mafa")
class _Oracle(SampleJudge):
    """A Con-D that returns the ground truth of a data set that has it, such as ``toy_scenes``.

    P(match) is 1 for pairs that the data set knows to be valid, and 0 for all others. If it knows
    only some pairs, such as those that people judged, the unknown pairs also have 0, and so remain
    negatives in training.
    """

    needs_self_check = False  # the truth about random pairs needs no check

    def __init__(self) -> None:
        self.truth: Truth | None = None

    def know(self, train_set: Any) -> None:
        if train_set.truth is None:
            raise ValueError(
                "model.mafa.con_d.arch is oracle, but the training data do not say which "
                "pairs are valid; set build_info.truth of image_text_json or "
                "image_text_shards, train on toy_scenes, or give a model as Con-D"
            )
        self.truth = train_set.truth

    def probability(self, images: NDArray[Any], texts: NDArray[Any]) -> NDArray[Any]:
        if self.truth is None:
            raise RuntimeError(
                "the oracle needs a training set whose truth is known (toy_scenes, or a local "
                "builder with build_info.truth); use a model as model.mafa.con_d, or such data"
            )
        return self.truth(images, texts)
