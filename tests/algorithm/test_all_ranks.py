"""Candidates of all ranks: two processes with different data equal one process with all data."""

from __future__ import annotations

import functools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import mini_batch, toy_config
from slow_families import TableConD
from torch.nn.parallel import DistributedDataParallel
from two_ranks import on_two_ranks

from lavis_mafa import load_model
from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.algorithm.context import NO_GROUP
from lavis_mafa.algorithm.global_threshold import _GlobalThreshold
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.algorithm.momentum import GROUP_QUEUE, Momentum
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.rules import ABSENT, Margin
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.data import TrainingSet
from lavis_mafa.judges.build import _ModelNegativesEncoder
from lavis_mafa.judges.caption_judge import _CaptionJudge
from lavis_mafa.judges.discriminators import ModelDiscriminator, _Oracle
from lavis_mafa.toyworld import ToyScenesBuilder

BATCH = 5
START = 20
SAMPLES = 240
LOW, HIGH = 0.9, 0.95  # of similarities within modalities
EVERYTHING = MiningRule(low=0.3, high=0.5)


def con_d_from(family):
    """Return an untrained model as Con-D, calibrated to accept about half of the pairs."""
    torch.manual_seed(7)
    model = load_model(family, "tiny")
    con_d = ModelDiscriminator(model)
    samples = mini_batch(data(), range(START, START + 2 * BATCH))
    pairs = torch.cartesian_prod(torch.arange(2 * BATCH), torch.arange(2 * BATCH)).unbind(1)
    model.itm_head.weight.data *= 100.0
    for _ in range(2):
        odds = torch.logit(con_d.judge(samples, *pairs).double(), eps=1e-12)
        model.itm_head.bias.data[1] -= odds.median().float()
    return con_d


def encoder_from(family):
    """Return an untrained model as the encoder of hard negatives; it takes the place of Con-D."""
    torch.manual_seed(7)
    return _ModelNegativesEncoder(load_model(family, "tiny"))


def judge_of_captions():
    judge = _CaptionJudge()
    judge.know(data())
    return judge


def no_con_d():
    return None


def settings(**changes):
    return StepSettings(all_ranks=True, **changes)


# Cases whose ranks compute in chunks of so many pairs; the single process does not.
CHUNKS = {"blip2, in chunks": 2, "blip2, in chunks, without LM": 3}
ONLY_LM = {"itc": 1.0, "itm": 0.0, "lm": 1.0}


class FirstRankTextsMatch(TableConD):
    """Accepts only texts of the first rank with images of the second."""

    def judge(self, samples, image_of, text_of, ranks=None, seen=None):
        return ((image_of >= BATCH) & (text_of < BATCH)).float()


# Of the pairs of both ranks; groups 5 and 6 are on both.
GROUPS = torch.tensor([5, 5, 6, -1, 5, 6, -1, 5, 6, 7])
# Without MLM, because every rank draws its own masks.
NO_LM = {"itc": 1.0, "itm": 1.0, "lm": 0.0}

# Settings by name; the first word is the family.
CASES = {
    **{
        f"albef, groups {value}": settings(
            same_group=value, connections=EVERYTHING, loss_weights=NO_LM
        )
        for value in ("dropped", "positive", "negative")
    },
    "blip2, one rank needs the other's images": settings(loss_weights=ONLY_LM),
    "blip2 as the paper": settings(),
    "blip2, in chunks": settings(connections=EVERYTHING),
    "blip2, in chunks, without LM": settings(detach_other=False, loss_weights=NO_LM),
    "blip2, LM from other ranks": settings(connections=EVERYTHING),
    "blip2, dropping": settings(connections=MiningRule(action="drop")),
    "blip2, gradients to candidates": settings(detach_other=False),
    "blip2 judged by albef": settings(connections=EVERYTHING),
    "blip judged by blip2": settings(connections=EVERYTHING, detach_other=False),
    "blip2, negatives by a frozen blip2, without ITC": settings(
        loss_weights={"itc": 0.0, "itm": 1.0, "lm": 1.0}
    ),
    "albef, negatives by a frozen blip": settings(),
    "blip, consistency": settings(soft_labels=SoftLabels("consistency")),
    "blip, momentum": settings(soft_labels=SoftLabels("momentum")),
    "blip2, three candidates each": settings(connections=MiningRule(low=0.3, high=0.5, top_k=3)),
    "blip, probabilities": settings(connections=MiningRule(labels="probability")),
    "blip2, sigmoid and labels from images and texts alone": settings(
        itc_loss="sigmoid", soft_labels=SoftLabels("softclip"), detach_other=False
    ),
    "blip, debiased with pseudo-positives": settings(
        itc_loss="debiased", soft_labels=SoftLabels("pseudo_positives")
    ),
    "blip, robust and dropping": settings(itc_loss="rince", connections=MiningRule(action="drop")),
    "blip2, false by similarity within modalities": settings(
        negatives_by="intra_modal",
        connections=MiningRule(score="intra_modal", low=LOW, high=HIGH, action="drop", top_k=0),
    ),
    "albef, false by a margin of similarity": settings(
        connections=MiningRule(score="similarity", rule="margin", top_k=3),
        own={"margin": Margin(margin=0.0)},
    ),
    "blip, false by thresholds of samples": settings(
        connections=MiningRule(score="similarity", rule="global_threshold", top_k=0),
        own={"global_threshold": _GlobalThreshold(share=0.3)},
    ),
    "albef, distilled MLM": settings(soft_labels=SoftLabels("momentum"), connections=EVERYTHING),
    "albef, captions": settings(
        detach_other=False, loss_weights=NO_LM, connections=MiningRule(low=2e-4, high=5e-4)
    ),
    "albef, oracle": settings(detach_other=False, loss_weights=NO_LM),
}
# Who judges, where it is not `TableConD`.
JUDGES = {
    "blip2, one rank needs the other's images": FirstRankTextsMatch,
    "blip2 judged by albef": lambda: con_d_from("albef_mafa"),
    "blip judged by blip2": lambda: con_d_from("blip2_mafa"),
    "blip2, negatives by a frozen blip2, without ITC": lambda: encoder_from("blip2_mafa"),
    "albef, negatives by a frozen blip": lambda: encoder_from("blip_mafa"),
    **{name: no_con_d for name in CASES if "false by" in name},
    "albef, captions": judge_of_captions,
    "albef, oracle": _Oracle,
}


def mask_every_third(ids, *args, special_ids, mask_id, **kwargs):
    """Mask the same tokens of a caption on every rank."""
    position = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = (position % 3 == 1) & ~torch.isin(ids, torch.tensor(special_ids))
    return torch.where(hidden, mask_id, ids), torch.where(hidden, ids, -100)


def fixed_masks():
    return mock.patch("lavis_mafa.families.albef_driver.mask_tokens", mask_every_third)


def model_of(name):
    torch.manual_seed(3)
    family, chosen = re.match(r"\w+", name)[0], CASES[name]
    model = load_model(f"{family}_mafa", "tiny")
    model.attach_step(model.backbone, chosen, JUDGES.get(name, TableConD)())
    model.allocate(SAMPLES)
    if isinstance(model.con_d, _ModelNegativesEncoder):
        model.con_d, model.negatives_encoder = None, model.con_d
    if isinstance(model.con_d, _Oracle):
        # Its indices are those of the data set, not of the mini-batch.
        model.con_d.truth = lambda images, texts: (images * 7 + texts * 3) % 11 > 5
    if chosen.soft_labels.type == "momentum":
        model.momentum_encoders = Momentum(model, backbone_of, 64, queue_size=16)
    return model


def losses_and_gradients(output, model):
    losses = {
        name: value.detach().clone() for name, value in output.items() if name.startswith("loss")
    }
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, gradients


@functools.cache
def data():
    toy = ToyScenesBuilder(toy_config()).build_datasets()
    return TrainingSet(toy["train"], seed=0)


def samples_of(name, begin, end, first=START):
    """Return a part of both ranks' pairs, with groups where the case has them."""
    samples = mini_batch(data(), range(first + begin, first + end), epoch=1)
    if "groups" in name:
        samples |= {"image_id": torch.arange(begin, end), "group_id": GROUPS[begin:end]}
    return samples


def run_rank(rank):
    results = {}
    for name in CASES:
        model = model_of(name)
        model.cached_batch = CHUNKS.get(name)
        unused = not all(model.settings.loss_weights.values())
        wrapped = DistributedDataParallel(model, find_unused_parameters=unused)
        with fixed_masks():
            output = wrapped(samples_of(name, rank * BATCH, (rank + 1) * BATCH))
        output.loss.backward()
        losses, gradients = losses_and_gradients(output, model)
        for loss in losses.values():
            dist.all_reduce(loss)
            loss /= 2
        results[name] = {
            "losses": losses,
            "gradients": gradients,
            "hard": stack_directions(output, "hard"),
            "states": stack_directions(output, "state"),
            "candidates": output.candidates,
            "own": output.own,
        }
    results["queue"] = queue_of_two_steps(rank)
    return results


def stack_directions(output, name):
    """Return an attribute of both directions for K nominations of B anchors, ``(2, K, B)``."""
    return torch.stack(
        [getattr(found, name).view(-1, len(found.second)) for found in (output.i2t, output.t2i)]
    )


def queue_of_two_steps(rank):
    """Return what the momentum queue of a model with `all_ranks` off holds."""
    torch.manual_seed(3)
    model = load_model("blip_mafa", "tiny")
    model.attach_step(model.backbone, StepSettings(soft_labels=SoftLabels("momentum")), None)
    model.momentum_encoders = Momentum(model, backbone_of, 64, queue_size=24)
    model.expect_groups()
    model.image_queue.zero_()
    wrapped = DistributedDataParallel(model)
    for step in range(2):
        own = samples_of("groups", rank * BATCH, (rank + 1) * BATCH, first=2 * BATCH * step)
        wrapped(own).loss.backward()
    groups = getattr(model, GROUP_QUEUE).clone()
    return {"features": model.image_queue.clone(), "place": int(model.queue_ptr), "groups": groups}


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory):
    return on_two_ranks(run_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process_on_the_joined_batch(rank_results, name):
    model = model_of(name)
    samples = samples_of(name, 0, 2 * BATCH)
    with fixed_masks():
        output = model(samples)
    output.loss.backward()
    losses, gradients = losses_and_gradients(output, model)
    one, other = (rank[name] for rank in rank_results)
    hard, states = stack_directions(output, "hard"), stack_directions(output, "state")
    assert torch.equal(torch.cat([one["hard"], other["hard"]], dim=-1), hard)
    assert torch.equal(torch.cat([one["states"], other["states"]], dim=-1), states)
    from_other_rank = (hard[..., :BATCH] >= BATCH).any() and (hard[..., BATCH:] < BATCH).any()
    assert from_other_rank, "no negative of another rank was picked"
    judged = model.con_d is not None or not CASES[name].connections.by_con_d
    present = states[states != ABSENT].tolist()
    assert len(set(present)) > judged, "what judges must not call all alike"
    for rank in (one, other):
        assert torch.equal(rank["candidates"], samples["loaded_index"])
        for loss, value in losses.items():
            assert float(rank["losses"][loss]) == pytest.approx(float(value), rel=1e-5), loss
        assert rank["gradients"].keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            theirs = rank["gradients"][parameter]
            assert torch.allclose(theirs, gradient, rtol=1e-3, atol=2e-6), parameter
    assert one["own"].tolist() == list(range(BATCH))
    assert other["own"].tolist() == list(range(BATCH, 2 * BATCH))
    if "groups" in name:
        within = (GROUPS[hard] == GROUPS) & (GROUPS >= 0)
        assert within.any() == name.endswith("negative")


def test_momentum_queue_holds_the_features_of_all_ranks(rank_results):
    """DDP copies the queue of the first rank to all before every step: all must be complete."""
    one, other = (rank["queue"] for rank in rank_results)
    assert one["place"] == other["place"] == 4 * BATCH
    assert torch.equal(one["features"], other["features"])
    # Groups are in the order of ranks; places that were never filled are of no group.
    assert torch.equal(one["groups"], other["groups"])
    assert one["groups"].tolist() == [[*GROUPS.tolist() * 2, *[NO_GROUP] * 4]]
    filled = one["features"].abs().sum(dim=0) > 0
    assert filled.tolist() == [True] * 4 * BATCH + [False] * 4
    assert len({tuple(column.tolist()) for column in one["features"].t()[: 4 * BATCH]}) == 4 * BATCH


def test_single_process_gathers_nothing(tiny, toy_train):
    ranks = Ranks(together=True)
    images = tiny.backbone.encode_images(mini_batch(toy_train, range(3))["image"])
    assert ranks.images(images).embeds is images.embeds
    assert ranks.own(3, torch.device("cpu")).tolist() == [0, 1, 2]
    assert float(ranks.mean(torch.tensor([1.0, 2.0, 6.0]))) == 3.0
    assert float(ranks.mean(torch.zeros(0))) == 0.0
