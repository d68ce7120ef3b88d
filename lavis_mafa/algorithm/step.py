"""One training step, the same for every family and every system.

ALBEF-base, GRIT-VLP and MAFA are settings of it. It is a function of a backbone, a mini-batch and
settings, so it can be called from any trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import ModelOutput

from lavis_mafa.algorithm.backbone import Backbone, Images, Teacher, Texts, WithRegions
from lavis_mafa.algorithm.discriminator import Discriminator
from lavis_mafa.algorithm.losses.contrastive import (
    consistency_loss,
    contrastive_loss,
    distilled_labels,
    labels_from_positives,
    mix,
    smooth,
)
from lavis_mafa.algorithm.losses.matching import matching_losses
from lavis_mafa.algorithm.losses.tcl import intra_modal_loss, local_loss
from lavis_mafa.algorithm.mining import (
    ABSENT,
    AMBIGUOUS,
    POSITIVE,
    Connections,
    Judge,
    MiningRule,
    find_connections,
)
from lavis_mafa.algorithm.momentum import Momentum
from lavis_mafa.algorithm.pickers import NONE, PICKERS, Picker
from lavis_mafa.algorithm.posterior import PosteriorPicker, PosteriorRule
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.tokens import captions_of

# "found": judged positive, whatever is made of it.
COUNTS = ("picked", "judged", "found", "ambiguous", "kept", "probability_sum")
WEIGHTS = {"itc": 1.0, "imc": 0.0, "lmi": 0.0, "itm": 1.0, "lm": 1.0}
SECOND_VIEW = "image_view2"  # key of a mini-batch's images as momentum encoders see them, if others


@dataclass(frozen=True)
class SoftLabels:
    """Soft labels of ITC.

    Attributes:
        type: ``one_hot``; ``smoothed`` (S-ITC, MAFA eq. 5); ``consistency`` (GRIT-VLP eq. 6);
            ``momentum`` (momentum distillation, ALBEF eq. 6): candidates and soft labels come from
            momentum encoders and their queue.
        alpha: share of the uniform distribution in smoothed labels.
        weight: lambda of the consistency loss.
        start_epoch: first epoch with soft labels; None: the first grouped epoch. Momentum
            distillation begins at once, with a weight that grows over two epochs.
        label_smoothing: share of the uniform distribution wherever labels are not smoothed by
            ``alpha``; 0.1 in BLIP-2.
    """

    type: str = "smoothed"
    alpha: float = 0.5
    weight: float = 0.2
    start_epoch: int | None = None
    label_smoothing: float = 0.0

    def active(self, epoch: int, grouped: bool) -> bool:
        return grouped if self.start_epoch is None else epoch >= self.start_epoch


@dataclass(frozen=True)
class StepSettings:
    """Settings of the step, ``model.mafa`` of a config.

    Attributes:
        negatives: name of a picker in `lavis_mafa.algorithm.pickers.PICKERS`, or ``posterior``
            (FNE).
        posterior: of that picker.
        detach_other: image to text trains images only and text to image texts only.
        same_image: ``positive``: pairs of one image are known positives of each other;
            ``negative``: they are negatives, as in the papers.
        all_ranks: candidates come from the mini-batches of all ranks, as in BLIP-2, and not from
            the rank's own alone.
        loss_weights: weights of ``itc``, ``itm``, ``lm``, and of TCL's ``imc`` and ``lmi`` (there
            ITC, IMC and LMI weigh 1/3 each); a loss of weight 0 is not computed.
    """

    negatives: str = "hardest"
    posterior: PosteriorRule = PosteriorRule()
    detach_other: bool = True
    same_image: str = "positive"
    all_ranks: bool = False
    loss_weights: Mapping[str, float] = field(default_factory=lambda: dict(WEIGHTS))
    soft_labels: SoftLabels = SoftLabels()
    connections: MiningRule = MiningRule()

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any], all_ranks: bool = False) -> StepSettings:
        """From ``model.mafa`` and ``model.negative_all_rank``; keys left out keep their
        defaults."""
        known = {key: cfg[key] for key in ("negatives", "detach_other", "same_image") if key in cfg}
        weights = {**WEIGHTS, **(cfg.get("loss_weights") or {})}
        rule = dict(cfg.get("connections") or {})
        if "use_in" in rule:
            rule["use_in"] = tuple(rule["use_in"])
        return cls(
            **known,
            all_ranks=all_ranks,
            loss_weights=weights,
            posterior=PosteriorRule(**(cfg.get("posterior") or {})),
            soft_labels=SoftLabels(**(cfg.get("soft_labels") or {})),
            connections=MiningRule(**rule),
        )


@dataclass
class StepOutput(ModelOutput):
    """What a step gives back.

    Attributes:
        loss: weighted sum (scalar).
        loss_itc, loss_imc, loss_lmi, loss_itm, loss_lm: scalars, None if not computed.
        temperature: scalar.
        image_features, text_features: ``(B, E)``, normalised and detached, for GRIT.
        own: ``(B,)``, numbers of the mini-batch's pairs among the C candidates.
        candidates: ``(C,)``, ``loaded_index`` of the candidates' samples; None if not told.
        i2t, t2i: the hard negatives of both directions and their verdicts.
        counts: ``(2, 6)``, per direction (i2t, t2i) the figures named in `COUNTS`.
        judged_pairs: distinct pairs given to Con-D.
    """

    loss: Tensor | None = None
    loss_itc: Tensor | None = None
    loss_imc: Tensor | None = None
    loss_lmi: Tensor | None = None
    loss_itm: Tensor | None = None
    loss_lm: Tensor | None = None
    temperature: Tensor | None = None
    image_features: Tensor | None = None
    text_features: Tensor | None = None
    own: Tensor | None = None
    candidates: Tensor | None = None
    i2t: Connections | None = None
    t2i: Connections | None = None
    counts: Tensor | None = None
    judged_pairs: int | None = None


def run_step(
    backbone: Backbone,
    samples: dict[str, Any],
    settings: StepSettings,
    con_d: Discriminator | None = None,
    momentum: Momentum | None = None,
    posterior: PosteriorPicker | None = None,
) -> StepOutput:
    """Encode, compare, pick, judge, mine and compute the losses of one mini-batch.

    Args:
        backbone: the model in training.
        samples: ``image`` ``(B, 3, H, W)``, ``text_input`` (B captions); optional ``image_id``
            ``(B,)`` (equal for captions of one image), ``loaded_index`` ``(B,)`` (numbers of the
            samples in their data set), `TOKENS` (the captions tokenised), `SECOND_VIEW`
            ``(B, 3, H, W)`` (what momentum encoders see in the place of ``image``), ``epoch`` (int)
            and ``grouped`` (bool, whether the mini-batch was grouped by similarity). With
            ``settings.all_ranks`` B must be the same on all ranks, and what is optional must be
            there on all or none.
        settings: see `StepSettings`.
        con_d: the discriminator; None leaves every hard negative a negative (GRIT-VLP, ALBEF).
        momentum: momentum encoders and queue, for ``soft_labels.type: momentum``.
        posterior: the picker that remembers, for ``negatives: posterior``.

    Raises:
        ValueError: if nothing is to be trained, or what the settings ask for is missing.
    """
    if (settings.soft_labels.type == "momentum") != (momentum is not None):
        raise ValueError("momentum encoders belong to soft_labels.type: momentum, and to no other")
    if momentum is None and any(settings.loss_weights.get(name) for name in ("imc", "lmi")):
        raise ValueError("loss_weights imc and lmi (TCL) need soft_labels.type: momentum")
    if (settings.negatives == "posterior") != (posterior is not None):
        raise ValueError("a PosteriorPicker belongs to negatives: posterior, and to no other")
    ranks = Ranks(settings.all_ranks)
    images = backbone.encode_images(samples["image"])
    texts = backbone.encode_texts(captions_of(samples))
    own = ranks.own(len(samples["text_input"]), images.embeds.device)
    step = _Step(
        backbone,
        settings,
        ranks,
        own,
        _numbers(samples, ranks, own.device),
        ranks.images(images, settings.detach_other),
        ranks.texts(texts, settings.detach_other),
    )
    compared = step.compare(samples, images, texts, momentum)
    with torch.no_grad():
        i2t, t2i, judged = step.mine(samples, compared, images.seen, con_d, posterior)
    weights = settings.loss_weights
    losses: dict[str, Tensor] = {}
    if weights["itc"]:
        active = settings.soft_labels.active(
            samples.get("epoch", 0), bool(samples.get("grouped", True))
        )
        losses["itc"] = _itc(compared, i2t, t2i, settings, active)
    if weights.get("imc"):
        losses["imc"] = step.imc(compared, images, texts)
    if weights.get("lmi"):
        losses["lmi"] = step.lmi(images, texts)
    if weights["itm"]:
        losses["itm"] = step.itm(i2t, t2i)
    if weights["lm"]:
        losses["lm"] = step.lm(i2t, t2i)
    if not losses:
        raise ValueError("all of loss_weights are 0: nothing to train")
    loss = torch.stack([weights[name] * value for name, value in losses.items()]).sum()
    image_features, text_features = backbone.grit_vectors(images, texts)
    return StepOutput(
        loss=loss + step.nothing_for_gathered(),
        loss_itc=losses.get("itc"),
        loss_imc=losses.get("imc"),
        loss_lmi=losses.get("lmi"),
        loss_itm=losses.get("itm"),
        loss_lm=losses.get("lm"),
        temperature=backbone.temperature.detach(),
        image_features=image_features,
        text_features=text_features,
        own=own,
        candidates=step.numbers.get("loaded_index"),
        i2t=i2t,
        t2i=t2i,
        counts=torch.stack([_counts(found, con_d is not None) for found in (i2t, t2i)]),
        judged_pairs=judged,
    )


@dataclass
class Compared:
    """Similarities divided by the temperature, ``(B, N)``: the C candidates of the mini-batches
    first, then the momentum queue's Q, of which ``queued_positives`` ``(B, Q)`` show an anchor's
    image. Where there is a momentum encoder, its own similarities give the soft labels, with weight
    ``alpha``."""

    i2t: Tensor
    t2i: Tensor
    soft_i2t: Tensor | None = None
    soft_t2i: Tensor | None = None
    alpha: float = 0.0
    queued_positives: Tensor | None = None


def _numbers(samples: Mapping[str, Any], ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """``image_id`` and ``loaded_index`` of all C candidates, where samples tell them."""
    told = [name for name in ("image_id", "loaded_index") if name in samples]
    if not told:
        return {}
    own = torch.stack([torch.as_tensor(samples[name]).to(device) for name in told], dim=1)
    return dict(zip(told, ranks.gather(own).unbind(dim=1), strict=True))


def known_positives(
    numbers: Mapping[str, Tensor], own: Tensor, count: int, same_image: str
) -> Tensor:
    """``(B, C)`` bool: each anchor's own pair, and with ``same_image: positive`` all pairs of its
    image.

    Args:
        numbers: of the C candidates; ``image_id`` ``(C,)`` where it is known.
        own: ``(B,)``, the anchors' numbers among the candidates.
        count: C.
        same_image: see `StepSettings`.
    """
    positives = own[:, None] == torch.arange(count, device=own.device)
    if same_image == "positive" and "image_id" in numbers:
        ids = numbers["image_id"]
        positives = positives | (ids[own][:, None] == ids[None, :])
    return positives


def itc_labels(
    compared: Compared, i2t: Connections, t2i: Connections, settings: StepSettings, active: bool
) -> list[tuple[Tensor, Tensor | None]]:
    """Labels ``(B, N)`` of ITC and what takes no part ``(B, N)`` or None: of images, then of texts.

    The consistency loss is a term of its own beside one-hot labels (GRIT-VLP eq. 6).

    Args:
        compared: gives N, and with momentum encoders their soft labels.
        i2t, t2i: what was found of both directions.
        settings: see `StepSettings`.
        active: whether labels are smoothed by now, see `SoftLabels.active`.
    """
    soft, rule = settings.soft_labels, settings.connections
    smoothing = soft.alpha if active and soft.type == "smoothed" else soft.label_smoothing
    both = []
    for sim, distilled, found in (
        (compared.i2t, compared.soft_i2t, i2t),
        (compared.t2i, compared.soft_t2i, t2i),
    ):
        positives, dropped = found.itc_targets(rule)
        positives = _over(positives, sim, compared.queued_positives)
        dropped = None if dropped is None else _over(dropped, sim)
        labels = labels_from_positives(positives)
        if smoothing:
            labels = smooth(labels, smoothing, dropped)
        if distilled is not None:
            labels = mix(labels, distilled_labels(distilled, dropped), compared.alpha)
        both.append((labels, dropped))
    return both


def _itc(
    compared: Compared, i2t: Connections, t2i: Connections, settings: StepSettings, active: bool
) -> Tensor:
    soft = settings.soft_labels
    total = compared.i2t.new_zeros(())
    for sim, other, (labels, dropped) in zip(
        (compared.i2t, compared.t2i),
        (compared.t2i, compared.i2t),
        itc_labels(compared, i2t, t2i, settings, active),
        strict=True,
    ):
        total = total + contrastive_loss(sim, labels, dropped) / 2
        if active and soft.type == "consistency":
            total = total + soft.weight / 2 * consistency_loss(sim, other, dropped)
    return total


def _over(mark: Tensor, sim: Tensor, queued: Tensor | None = None) -> Tensor:
    """A mark ``(B, C)`` of candidates as one of all ``(B, N)``: the queue's is ``queued``
    ``(B, Q)``, or none."""
    if queued is not None:
        return torch.cat([mark, queued.to(mark.dtype)], dim=1)
    return F.pad(mark, (0, sim.shape[1] - mark.shape[1]))


@dataclass
class _Copied:
    """What momentum encoders, driven by ``backbone``, made of this rank's images and texts, and
    the features ``(N, E)`` of all candidates' and the queue's."""

    backbone: Backbone
    images: Images
    texts: Texts
    all_images: Tensor
    all_texts: Tensor


@dataclass
class _Step:
    """What the parts of one step have in common: whose candidates, and these encoded."""

    backbone: Backbone
    settings: StepSettings
    ranks: Ranks
    own: Tensor
    numbers: dict[str, Tensor]
    images: Images
    texts: Texts
    teacher: Teacher | None = None
    copied: _Copied | None = None

    @cached_property
    def positives(self) -> Tensor:
        """`known_positives` among the C candidates."""
        count, same_image = len(self.texts.ids), self.settings.same_image
        return known_positives(self.numbers, self.own, count, same_image)

    def compare(
        self, samples: dict[str, Any], images: Images, texts: Texts, momentum: Momentum | None
    ) -> Compared:
        """Similarities of the mini-batch's own ``images`` and ``texts`` to all candidates."""
        similarity, temperature = self.backbone.similarity, self.backbone.temperature
        assert images.features is not None and texts.features is not None
        if momentum is None:
            assert self.images.features is not None and self.texts.features is not None
            i2t = similarity(images.features, self.texts.features)
            t2i = similarity(self.images.features, texts.features).t()
            return Compared(i2t / temperature, t2i / temperature)
        with torch.no_grad():
            seen = {**samples, "image": samples.get(SECOND_VIEW, samples["image"])}
            copied_images, copied_texts = momentum.encode(seen)
            own_images, own_texts = copied_images.features, copied_texts.features
            assert own_images is not None and own_texts is not None
            alpha = momentum.weight(samples)
            if alpha and self.settings.loss_weights["lm"]:
                encoded = self.ranks.images(copied_images)
                self.teacher = Teacher(momentum.backbone, encoded, alpha)
            queued_images, queued_texts, queued_ids = momentum.queued()
            ids = self.numbers.get("image_id") if self.settings.same_image == "positive" else None
            all_images = torch.cat([self.ranks.gather(own_images), queued_images])
            all_texts = torch.cat([self.ranks.gather(own_texts), queued_texts])
            own_ids = None if ids is None else ids[self.own]
            queued_positives = None if own_ids is None else own_ids[:, None] == queued_ids[None]
            self.copied = _Copied(
                momentum.backbone, copied_images, copied_texts, all_images, all_texts
            )
            momentum.enqueue(own_images, own_texts, own_ids)
            soft_i2t = similarity(own_images, all_texts) / temperature
            soft_t2i = similarity(all_images, own_texts).t() / temperature
        return Compared(
            similarity(images.features, all_texts) / temperature,
            similarity(all_images, texts.features).t() / temperature,
            soft_i2t,
            soft_t2i,
            alpha,
            queued_positives,
        )

    def mine(
        self,
        samples: dict[str, Any],
        compared: Compared,
        seen: Tensor | None,
        con_d: Discriminator | None,
        posterior: PosteriorPicker | None,
    ) -> tuple[Connections, Connections, int]:
        """Pick, judge and connect, both directions; and how many pairs were judged."""
        count = len(self.texts.ids)  # what is in a queue has no image or text to match
        sim_i2t, sim_t2i = compared.i2t[:, :count], compared.t2i[:, :count]
        positives = self.positives
        pickers: list[Picker]
        if posterior is None:
            pickers = [PICKERS[self.settings.negatives]] * 2
        else:
            sim_i2t, sim_t2i = (s * self.backbone.temperature for s in (sim_i2t, sim_t2i))
            posterior.observe(sim_i2t, sim_t2i, positives, self.own, samples.get("epoch"))
            # With momentum encoders an image's and a text's similarity to their pair differ.
            own_sims = (s.gather(1, self.own[:, None]).squeeze(1) for s in (sim_i2t, sim_t2i))
            pickers = [partial(posterior.pick, own_sim=one) for one in own_sims]
        judge: Judge | None = None
        if con_d is not None:
            candidates = {**samples, **self.numbers}
            judge = partial(con_d.judge, candidates, ranks=self.ranks, seen=seen)
        rule, everywhere = self.settings.connections, self.ranks.world > 1
        return find_connections(
            sim_i2t, sim_t2i, positives, self.own, pickers, rule, judge, everywhere
        )

    def imc(self, compared: Compared, images: Images, texts: Texts) -> Tensor:
        """TCL's intra-modal loss of this rank's images and texts, mean of both."""
        assert self.copied is not None
        assert images.features is not None and texts.features is not None
        positives = _over(self.positives, compared.i2t, compared.queued_positives)
        temperature = self.backbone.temperature
        of_images = intra_modal_loss(
            images.features, self.copied.all_images, positives, temperature
        )
        of_texts = intra_modal_loss(texts.features, self.copied.all_texts, positives, temperature)
        return (of_images + of_texts) / 2

    def lmi(self, images: Images, texts: Texts) -> Tensor:
        """TCL's local loss of this rank's images and texts, mean of both."""
        assert self.copied is not None
        assert images.features is not None and texts.features is not None
        driver, same = self.copied.backbone, self.positives[:, self.own]
        assert isinstance(driver, WithRegions), "the families that have momentum encoders"
        with torch.no_grad():
            regions, words = driver.regions(self.copied.images, self.copied.texts)
        mask, temperature = self.copied.texts.mask[:, 1:], self.backbone.temperature
        of_images = local_loss(images.features, regions, temperature, same=same)
        of_texts = local_loss(texts.features, words, temperature, mask, same)
        return (of_images + of_texts) / 2

    def itm(self, i2t: Connections, t2i: Connections) -> Tensor:
        image_anchors, texts_picked, labels_i2t = i2t.itm_pairs(self.settings.connections)
        text_anchors, images_picked, labels_t2i = t2i.itm_pairs(self.settings.connections)
        logits = self.backbone.match(
            self.images,
            self.texts,
            torch.cat([self.own, self.own[image_anchors], images_picked]),
            torch.cat([self.own, texts_picked, self.own[text_anchors]]),
        )
        labels = torch.cat([x.float() for x in (torch.ones_like(self.own), labels_i2t, labels_t2i)])
        return self.ranks.mean(matching_losses(logits, labels))

    def lm(self, i2t: Connections, t2i: Connections) -> Tensor:
        rule, own = self.settings.connections, self.own
        image_anchors, texts_mined = i2t.mined(rule)
        text_anchors, images_mined = t2i.mined(rule)
        # D_MLM is a set (Algorithm 1): a pair found from both sides enters once, from its image's.
        if rule.uses("lm"):
            count = len(self.texts.ids)
            from_images = own[image_anchors] * count + texts_mined
            missing = len(i2t.hard) - len(from_images)  # all ranks gather alike
            from_images = self.ranks.gather(F.pad(from_images, (0, missing), value=NONE))
            first = ~torch.isin(images_mined * count + own[text_anchors], from_images)
            text_anchors, images_mined = text_anchors[first], images_mined[first]
        losses = self.backbone.language_losses(
            self.images,
            self.texts,
            torch.cat([own, own[image_anchors], images_mined]),
            torch.cat([own, texts_mined, own[text_anchors]]),
            self.teacher,
        )
        return self.ranks.mean(losses)

    def nothing_for_gathered(self) -> Tensor | float:
        """0 that depends on what was gathered: every rank must take part in its backward pass,
        also one whose losses happen to need no other rank's."""
        if self.ranks.world == 1:
            return 0.0
        embeds = [self.images.embeds, self.texts.embeds]
        return sum((0.0 * e.float().sum() for e in embeds if e is not None), start=0.0)


def _counts(found: Connections, asked: bool) -> Tensor:
    """The figures of `COUNTS`; ``asked``: whether there is a Con-D."""
    there = found.state != ABSENT
    positive = found.state == POSITIVE
    ambiguous = found.state == AMBIGUOUS
    return torch.stack(
        [
            there.sum(),
            found.judged.sum(),
            positive.sum(),
            ambiguous.sum(),
            (there & ~positive & ~ambiguous).sum(),
            # Not finite if a probability of Con-D is not: it is asked for every one picked.
            torch.where(there & asked, found.probability, 0.0).sum(),
        ]
    ).float()
