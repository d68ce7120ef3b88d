"""Registered classes with parameters or state: built once, trained, saved and resumed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from conftest import mini_batch, tiny_config
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import on_two_ranks

from lavis_mafa.algorithm.backbone import Images, Texts
from lavis_mafa.algorithm.context import MiniBatch
from lavis_mafa.algorithm.labels import SOFT_LABELS
from lavis_mafa.algorithm.losses import LOSSES
from lavis_mafa.algorithm.options import option
from lavis_mafa.algorithm.parts import build_parts
from lavis_mafa.algorithm.pickers import PICKERS
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.checkpoints.checkpoints import run_state_of, weights_of
from lavis_mafa.training.checkpoint import load_trained_state, trained_state

BATCH = 6


@dataclass(frozen=True)
class Start:
    value: float = option(2.0, "initial value", source="test")


class Sharpened(nn.Module):
    """Mix one-hot labels with the model's distribution at a trained temperature."""

    def __init__(self, own):
        super().__init__()
        self.power = nn.Parameter(torch.tensor(own.value))

    def forward(self, side, soft):
        return 0.5 * side.one_hot() + 0.5 * torch.softmax(self.power * side.sim.detach(), dim=1)


class Scaled(nn.Module):
    """A loss with a trained factor and a figure of every sample of the training data."""

    state_of_run = True

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(3.0))

    def allocate(self, size):
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, step):
        numbers = step.batch.numbers["loaded_index"]
        self.seen[numbers] += 1
        images, _ = step.batch.features()
        return self.factor * images.square().mean()


class Tally:
    """A loss that is a class, but no module."""

    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return step.compared.i2t.square().mean()


class Named(nn.Module):
    def prepare(self, sim_i2t, sim_t2i, positives, own, temperature, epoch):
        return PICKERS["hardest"], PICKERS["hardest"]


@pytest.fixture
def registered(monkeypatch):
    for registry in (PICKERS, SOFT_LABELS, LOSSES):
        monkeypatch.setattr(registry, "_entries", registry.entries())
    SOFT_LABELS.register("sharpened", settings=Start)(Sharpened)
    LOSSES.register("scaled")(Scaled)
    LOSSES.register("tally")(Tally)


MAFA = {
    "soft_labels": {"type": "sharpened", "start_epoch": 1},
    "loss_weights": {"scaled": 1.0, "tally": 1.0, "itm": 0.0, "lm": 0.0},
    "sharpened": {"value": 1.5},
}


def model_with(**mafa):
    from lavis_mafa.families import AlbefMafa

    torch.manual_seed(0)
    return AlbefMafa.from_config(tiny_config(AlbefMafa, mafa=mafa))


@pytest.fixture
def samples(toy_train):
    return mini_batch(toy_train, range(BATCH), epoch=1)


def test_parameters_are_trained_saved_and_resumed(registered, samples):
    model = model_with(**MAFA)
    model.allocate(5000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = model(samples).loss
    loss.backward()
    assert model.sharpened.power.grad.item() != 0.0 and model.scaled.factor.grad.item() > 0.0
    optimizer.step()
    assert model.tally.calls == 1
    state = trained_state(model)
    assert state["sharpened.power"].item() != 1.5
    assert state["scaled.seen"].sum() == BATCH

    resumed = model_with(**MAFA)
    with pytest.raises(ValueError, match=r"unknown: \['scaled.seen'\]"):
        load_trained_state(resumed, state, "file")
    resumed.allocate(5000)
    load_trained_state(resumed, state, "file")
    torch.manual_seed(1)
    expected = model(samples).loss
    torch.manual_seed(1)
    assert torch.equal(resumed(samples).loss, expected)


def test_a_checkpoint_without_parameters_and_one_of_other_data_load(registered, samples, tmp_path):
    plain, old = model_with(), tmp_path / "old.pth"
    torch.save({"model": plain.state_dict()}, old)
    model = model_with(**MAFA)
    model.allocate(5000)
    model.load_checkpoint(str(old))
    assert model.sharpened.power.item() == 1.5
    # State of a run, whose size depends on the data, is not loaded as weights.
    new = tmp_path / "new.pth"
    model.sharpened.power.data.fill_(7.0)
    model(samples)
    torch.save({"model": model.state_dict()}, new)
    other = model_with(**MAFA)
    other.allocate(400)
    other.load_checkpoint(str(new))
    assert other.sharpened.power.item() == 7.0 and not other.scaled.seen.any()
    # A model without the objects loads the file as well.
    plain.load_checkpoint(str(new))


def test_state_of_a_run_is_found_at_any_depth_and_listed_in_its_checkpoints(registered, samples):
    model = model_with(negatives="posterior", warm_up_epochs=1, warm_up_negatives="uniform", **MAFA)
    model.allocate(5000)
    listed = run_state_of(model)
    assert sorted(listed) == ["picker_by_epoch.later.", "scaled."]
    model(samples)
    state = trained_state(model)
    assert state["picker_by_epoch.later.positive.count"] >= 0.0
    kept = weights_of({"model": state, "state_of_run": listed})
    assert kept.keys() == {key for key in state if not key.startswith(tuple(listed))} < state.keys()
    assert weights_of({"model": state}, listed).keys() == kept.keys()
    # Of a file that may be anybody's.
    for odd in (7, "scaled.", [7, None], {"scaled.": 1}):
        assert weights_of({"model": state, "state_of_run": odd}).keys() == state.keys()


def test_missing_objects_and_taken_names_are_refused(registered, tiny, samples):
    settings = StepSettings.from_config(MAFA)
    with pytest.raises(
        ValueError, match="name classes .sharpened, scaled, tally., which must be built once"
    ):
        run_step(tiny.backbone, samples, settings)
    LOSSES.register("sharpened")(Tally)
    weights = {**MAFA["loss_weights"], "sharpened": 1.0}
    twice = StepSettings.from_config({**MAFA, "loss_weights": weights})
    with pytest.raises(ValueError, match="registered as 'sharpened', Sharpened and Tally"):
        build_parts(twice)
    PICKERS.register("tally")(Named)
    both = replace(settings, negatives="tally")
    with pytest.raises(ValueError, match="registered as 'tally', Tally and Named"):
        build_parts(both)
    LOSSES.register("itm_head")(Tally)
    with pytest.raises(ValueError, match="itm_head is an attribute of AlbefMafa; register Tally"):
        model_with(loss_weights={"itm_head": 1.0})


def test_labels_that_have_not_begun_leave_a_gradient_of_zero(registered, samples):
    model = model_with(**MAFA)
    model.allocate(5000)
    model({**samples, "epoch": 0}).loss.backward()
    assert model.sharpened.power.grad.item() == 0.0


def batch_of(images, texts, ranks):
    """Return a mini-batch of encoded features; BLIP-2's backbone chooses among queries."""
    from lavis_mafa.families.blip2_driver import Blip2Backbone

    encoded = Images(torch.zeros(len(images), 1, 1), images), Texts(None, None, None, texts)
    own = ranks.own(len(images), images.device)
    return MiniBatch(
        Blip2Backbone.__new__(Blip2Backbone), StepSettings(), {}, ranks, own, {}, *encoded, *encoded
    )


def test_intra_modal_similarities_use_the_best_queries():
    torch.manual_seed(0)
    images = F.normalize(torch.randn(4, 3, 5), dim=-1).requires_grad_()
    texts = F.normalize(torch.randn(4, 5), dim=-1)
    of_images, of_texts = batch_of(images, texts, Ranks(False)).intra_modal
    assert not of_images.requires_grad
    best = [
        max(image, key=lambda q, t=text: (q @ t).item())
        for image, text in zip(images, texts, strict=True)
    ]
    for i in range(4):
        for j in range(4):
            assert of_images[i, j].item() == pytest.approx((best[i] @ best[j]).item(), abs=1e-6)
            assert of_texts[i, j].item() == pytest.approx((texts[i] @ texts[j]).item(), abs=1e-6)


def _rank(rank):
    torch.manual_seed(0)
    images = F.normalize(torch.randn(4, 3, 5), dim=-1)
    texts = F.normalize(torch.randn(4, 5), dim=-1)
    rows = slice(2 * rank, 2 * rank + 2)
    found = batch_of(images[rows], texts[rows], Ranks(True)).intra_modal
    module = Sharpened(Start())

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.other = module, nn.Parameter(torch.tensor(1.0))

        def forward(self, used):
            parts = replace(build_parts(StepSettings()), objects={"own": self.own})
            loss = self.other * (rank + 1)
            return loss * self.own.power if used else loss + parts.zero()

    model = DistributedDataParallel(Holder())
    for used in (False, True):  # an unused parameter must not keep DDP waiting
        model(used).backward()
    return {"found": found, "grad": module.power.grad}


def test_two_ranks_compare_with_the_candidates_of_both(tmp_path):
    ranks = on_two_ranks(_rank, tmp_path)
    torch.manual_seed(0)
    images = F.normalize(torch.randn(4, 3, 5), dim=-1)
    texts = F.normalize(torch.randn(4, 5), dim=-1)
    expected = batch_of(images, texts, Ranks(False)).intra_modal
    for place in (0, 1):
        together = torch.cat([one["found"][place] for one in ranks])
        torch.testing.assert_close(together, expected[place])
    assert ranks[0]["grad"].item() == ranks[1]["grad"].item() == 1.5
