"""Every form of ITC with every soft label and every use of Con-D trains, or is refused clearly."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import mini_batch
from slow_families import TableConD

from lavis_mafa import load_model
from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.algorithm.cached_batch import in_chunks
from lavis_mafa.algorithm.global_threshold import _GlobalThreshold
from lavis_mafa.algorithm.itc_forms import ITC_LOSSES
from lavis_mafa.algorithm.labels import SOFT_LABELS, SoftLabels
from lavis_mafa.algorithm.mining import ALL, MiningRule
from lavis_mafa.algorithm.momentum import Momentum
from lavis_mafa.algorithm.parts import build_parts
from lavis_mafa.algorithm.rules import RULES, Margin
from lavis_mafa.algorithm.scores import SCORES
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.settings.contradictions import _form_of_itc

BATCH = 5
ITC_ONLY = {"itc": 1.0, "itm": 0.0, "lm": 0.0}
CONNECTIONS = {
    "no Con-D": None,
    "convert": MiningRule(low=0.3, high=0.5),
    "drop": MiningRule(low=0.3, high=0.5, action="drop"),
    "probability": MiningRule(low=0.3, high=0.5, labels="probability"),
}
GROUP_VALUES = ["dropped", "positive"]


class View(dict):
    """A config as checks see it; missing keys read as None."""

    training, wrong = True, ()

    def __missing__(self, key):
        return None


def refusals(form, label, queue):
    found = View(
        {
            "model.arch": "albef_mafa",
            "model.mafa.itc_loss": form,
            "model.mafa.soft_labels.type": label,
            "model.mafa.learn_temperature": False,
            "model.queue_size": queue,
        }
    )
    return [one for one in _form_of_itc(found) if one.key == "model.mafa.itc_loss"]


MODELS = {}


def load_tiny(family):
    if family not in MODELS:
        torch.manual_seed(0)
        MODELS[family] = load_model(family, "tiny")
    return MODELS[family]


def step(model, samples, form, label, connections, weights=ITC_ONLY, same_group="dropped"):
    settings = StepSettings(
        itc_loss=form,
        soft_labels=SoftLabels(label),
        loss_weights=weights,
        connections=CONNECTIONS[connections] or MiningRule(),
        same_group=same_group,
    )
    parts = build_parts(settings, TableConD() if CONNECTIONS[connections] else None)
    if settings.soft_labels.needs_momentum:
        parts.momentum = Momentum(model, backbone_of, 64, queue_size=8)
    model.zero_grad()
    for _ in range(1 if parts.momentum is None else 3):  # until the queue holds earlier pairs
        output = run_step(model.backbone, samples, parts)
    output.loss.backward()
    trained = (*model.parameters(), *torch.nn.ModuleDict(parts.objects).parameters())
    gradients = [p.grad for p in trained if p.grad is not None]
    return output, gradients


@pytest.mark.parametrize("groups", [None, [7, 2, 7, 7, -1], [3] * BATCH], ids=str)
@pytest.mark.parametrize(("form", "label"), list(itertools.product(ITC_LOSSES, SOFT_LABELS)))
def test_albef_trains_or_is_refused(toy_train, form, label, groups):
    samples = mini_batch(toy_train, range(BATCH), epoch=1)
    if groups:
        samples |= {"image_id": torch.arange(BATCH), "group_id": torch.tensor(groups)}
    if refused := refusals(form, label, queue=8):
        assert "use softmax, other labels, or model.queue_size: 0" in str(refused[0])
        assert (form, label) == ("sigmoid", "momentum")
        assert not refusals(form, label, queue=0)
        return
    model = load_tiny("albef_mafa")
    seen = set()
    # Every second use of connections with one of the two values; with one group the other way.
    values = itertools.cycle(["positive", "dropped"] if groups == [3] * BATCH else GROUP_VALUES)
    for connections, same_group in zip(CONNECTIONS, values, strict=False):
        torch.manual_seed(0)
        output, gradients = step(model, samples, form, label, connections, same_group=same_group)
        assert output.loss.isfinite(), connections
        assert all(one.isfinite().all() for one in gradients), connections
        assert groups or any(one.any() for one in gradients), connections
        seen.add(round(output.loss_itc.item(), 5))
    assert groups or len(seen) >= 3, "Con-D changes the loss"


JUDGED = [
    (score, rule)
    for score, rule in itertools.product(("con_d", *SCORES), RULES)
    # Con-D judges too few pairs for thresholds of the whole data; the config check refuses it.
    if not (score == "con_d" and RULES.entry(rule).traits.needs_all)
]


@pytest.mark.parametrize("family", ["albef_mafa", "blip_mafa", "blip2_mafa"])
@pytest.mark.parametrize(("score", "rule"), JUDGED)
def test_each_family_trains_with_every_score_and_rule(toy_train, family, score, rule):
    """Also in chunks, which give the same verdicts and the same loss."""
    model = load_tiny(family).eval()
    samples = mini_batch(toy_train, range(BATCH), epoch=1)
    samples["group_id"] = torch.tensor([1, 1, 2, -1, 2])
    chunks = in_chunks(model.backbone, 2)
    found = []
    for action, same_group, backbone in (
        ("convert", "dropped", model.backbone),
        ("convert", "dropped", chunks),
        ("drop", "positive", model.backbone),
    ):
        settings = StepSettings(
            soft_labels=SoftLabels("one_hot"),
            loss_weights=ITC_ONLY,
            same_group=same_group,
            connections=MiningRule(
                low=0.3, high=0.5, score=score, rule=rule, action=action, top_k=ALL
            ),
            own={"global_threshold": _GlobalThreshold(share=0.4), "margin": Margin(0.3)},
        )
        parts = build_parts(settings, TableConD() if score == "con_d" else None)
        parts.allocate(len(toy_train))
        model.zero_grad()
        output = run_step(backbone, samples, parts)
        output.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert output.loss.isfinite() and all(one.isfinite().all() for one in gradients)
        # Where all other candidates are dropped there is nothing to learn.
        assert action == "drop" or any(one.any() for one in gradients)
        assert output.i2t.probability.isfinite().any(), "candidates were judged"
        found.append(output)
    whole, chunked, _ = found
    assert torch.equal(whole.i2t.state, chunked.i2t.state)
    assert chunked.loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)
