"""Check that the reference step and the package's step have equal losses and gradients."""

from __future__ import annotations

import pytest
import torch
from conftest import mini_batch
from omegaconf import OmegaConf
from same_gradients import assert_same_gradients

from lavis_mafa.algorithm.mining import AMBIGUOUS, POSITIVE, MiningRule
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.families import AlbefMafa
from lavis_mafa.judges.discriminators import ModelDiscriminator
from research.benchmarks.reference_step import PlainAlbef, reference_step

SIZE = 12


def with_wide_head(model):
    """Scale the ITM head: random verdicts near 0.5 would all fall between the same thresholds."""
    with torch.no_grad():
        model.itm_head.weight.mul_(8.0)
    return model


@pytest.fixture(scope="module")
def both():
    """Build model and Con-D, each from the package and from LAVIS's plain modules."""
    cfg = OmegaConf.load(AlbefMafa.default_config_path("tiny")).model
    torch.manual_seed(0)
    plain = [PlainAlbef(cfg).eval(), with_wide_head(PlainAlbef(cfg)).eval()]
    ours = [AlbefMafa.from_config(cfg).eval() for _ in plain]
    for model, reference in zip(ours, plain, strict=True):
        assert model.state_dict().keys() == reference.state_dict().keys()
        model.load_state_dict(reference.state_dict())
    plain[1].requires_grad_(False)
    return ours, plain


def test_reference_uses_no_module_of_the_package(both):
    _, plain = both
    package_types = {
        type(part) for part in plain[0].modules() if "lavis_mafa" in type(part).__module__
    }
    assert not package_types


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_losses_and_gradients_equal_reference(both, toy_train, share):
    """Set thresholds between the verdicts so that a share of them is positive."""
    (ours, con_d), (plain, plain_con_d) = both
    samples = mini_batch(toy_train, range(SIZE))
    del samples["image_id"]  # Algorithm 1 does not use other captions of an image
    probabilities = []

    def record(image_of, text_of, probability):
        probabilities.append(probability)
        return probability

    reference_step(plain, plain_con_d, samples, verdicts=record)
    low, high = thresholds(torch.cat(probabilities), share)

    torch.manual_seed(1)
    expected = reference_step(plain, plain_con_d, samples, low, high)
    rule = MiningRule(low=low, high=high)
    torch.manual_seed(1)
    step_output = run_step(
        ours.backbone, samples, StepSettings(connections=rule), ModelDiscriminator(con_d)
    )
    for name in ("loss_itc", "loss_itm", "loss_lm", "loss"):
        assert step_output[name].item() == pytest.approx(expected[name].item(), rel=1e-5), name
    found = torch.stack(
        [(each.state == POSITIVE).sum() for each in (step_output.i2t, step_output.t2i)]
    )
    assert torch.equal(found, expected["found"])
    assert (found > 0).all() == (share > 0)
    if share == 0.25:
        assert (found < SIZE).all()
        assert (step_output.i2t.state == AMBIGUOUS).any() and (
            step_output.t2i.state == AMBIGUOUS
        ).any()

    for model, output in ((plain, expected), (ours, step_output)):
        model.zero_grad()
        output["loss"].backward()
    assert_same_gradients(ours, plain)


def thresholds(probabilities, share):
    """Return thresholds halfway between two verdicts, so that rounding changes no state."""
    values = probabilities.sort(descending=True).values
    if share == 0.0:
        return 1.0, 1.0
    if share == 1.0:
        return 0.0, 0.0
    ranks = round(share * len(values)), round(2.5 * share * len(values))
    high, low = (between(values, k) for k in ranks)
    return low, high


def between(values, k):
    """Return a number after about k of the values; a pair judged from both sides has one value."""
    while values[k - 1] - values[k] < 1e-3:
        k += 1
    return float(values[k - 1] + values[k]) / 2
