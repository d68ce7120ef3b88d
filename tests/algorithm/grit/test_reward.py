"""The language loss from which a learned hardness gets its reward."""

import pytest
import torch
from conftest import mini_batch

from lavis_mafa import load_model
from lavis_mafa.algorithm.grit import language_loss

FAMILIES = ("albef_mafa", "blip_mafa", "blip2_mafa")


@pytest.fixture(params=FAMILIES)
def model(request):
    torch.manual_seed(0)
    built = load_model(request.param, "tiny")
    built.train()
    return built


def test_it_is_the_step_s_loss_of_the_own_pairs(model, toy_train):
    samples = mini_batch(toy_train, range(6))
    found = language_loss(model, model.backbone, samples, seed=5)
    assert not found.requires_grad and found.dtype == torch.float32
    model.eval()
    model.con_d = None  # which would add mined pairs
    torch.manual_seed(5)
    assert found.item() == pytest.approx(model(samples).loss_lm.item(), rel=1e-5)


def test_it_leaves_everything_as_it_was(model, toy_train):
    samples = mini_batch(toy_train, range(6))
    model.temp.requires_grad_(False)
    next(model.children()).eval()  # such as a frozen part
    modes = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert any(modes) and not all(modes)
    first = language_loss(model, model.backbone, samples, seed=5)
    torch.rand(3)
    assert torch.equal(first, language_loss(model, model.backbone, samples, seed=5))
    torch.set_rng_state(state)
    language_loss(model, model.backbone, samples, seed=6)
    assert torch.equal(state, torch.get_rng_state())
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_modes_are_restored_after_an_error(model, toy_train):
    image = mini_batch(toy_train, range(2))["image"]
    modes = [module.training for module in model.modules()]
    with pytest.raises(KeyError):
        language_loss(model, model.backbone, {"image": image}, seed=5)
    assert [module.training for module in model.modules()] == modes
