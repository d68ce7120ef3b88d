"""Users' pickers, soft labels and losses are used by the step like the built-in ones."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from conftest import mini_batch, tiny_config
from torch import nn
from torch.nn.parallel.distributed import _find_tensors
from torch.utils import _pytree

from lavis_mafa.algorithm.labels import SOFT_LABELS, SoftLabels
from lavis_mafa.algorithm.losses import LOSSES
from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.algorithm.output import StepOutput
from lavis_mafa.algorithm.parts import build_parts
from lavis_mafa.algorithm.pickers import NONE, PICKERS
from lavis_mafa.algorithm.registry import MAFA, Registry
from lavis_mafa.algorithm.settings import LossWeights, StepSettings
from lavis_mafa.algorithm.step import run_step

BATCH = 6


@dataclass(frozen=True)
class Sharpness(Checked):
    power: float = option(2.0, "exponent of the similarities", source="test", low=1)


def easiest(sim, positives):
    """Pick the least similar candidate."""
    return torch.where(positives.all(1), NONE, sim.masked_fill(positives, torch.inf).argmin(1))


class EveryOther(nn.Module):
    """Pick the hardest in odd steps and the easiest in even ones."""

    def __init__(self, own=None):
        super().__init__()
        self.own = own
        self.register_buffer("steps", torch.tensor(0))

    def prepare(self, sim_i2t, sim_t2i, positives, own, temperature, epoch):
        self.steps += 1
        chosen = PICKERS["hardest"] if self.steps % 2 else easiest
        return chosen, chosen


def half_own_distribution(side, soft, own):
    """Mix one-hot labels with the model's own sharpened distribution."""
    return 0.5 * side.one_hot() + 0.5 * torch.softmax(own.power * side.sim.detach(), dim=1)


def spread(step):
    """Return the mean squared similarity of a mini-batch's images."""
    images, _ = step.batch.features()
    return (images @ images.t()).square().mean()


@pytest.fixture
def registered(monkeypatch):
    for registry in (PICKERS, SOFT_LABELS, LOSSES):
        monkeypatch.setattr(registry, "_entries", registry.entries())
    PICKERS.register("easiest")(easiest)
    PICKERS.register("every_other", settings=Sharpness)(EveryOther)
    SOFT_LABELS.register("half_its_own", settings=Sharpness)(half_own_distribution)
    LOSSES.register("spread")(spread)
    LOSSES.register("nothing")(lambda step: None)


@pytest.fixture
def samples(toy_train):
    return mini_batch(toy_train, range(BATCH))


def config(**mafa):
    return StepSettings.from_config(mafa)


def test_a_warm_up_has_its_own_picker(registered, tiny, samples):
    settings = config(negatives="hardest", warm_up_negatives="easiest", warm_up_epochs=2)
    parts = build_parts(settings)
    for epoch, name in enumerate(("easiest", "easiest", "hardest", "hardest")):
        given = {**samples, "epoch": epoch}
        output = run_step(tiny.backbone, given, parts)
        alone = run_step(tiny.backbone, given, config(negatives=name))
        assert torch.equal(output.i2t.hard, alone.i2t.hard)
        assert torch.equal(output.t2i.hard, alone.t2i.hard)
    without_epoch = {key: value for key, value in samples.items() if key != "epoch"}
    with pytest.raises(ValueError, match="need the epoch"):
        run_step(tiny.backbone, without_epoch, parts)
    with pytest.raises(ValueError, match="picker_by_epoch"):
        run_step(tiny.backbone, {**samples, "epoch": 0}, settings)


def test_both_pickers_of_a_warm_up_have_settings_and_state(registered, tiny, samples):
    from lavis_mafa.families import AlbefMafa

    given = {"negatives": "posterior", "posterior": {"minimum": 7}, "every_other": {"power": 3.0}}
    given |= {"warm_up_negatives": "every_other", "warm_up_epochs": 1}
    picker = build_parts(config(**given)).picker
    assert picker.first.own == Sharpness(3.0) and picker.later.rule.minimum == 7

    model = AlbefMafa.from_config(tiny_config(AlbefMafa, mafa=given))
    for epoch in (0, 0, 1):
        model({**samples, "epoch": epoch})
    state = model.state_dict()
    assert int(state["picker_by_epoch.first.steps"]) == 2
    assert int(state["picker_by_epoch.later.epoch"]) == 1


@pytest.mark.parametrize(
    "given", [{"warm_up_epochs": 1}, {"warm_up_negatives": "uniform"}, {"warm_up_epochs": -1}]
)
def test_half_a_warm_up_is_refused(given):
    with pytest.raises(ValueError, match="warm_up_epochs"):
        StepSettings(**given)


def test_user_soft_label_equals_slow_loop(registered, tiny, samples):
    torch.manual_seed(0)
    settings = config(
        soft_labels={"type": "half_its_own"}, half_its_own={"power": 3}, same_image="negative"
    )
    output = run_step(tiny.backbone, samples, settings)
    sim = (output.image_features @ output.text_features.t() / tiny.temp).detach()
    loss = 0.0
    for rows in (sim, sim.t()):
        for b in range(BATCH):
            weights = [0.5 * w for w in torch.softmax(3 * rows[b], 0).tolist()]
            weights[b] += 0.5
            log_p = torch.log_softmax(rows[b], 0).tolist()
            loss -= sum(w * p for w, p in zip(weights, log_p, strict=True)) / (2 * BATCH)
    assert output.loss_itc.item() == pytest.approx(loss, rel=1e-5)
    # Random mini-batches have one-hot labels whatever the type.
    early = run_step(tiny.backbone, {**samples, "grouped": False}, settings)
    one_hot = StepSettings(soft_labels=SoftLabels("one_hot"), same_image="negative")
    assert early.loss_itc == run_step(tiny.backbone, samples, one_hot).loss_itc


def test_user_loss_is_added_with_its_weight(registered, tiny, samples):
    torch.manual_seed(0)
    plain = run_step(tiny.backbone, samples, config())
    torch.manual_seed(0)
    weights = {"spread": 0.25, "nothing": 1.0}
    output = run_step(tiny.backbone, samples, config(loss_weights=weights))
    images = output.image_features
    expected = sum((a @ b).item() ** 2 for a in images for b in images) / BATCH**2
    assert output.loss_spread.item() == pytest.approx(expected, rel=1e-5)
    assert output["loss_spread"] is output.loss_spread
    assert [k for k in output if k.startswith("loss")] == [
        "loss", "loss_itc", "loss_itm", "loss_lm", "loss_spread",
    ]  # fmt: skip
    # The built-in losses come first, so their random stream does not depend on the user's loss.
    assert output.loss_lm == plain.loss_lm
    assert output.loss.item() == pytest.approx(plain.loss.item() + 0.25 * expected, rel=1e-6)
    output.loss_spread.backward()
    assert tiny.vision_proj.weight.grad.abs().sum() > 0


def test_unknown_names_are_rejected_with_the_known_ones(tiny, samples):
    with pytest.raises(
        ValueError, match="negatives must be hardest, sampled, sampled_blip, uniform or posterior"
    ):
        StepSettings(negatives="hard")
    with pytest.raises(ValueError, match="type must be one_hot, .* or momentum"):
        SoftLabels("soft")
    with pytest.raises(KeyError, match="no loss is called 'focal'; known: itc, imc"):
        run_step(tiny.backbone, samples, config(loss_weights={"focal": 1.0}))


def test_name_is_registered_once_but_a_reloaded_module_replaces_its_entry():
    registry = Registry("picker")
    registry.register("easiest")(easiest)
    registry.register("easiest")(easiest)
    with pytest.raises(ValueError, match="picker 'easiest' is already registered by .*easiest"):
        registry.register("easiest")(spread)
    entry = registry.entry("easiest")
    assert entry.source == __name__


def from_momentum(side, soft):
    """Use only the momentum encoders' distribution."""
    assert side.soft_sim is not None
    return torch.softmax(side.soft_sim, dim=1)


def constant_term(side, soft, own):
    """Return a constant from the settings."""
    return side.sim.new_tensor(own.power)


def test_user_soft_label_can_require_momentum_encoders(registered, samples):
    from lavis_mafa.families import AlbefMafa

    SOFT_LABELS.register("from_momentum", needs_momentum=True)(from_momentum)
    chosen = {"soft_labels": {"type": "from_momentum"}}
    model = AlbefMafa.from_config(tiny_config(AlbefMafa, mafa=chosen, queue_size=16))
    assert model.momentum_encoders is not None
    assert torch.isfinite(model({**samples, "grouped": False})["loss_itc"])
    with pytest.raises(ValueError, match="from_momentum without them"):
        run_step(model.backbone, samples, model.settings)


def test_user_soft_label_can_add_a_loss_term(registered, tiny, samples):
    SOFT_LABELS.register("plain", settings=Sharpness)(lambda side, soft, own: side.one_hot())
    SOFT_LABELS.register("pulled", settings=Sharpness, extra_loss=constant_term)(
        lambda side, soft, own: side.one_hot()
    )
    plain, pulled = (
        run_step(tiny.backbone, samples, config(soft_labels={"type": kind}, pulled={"power": 3}))
        for kind in ("plain", "pulled")
    )
    assert pulled.loss_itc.item() == pytest.approx(plain.loss_itc.item() + 3, rel=1e-6)
    with pytest.raises(TypeError, match="needs_momentun"):
        SOFT_LABELS.register("misspelt", needs_momentun=True)
    with pytest.raises(TypeError, match="a picker has no needs_momentum"):
        PICKERS.register("moved", needs_momentum=True)


@pytest.mark.parametrize("name", ["negatives", "connections", "con_d", "own", "learn_temperature"])
@pytest.mark.parametrize("registry", [PICKERS, SOFT_LABELS, LOSSES])
def test_settings_named_like_a_config_key_are_rejected(registered, registry, name):
    with pytest.raises(ValueError, match=f"already used by the model.mafa key {name}; register"):
        registry.register(name, settings=Sharpness)(spread)
    registry.register(f"{name}_of_mine", settings=Sharpness)(spread)


def test_settings_with_the_same_name_are_rejected(registered):
    for name, owner in (("every_other", "picker"), ("posterior", "picker")):
        with pytest.raises(ValueError, match=f"already used by the {owner} '{name}' of "):
            LOSSES.register(name, settings=Sharpness)(spread)
    LOSSES.register("half_its_own")(spread)  # without settings there is no conflict
    PICKERS.register("every_other", settings=Sharpness)(EveryOther)  # the same module again


def test_every_key_of_the_section_is_reserved():
    from dataclasses import fields

    from lavis_mafa.judges.discriminators import DISCRIMINATORS
    from lavis_mafa.settings.schema import _MafaOptions

    keys = {one.name for one in fields(_MafaOptions)}
    assert MAFA.keys == keys
    with pytest.raises(ValueError, match="already used by the model.mafa.con_d key checkpoint"):
        DISCRIMINATORS.register("checkpoint", settings=Sharpness)(EveryOther)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, got 1.5"),
        ({"weight": -1.0}, "weight must be >= 0, got -1.0"),
        ({"alpha": float("nan")}, "alpha must be"),
    ],
)
def test_values_out_of_range_are_rejected(wrong, message):
    with pytest.raises(ValueError, match=message):
        SoftLabels(**wrong)


def test_every_built_in_loss_has_a_documented_weight():
    from dataclasses import fields

    assert [one.name for one in fields(LossWeights)] == list(LOSSES)


def test_ddp_and_pytree_find_every_tensor_of_an_output(tiny, samples):
    output = run_step(tiny.backbone, samples, StepSettings())
    found = {id(tensor) for tensor in _find_tensors(output)}
    assert {id(v) for v in output.values() if isinstance(v, torch.Tensor)} <= found
    leaves, tree = _pytree.tree_flatten(output)
    assert [id(leaf) for leaf in leaves] == [id(value) for value in output.values()]
    again = _pytree.tree_unflatten(leaves, tree)
    assert type(again) is StepOutput and list(again) == list(output)
    assert again.loss_itm is output.loss_itm and again.loss_imc is None
    with pytest.raises(AttributeError, match="loss_focal"):
        _ = output.loss_focal
