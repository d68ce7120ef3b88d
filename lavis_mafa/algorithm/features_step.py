"""The step on features of any two encoders, without a model of this package: ITC alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lavis_mafa.algorithm.backbone import Backbone, Images, Texts
from lavis_mafa.algorithm.discriminator import Discriminator
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.output import StepOutput
from lavis_mafa.algorithm.parts import build_parts
from lavis_mafa.algorithm.settings import LossWeights, StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.algorithm.tokens import TOKENS, Captions, Tokens

# What CLIP and sentence-transformers do: InfoNCE, gradients to both sides of every pair.
PLAIN = StepSettings(detach_other=False, soft_labels=SoftLabels("one_hot"))


class _Features:
    """A backbone whose images and texts are encoded already: features ``(B, E)``. It has what ITC
    needs of a `Backbone`."""

    def __init__(self, images: Tensor, texts: Tensor, temperature: Tensor) -> None:
        self.images, self.texts, self.temperature = images, texts, temperature

    def encode_images(self, images: Tensor) -> Images:
        # Nothing attends to embeddings, which ranks exchange as well: one number an image.
        return Images(self.images[:, None, :1].detach(), self.images)

    def encode_texts(self, captions: Captions) -> Texts:
        assert isinstance(captions, Tokens)
        return Texts(*captions, features=self.texts)

    def similarity(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        return image_features @ text_features.t()

    def grit_vectors(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        return self.images.detach(), self.texts.detach()


class FeaturesLoss(nn.Module):
    """ITC of features that any two encoders made, with every setting of ``model.mafa``.

    Images and texts may be any two sides of pairs, such as questions and answers.

    Args:
        settings: see docs/false_negatives.md; the default is InfoNCE without mining. Its weights of
            losses are not used.
        con_d: judges hard negatives, see `Discriminator`.

    Attributes:
        parts: of the step.
        output: of the last step: what was picked, found and converted.
    """

    def __init__(self, settings: StepSettings = PLAIN, con_d: Discriminator | None = None) -> None:
        super().__init__()
        only_itc = {**dict.fromkeys(asdict(LossWeights()), 0.0), "itc": 1.0}
        self.parts = build_parts(replace(settings, loss_weights=only_itc), con_d)
        # Forms, labels and rules that learn or remember.
        modules = {k: one for k, one in self.parts.objects.items() if isinstance(one, nn.Module)}
        self.objects = nn.ModuleDict(modules)
        self.output: StepOutput | None = None

    def loss(
        self,
        images: Tensor,
        texts: Tensor,
        temperature: Tensor,
        samples: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Pick, judge and mine in a mini-batch, and return ITC.

        Args:
            images, texts: ``(B, E)``, normalised; pair b in row b.
            temperature: scalar; similarities are divided by it.
            samples: optional keys of `run_step`: ``image_id``, ``group_id``, ``loaded_index``,
                ``epoch``, and what Con-D reads.
        """
        rows = torch.arange(len(images), device=images.device)[:, None]
        own = {TOKENS: Tokens(rows, torch.ones_like(rows)), **(samples or {}), "image": images}
        backbone = cast(Backbone, _Features(images, texts, temperature))
        self.output = run_step(backbone, own, self.parts)
        found: Tensor = self.output["loss"]
        return found
