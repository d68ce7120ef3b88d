"""One training step, the same for every family and every system.

ALBEF-base, GRIT-VLP and MAFA are settings of it. It is a function of a backbone, a mini-batch and
settings, so it can be called from any trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from lavis_mafa.backbones.base import Backbone, Images, Texts
from lavis_mafa.connections.con_d import Discriminator
from lavis_mafa.connections.mining import (
    ABSENT,
    AMBIGUOUS,
    POSITIVE,
    Connections,
    MiningRule,
    connect,
    pick,
    unique_pairs,
)
from lavis_mafa.connections.negatives import PICKERS
from lavis_mafa.objectives.contrastive import (
    consistency_loss,
    contrastive_loss,
    labels_from_positives,
    smooth,
)
from lavis_mafa.objectives.matching import matching_loss

# "found": judged positive, whatever is made of it.
COUNTS = ("picked", "judged", "found", "ambiguous", "kept", "probability_sum")


@dataclass(frozen=True)
class SoftLabels:
    """Soft labels of ITC.

    Attributes:
        type: ``one_hot``; ``smoothed`` (S-ITC, MAFA eq. 5); ``consistency`` (GRIT-VLP eq. 6).
        alpha: share of the uniform distribution in smoothed labels.
        weight: lambda of the consistency loss.
        start_epoch: first epoch with soft labels; None: the first grouped epoch.
    """

    type: str = "smoothed"
    alpha: float = 0.5
    weight: float = 0.2
    start_epoch: int | None = None

    def active(self, epoch: int, grouped: bool) -> bool:
        return grouped if self.start_epoch is None else epoch >= self.start_epoch


@dataclass(frozen=True)
class StepSettings:
    """Settings of the step, ``model.mafa`` of a config.

    Attributes:
        negatives: name of a picker in `lavis_mafa.connections.negatives.PICKERS`.
        detach_other: image to text trains images only and text to image texts only.
        same_image: ``positive``: pairs of one image are known positives of each other;
            ``negative``: they are negatives, as in the papers.
        loss_weights: weights of ``itc``, ``itm`` and ``lm``; a loss of weight 0 is not computed.
    """

    negatives: str = "hardest"
    detach_other: bool = True
    same_image: str = "positive"
    loss_weights: Mapping[str, float] = field(
        default_factory=lambda: {"itc": 1.0, "itm": 1.0, "lm": 1.0}
    )
    soft_labels: SoftLabels = SoftLabels()
    connections: MiningRule = MiningRule()

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any]) -> StepSettings:
        """From ``model.mafa``; keys left out keep their defaults."""
        known = {key: cfg[key] for key in ("negatives", "detach_other", "same_image") if key in cfg}
        weights = {"itc": 1.0, "itm": 1.0, "lm": 1.0, **(cfg.get("loss_weights") or {})}
        rule = dict(cfg.get("connections") or {})
        if "use_in" in rule:
            rule["use_in"] = tuple(rule["use_in"])
        return cls(
            **known,
            loss_weights=weights,
            soft_labels=SoftLabels(**(cfg.get("soft_labels") or {})),
            connections=MiningRule(**rule),
        )


@dataclass
class StepOutput(ModelOutput):
    """What a step gives back.

    Attributes:
        loss: weighted sum (scalar).
        loss_itc, loss_itm, loss_lm: scalars, None if not computed.
        temperature: scalar.
        image_features, text_features: ``(B, E)``, normalised and detached, for GRIT.
        i2t, t2i: the hard negatives of both directions and their verdicts.
        counts: ``(2, 6)``, per direction (i2t, t2i) the figures named in `COUNTS`.
        judged_pairs: distinct pairs given to Con-D.
    """

    loss: Tensor | None = None
    loss_itc: Tensor | None = None
    loss_itm: Tensor | None = None
    loss_lm: Tensor | None = None
    temperature: Tensor | None = None
    image_features: Tensor | None = None
    text_features: Tensor | None = None
    i2t: Connections | None = None
    t2i: Connections | None = None
    counts: Tensor | None = None
    judged_pairs: int | None = None


def run_step(
    backbone: Backbone,
    samples: dict[str, Any],
    settings: StepSettings,
    con_d: Discriminator | None = None,
) -> StepOutput:
    """Encode, compare, pick, judge, mine and compute the losses of one mini-batch.

    Args:
        backbone: the model in training.
        samples: ``image`` ``(B, 3, H, W)``, ``text_input`` (B captions); optional ``image_id``
            ``(B,)`` (equal for captions of one image), ``epoch`` (int) and ``grouped`` (bool,
            whether the mini-batch was grouped by similarity).
        settings: see `StepSettings`.
        con_d: the discriminator; None leaves every hard negative a negative (GRIT-VLP, ALBEF).
    """
    images = backbone.encode_images(samples["image"])
    texts = backbone.encode_texts(samples["text_input"])
    raw_i2t, raw_t2i = backbone.similarity(images, texts, settings.detach_other)
    temperature = backbone.temperature
    sim_i2t, sim_t2i = raw_i2t / temperature, raw_t2i / temperature
    own = torch.arange(len(raw_i2t), device=raw_i2t.device)
    with torch.no_grad():
        positives = known_positives(samples, own, settings.same_image)
        i2t, t2i, judged = _mine(samples, sim_i2t, sim_t2i, positives, own, settings, con_d)
    weights = settings.loss_weights
    losses: dict[str, Tensor] = {}
    if weights["itc"]:
        active = settings.soft_labels.active(
            samples.get("epoch", 0), bool(samples.get("grouped", True))
        )
        losses["itc"] = _itc(sim_i2t, sim_t2i, i2t, t2i, settings, active)
    if weights["itm"]:
        losses["itm"] = _itm(backbone, images, texts, i2t, t2i, own, settings.connections)
    if weights["lm"]:
        losses["lm"] = _lm(backbone, images, texts, i2t, t2i, own, settings.connections)
    if not losses:
        raise ValueError("all of loss_weights are 0: nothing to train")
    return StepOutput(
        loss=torch.stack([weights[name] * loss for name, loss in losses.items()]).sum(),
        loss_itc=losses.get("itc"),
        loss_itm=losses.get("itm"),
        loss_lm=losses.get("lm"),
        temperature=temperature.detach(),
        image_features=images.features.detach(),
        text_features=texts.features.detach(),
        i2t=i2t,
        t2i=t2i,
        counts=torch.stack([_counts(i2t), _counts(t2i)]),
        judged_pairs=judged,
    )


def known_positives(samples: Mapping[str, Any], own: Tensor, same_image: str) -> Tensor:
    """``(B, N)`` bool: each anchor's own pair, and with ``same_image: positive`` all pairs of its
    image."""
    positives = own[:, None] == torch.arange(len(own), device=own.device)
    if same_image == "positive" and "image_id" in samples:
        ids = torch.as_tensor(samples["image_id"], device=own.device)
        positives = positives | (ids[own][:, None] == ids[None, :])
    return positives


def _mine(
    samples: dict[str, Any],
    sim_i2t: Tensor,
    sim_t2i: Tensor,
    positives: Tensor,
    own: Tensor,
    settings: StepSettings,
    con_d: Discriminator | None,
) -> tuple[Connections, Connections, int]:
    rule, picker = settings.connections, PICKERS[settings.negatives]
    resample = con_d is not None and rule.resample
    hard_i2t, second_i2t = pick(sim_i2t, positives, picker, resample)
    hard_t2i, second_t2i = pick(sim_t2i, positives, picker, resample)
    image_of, text_of, row_i2t, row_t2i = unique_pairs(hard_i2t, hard_t2i, own)
    verdict = None
    if con_d is not None and len(image_of):
        verdict = con_d.judge(samples, image_of, text_of)
    i2t = connect(positives, hard_i2t, second_i2t, verdict, row_i2t, rule)
    t2i = connect(positives, hard_t2i, second_t2i, verdict, row_t2i, rule)
    return i2t, t2i, 0 if verdict is None else len(verdict)


def _itc(
    sim_i2t: Tensor,
    sim_t2i: Tensor,
    i2t: Connections,
    t2i: Connections,
    settings: StepSettings,
    active: bool,
) -> Tensor:
    soft, rule = settings.soft_labels, settings.connections
    total = sim_i2t.new_zeros(())
    for sim, other, found in ((sim_i2t, sim_t2i, i2t), (sim_t2i, sim_i2t, t2i)):
        positives, dropped = found.itc_targets(rule)
        labels = labels_from_positives(positives)
        if active and soft.type == "smoothed":
            labels = smooth(labels, soft.alpha, dropped)
        total = total + contrastive_loss(sim, labels, dropped) / 2
        if active and soft.type == "consistency":
            total = total + soft.weight / 2 * consistency_loss(sim, other, dropped)
    return total


def _itm(
    backbone: Backbone,
    images: Images,
    texts: Texts,
    i2t: Connections,
    t2i: Connections,
    own: Tensor,
    rule: MiningRule,
) -> Tensor:
    image_anchors, texts_picked, labels_i2t = i2t.itm_pairs(rule)
    text_anchors, images_picked, labels_t2i = t2i.itm_pairs(rule)
    logits = backbone.match(
        images,
        texts,
        torch.cat([own, image_anchors, images_picked]),
        torch.cat([own, texts_picked, text_anchors]),
    )
    return matching_loss(logits, torch.cat([torch.ones_like(own), labels_i2t, labels_t2i]))


def _lm(
    backbone: Backbone,
    images: Images,
    texts: Texts,
    i2t: Connections,
    t2i: Connections,
    own: Tensor,
    rule: MiningRule,
) -> Tensor:
    image_anchors, texts_mined = i2t.mined(rule)
    text_anchors, images_mined = t2i.mined(rule)
    mined = torch.stack(
        [torch.cat([image_anchors, images_mined]), torch.cat([texts_mined, text_anchors])], dim=1
    )
    # D_MLM is a set (Algorithm 1): a pair found from both sides enters once.
    mined = torch.unique(mined, dim=0)
    return backbone.tell(
        images, texts, torch.cat([own, mined[:, 0]]), torch.cat([own, mined[:, 1]])
    )


def _counts(found: Connections) -> Tensor:
    there = found.state != ABSENT
    judged = there & ~found.probability.isnan()
    positive = found.state == POSITIVE
    ambiguous = found.state == AMBIGUOUS
    return torch.stack(
        [
            there.sum(),
            judged.sum(),
            positive.sum(),
            ambiguous.sum(),
            (there & ~positive & ~ambiguous).sum(),
            found.probability.nan_to_num().sum(),
        ]
    ).float()
