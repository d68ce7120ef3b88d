"""The step on features of any two encoders, without a model of this package: ITC alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from lavis_mafa.algorithm.backbone import Backbone, Images, Texts
from lavis_mafa.algorithm.context import HARD_TEXTS
from lavis_mafa.algorithm.discriminator import Discriminator
from lavis_mafa.algorithm.itc_forms import ITC_LOSSES
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.mining import ALL
from lavis_mafa.algorithm.output import COUNTS, StepOutput
from lavis_mafa.algorithm.parts import StepParts, build_parts
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.rules import RULES, Margin
from lavis_mafa.algorithm.scores import SIMILARITY
from lavis_mafa.algorithm.settings import LossWeights, StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.algorithm.tokens import TOKENS, Captions, Tokens

# As CLIP and sentence-transformers: InfoNCE with gradients to both sides of every pair.
PLAIN = StepSettings(detach_other=False, soft_labels=SoftLabels("one_hot"))


class _Features:
    """A backbone of images and texts that are encoded already, as features ``(B, E)``. It
    implements only the part of `Backbone` that ITC needs."""

    def __init__(self, images: Tensor, texts: Tensor, temperature: Tensor) -> None:
        self.images, self.texts, self.temperature = images, texts, temperature

    def encode_images(self, images: Tensor) -> Images:
        # Ranks exchange embeddings too, but nothing attends to them: one number per image.
        return Images(self.images[:, None, :1].detach(), self.images)

    def encode_texts(self, captions: Captions) -> Texts:
        assert isinstance(captions, Tokens)
        return Texts(*captions, features=self.texts)

    def similarity(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        return image_features @ text_features.t()

    def grit_vectors(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        return self.images.detach(), self.texts.detach()


def _own_pairs_loss(parts: StepParts, samples: Mapping[str, Any]) -> Callable[..., Tensor] | None:
    """Return the form's own loss for one-hot labels, if the step mines nothing or finds false
    negatives by a margin of cosines. Return None for other steps, or if the form has no such
    loss."""
    settings, rule = parts.settings, parts.settings.connections
    soft = settings.soft_labels
    by_margin = (rule.rule, rule.score, rule.top_k) == ("margin", SIMILARITY, ALL)
    plain = (
        parts.con_d is None
        and (rule.by_con_d or (by_margin and rule.uses("itc")))
        and settings.detach_other is False
        and soft.type == PLAIN.soft_labels.type
        and not soft.label_smoothing
        and not samples.keys() & {"image_id", "group_id", HARD_TEXTS}
    )
    return ITC_LOSSES.entry(settings.itc_loss).traits.own_pairs if plain else None


def _one_hot_itc(
    loss: Callable[..., Tensor],
    parts: StepParts,
    images: Tensor,
    texts: Tensor,
    temperature: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return ITC by `_own_pairs_loss`, and the counts of `StepOutput`."""
    ranks, rule = Ranks(parts.settings.all_ranks), parts.settings.connections
    own = ranks.own(len(images), images.device)
    margin = parts.settings.own_of(RULES.entry("margin")) or Margin()
    together = ranks.world == 1  # one product serves both directions
    sides = [(images, texts), (texts, images)]
    if together or (rule.by_con_d and ITC_LOSSES.entry(parts.settings.itc_loss).traits.symmetric):
        del sides[1]
    counts = torch.zeros(2, len(COUNTS), device="cpu" if rule.by_con_d else images.device)
    terms = []
    for direction, (one, other) in enumerate(sides):
        sim = one / temperature @ ranks.gather(other, with_grad=True).t()
        found: list[Tensor | None] = [None, None] if together else [None]
        if not rule.by_con_d:
            score = sim.detach() * temperature.detach()
            own_score = score.gather(1, own[:, None])
            picked = score.numel() - len(own)
            # Of the rows, and of the columns where they are anchors, too.
            for n, compared in enumerate((own_score, own_score.t())[: len(found)]):
                false = margin.exceeded(score, compared).scatter_(1, own[:, None], False)
                count = counts[direction + n]
                count[:2], count[2] = picked, false.count_nonzero()
                count[4], count[5] = picked - count[2], score.sum() - own_score.sum()
                count[6] = 0 if picked else len(own)
                found[n] = false
        terms.append(loss(parts.form, sim, own, temperature, found, rule.action == "drop"))
    return torch.stack(terms).mean(), counts.cpu()


def _mean_of_ranks(gradient: Tensor) -> Tensor:
    """Return the mean over the ranks of the gradient of a loss's parameter.

    The loss is outside the model that DDP wraps, so DDP does not average its gradients.
    """
    world = Ranks(together=True).world
    if world == 1:
        return gradient
    summed = gradient.clone()
    dist.all_reduce(summed)
    return summed / world


class FeaturesLoss(nn.Module):
    """ITC on the features of any two encoders, with every setting of ``model.mafa``.

    Images and texts may be any two sides of pairs, such as questions and answers.

    Args:
        settings: see docs/false_negatives.md; the default is InfoNCE without mining. Its loss
            weights are not used.
        con_d: the judge of hard negatives, see `Discriminator`.

    Attributes:
        parts: the parts of the step.
        output: the output of the last step: what was picked, found and converted.
    """

    def __init__(self, settings: StepSettings = PLAIN, con_d: Discriminator | None = None) -> None:
        super().__init__()
        only_itc = {**dict.fromkeys(asdict(LossWeights()), 0.0), "itc": 1.0}
        # Gradients flow to both sides of a pair, as in other libraries, unless the settings differ.
        settings = replace(settings, detach_other=bool(settings.detach_other))
        self.parts = build_parts(replace(settings, loss_weights=only_itc), con_d)
        if settings.soft_labels.needs_momentum:
            raise ValueError(
                f"soft_labels: {settings.soft_labels.type} needs momentum encoders, which features "
                "of another library's model do not have: choose other labels"
            )
        # Forms, labels and rules that have parameters or state.
        modules = {k: one for k, one in self.parts.objects.items() if isinstance(one, nn.Module)}
        self.objects = nn.ModuleDict(modules)
        self._average_gradients()
        self.output: StepOutput | None = None
        # Methods with state for each row, such as GloFND, count rows from 0 on.
        self.by_place = RULES.entry(settings.connections.rule).traits.needs_all

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._average_gradients()  # hooks are neither copied nor pickled

    def _average_gradients(self) -> None:
        hook: Any = unserializable_hook
        for parameter in self.objects.parameters():
            parameter.register_hook(hook(_mean_of_ranks))  # type: ignore[no-untyped-call]

    def loss(
        self,
        images: Tensor,
        texts: Tensor,
        temperature: Tensor,
        samples: Mapping[str, Any] | None = None,
        mines: bool = True,
        hard_texts: Tensor | None = None,
    ) -> Tensor:
        """Pick, judge and mine in a mini-batch, and return ITC.

        Args:
            images, texts: ``(B, E)``, normalised; pair b in row b.
            temperature: scalar; similarities are divided by it.
            samples: optional keys of `run_step`: ``image_id``, ``group_id``, ``loaded_index``,
                ``epoch``, and what Con-D reads.
            mines: whether Con-D judges; scores of all candidates are compared in any case.
            hard_texts: ``(M, E)``, normalised: texts that are in no pair and are negatives of every
                image. They are compared, but not judged.

        Raises:
            ValueError: if the form or the labels of ITC cannot use ``hard_texts``, the sides do not
                fit, or there are no pairs.
        """
        if not len(images) or images.shape != texts.shape:
            raise ValueError(
                f"got features {tuple(images.shape)} and {tuple(texts.shape)}, expected (B, E) of "
                "both sides of B >= 1 pairs: leave out a mini-batch without pairs"
            )
        rows = torch.arange(len(images), device=images.device)[:, None]
        own = {TOKENS: Tokens(rows, torch.ones_like(rows)), **(samples or {}), "image": images}
        if hard_texts is not None:
            settings = self.parts.settings
            if self.parts.extra_loss or not ITC_LOSSES.entry(settings.itc_loss).traits.queue:
                raise ValueError(
                    "got negatives that are in no pair, which soft_labels: "
                    f"{settings.soft_labels.type} with itc_loss: {settings.itc_loss} cannot use: "
                    "leave them out"
                )
            own[HARD_TEXTS] = hard_texts
        backbone = cast(Backbone, _Features(images, texts, temperature))
        parts = self.parts if mines else replace(self.parts, con_d=None)
        own_pairs = _own_pairs_loss(parts, own)
        if own_pairs is not None:
            plain, counts = _one_hot_itc(own_pairs, parts, images, texts, temperature)
            self.output = StepOutput(
                plain.detach(),
                {"itc": plain.detach()},
                image_features=images.detach(),
                text_features=texts.detach(),
                counts=counts,
            )
            return plain
        output = run_step(backbone, own, parts)
        found: Tensor = output["loss"]
        # Detached, since the graph would otherwise stay in memory until the next step.
        terms = {name: term.detach() for name, term in output.losses.items()}
        self.output = replace(output, loss=found.detach(), losses=terms)
        return found
