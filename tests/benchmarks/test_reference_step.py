"""The slow reference step and the package's step are one step: same losses, same gradients."""

from __future__ import annotations

import pytest
import torch
from conftest import mini_batch
from omegaconf import OmegaConf
from same_gradients import assert_same_gradients

from benchmarks.reference_step import PlainAlbef, reference_step
from lavis_mafa.algorithm.mining import AMBIGUOUS, POSITIVE, MiningRule
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.models import AlbefMafa
from lavis_mafa.models.con_d.discriminator import ModelDiscriminator

SIZE = 12


def with_wide_head(model):
    """Random verdicts near 0.5 would all fall between the same thresholds."""
    with torch.no_grad():
        model.itm_head.weight.mul_(8.0)
    return model


@pytest.fixture(scope="module")
def both():
    """The model in training and Con-D, of the package and of LAVIS's plain modules."""
    cfg = OmegaConf.load(AlbefMafa.default_config_path("tiny")).model
    torch.manual_seed(0)
    plain = [PlainAlbef(cfg).eval(), with_wide_head(PlainAlbef(cfg)).eval()]
    ours = [AlbefMafa.from_config(cfg).eval() for _ in plain]
    for model, reference in zip(ours, plain, strict=True):
        assert model.state_dict().keys() == reference.state_dict().keys()
        model.load_state_dict(reference.state_dict())
    plain[1].requires_grad_(False)
    return ours, plain


def test_the_reference_has_none_of_our_modules(both):
    _, plain = both
    ours = {type(part) for part in plain[0].modules() if "lavis_mafa" in type(part).__module__}
    assert not ours


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_same_losses_and_gradients(both, toy_train, share):
    """Thresholds between the verdicts leave a share of them positive and some ambiguous."""
    (ours, con_d), (plain, plain_con_d) = both
    samples = mini_batch(toy_train, range(SIZE))
    del samples["image_id"]  # Algorithm 1 knows of no other captions of an image
    seen = []

    def note(image_of, text_of, probability):
        seen.append(probability)
        return probability

    reference_step(plain, plain_con_d, samples, verdicts=note)
    low, high = thresholds(torch.cat(seen), share)

    torch.manual_seed(1)
    told = reference_step(plain, plain_con_d, samples, low, high)
    rule = MiningRule(low=low, high=high)
    torch.manual_seed(1)
    mine = run_step(
        ours.backbone, samples, StepSettings(connections=rule), ModelDiscriminator(con_d)
    )
    for name in ("loss_itc", "loss_itm", "loss_lm", "loss"):
        assert mine[name].item() == pytest.approx(told[name].item(), rel=1e-5), name
    found = torch.stack([(each.state == POSITIVE).sum() for each in (mine.i2t, mine.t2i)])
    assert torch.equal(found, told["found"])
    assert (found > 0).all() == (share > 0)
    if share == 0.25:
        assert (found < SIZE).all()
        assert (mine.i2t.state == AMBIGUOUS).any() and (mine.t2i.state == AMBIGUOUS).any()

    for model, output in ((plain, told), (ours, mine)):
        model.zero_grad()
        output["loss"].backward()
    assert_same_gradients(ours, plain)


def thresholds(probabilities, share):
    """Halfway between two verdicts, so that rounding cannot change what is above."""
    values = probabilities.sort(descending=True).values
    if share == 0.0:
        return 1.0, 1.0
    if share == 1.0:
        return 0.0, 0.0
    at = round(share * len(values)), round(2.5 * share * len(values))
    high, low = (float(values[k - 1] + values[k]) / 2 for k in at)
    return low, high
