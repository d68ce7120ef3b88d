"""The training step against slow loops over pairs, written from the papers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import mini_batch, tiny_config
from slow_families import SLOW, TableConD

from lavis_mafa import load_model
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.checkpoints.weight_loading import registered_name
from lavis_mafa.families import AlbefMafa
from lavis_mafa.judges.discriminators import ModelDiscriminator, _Oracle

BATCH = 10


@pytest.fixture
def samples(toy_train):
    return mini_batch(toy_train, range(BATCH))


def slow_step(model, samples, con_d=None, alpha=None, consistency=None, low=0.5, high=0.8):
    """MAFA's Algorithm 1, pair by pair."""
    slow = SLOW[registered_name(type(model))](model, samples)
    size, v, t = slow.size, slow.v, slow.t
    itm, itc, lm_pairs = [], [], [(b, b) for b in range(size)]
    itm += [(slow.fuse(b, b), 1) for b in range(size)]
    for image_anchor in (True, False):
        for b in range(size):
            if image_anchor:
                logits = [slow.similarity(v[b], t[k].detach()) / model.temp for k in range(size)]
                mirrored = [slow.similarity(v[k], t[b]) / model.temp for k in range(size)]
            else:
                logits = [slow.similarity(v[k].detach(), t[b]) / model.temp for k in range(size)]
                mirrored = [slow.similarity(v[b], t[k]) / model.temp for k in range(size)]
            order = sorted((k for k in range(size) if k != b), key=lambda k: -logits[k].item())
            k, label = order[0], 0
            targets = {b: 1.0}
            pair = (b, k) if image_anchor else (k, b)
            p = con_d.probability(*pair) if con_d else 0.0
            if p > high:
                label = 1
                targets = {b: 0.5, k: 0.5}
                if pair not in lm_pairs:
                    lm_pairs.append(pair)
            elif p > low:
                k = order[1]
            itm.append((slow.fuse(b, k) if image_anchor else slow.fuse(k, b), label))
            log_p = torch.log_softmax(torch.stack(logits), 0)
            weights = [targets.get(j, 0.0) for j in range(size)]
            if alpha is not None:
                weights = [(1 - alpha) * w + alpha / size for w in weights]
            itc.append(-sum(w * log_p[j] for j, w in enumerate(weights)))
            if consistency is not None:
                log_q = torch.log_softmax(torch.stack(mirrored), 0).detach()
                itc[-1] = itc[-1] + consistency * (log_q.exp() * (log_q - log_p)).sum()
    loss_itm = torch.stack([F.cross_entropy(x[None], torch.tensor([y])) for x, y in itm]).mean()
    loss_itc = torch.stack(itc).mean()
    loss_lm = slow.token_losses(lm_pairs).mean()
    return loss_itc, loss_itm, loss_lm


SYSTEMS = {
    "ALBEF-base": (SoftLabels("one_hot"), False, {}),
    "GRIT-VLP": (SoftLabels("consistency", weight=0.2), False, {"consistency": 0.2}),
    "S-ITC": (SoftLabels("smoothed", 0.5), False, {"alpha": 0.5}),
    "ECM": (SoftLabels("one_hot"), True, {}),
    "MAFA": (SoftLabels("smoothed", 0.5), True, {"alpha": 0.5}),
}


@pytest.mark.strict_smoke
@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("family", SLOW)
def test_losses_and_gradients_equal_slow_loop(samples, family, name):
    torch.manual_seed(0)
    tiny = load_model(family, "tiny")
    soft, judged, slow_settings = SYSTEMS[name]
    con_d = TableConD() if judged else None
    torch.manual_seed(5)
    output = run_step(tiny.backbone, samples, StepSettings(soft_labels=soft), con_d)
    output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in tiny.named_parameters() if p.grad is not None}
    tiny.zero_grad()
    torch.manual_seed(5)
    slow = slow_step(tiny, samples, con_d, **slow_settings)
    sum(slow).backward()
    for mine, theirs in zip((output.loss_itc, output.loss_itm, output.loss_lm), slow, strict=True):
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)
    for parameter, mine in gradients.items():
        theirs = dict(tiny.named_parameters())[parameter].grad
        assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-5), parameter
    if judged:
        states = torch.cat([output.i2t.state, output.t2i.state])
        assert {0, 1, 2} <= set(states.tolist()), "the verdicts must go through every branch"


def test_labels_are_one_hot_before_the_first_grouped_epoch(tiny, toy_train):
    settings = StepSettings(soft_labels=SoftLabels("smoothed", 0.5))
    early = mini_batch(toy_train, range(BATCH), grouped=False)
    late = mini_batch(toy_train, range(BATCH), grouped=True)
    one_hot = StepSettings(soft_labels=SoftLabels("one_hot"))
    itc = run_step(tiny.backbone, early, settings).loss_itc
    assert itc == run_step(tiny.backbone, late, one_hot).loss_itc
    assert itc != run_step(tiny.backbone, late, settings).loss_itc
    from_epoch_2 = SoftLabels("smoothed", start_epoch=2)
    assert not from_epoch_2.active(1, True) and from_epoch_2.active(2, False)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("action", ["convert", "drop", "keep"])
def test_smallest_batches_have_finite_gradients(tiny, toy_train, size, action):
    samples = mini_batch(toy_train, range(size))
    settings = StepSettings(connections=MiningRule(action=action))
    output = run_step(tiny.backbone, samples, settings, TableConD())
    output.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in tiny.parameters() if p.grad is not None)


def test_captions_of_one_image_are_known_positives(tiny, toy_train):
    samples = mini_batch(toy_train, range(4))
    samples["image_id"] = torch.tensor([0, 0, 1, 2])
    output = run_step(tiny.backbone, samples, StepSettings(), TableConD())
    assert output.i2t.hard[0] != 1 and output.t2i.hard[1] != 0
    assert output.i2t.positives[0].tolist() == [True, True, False, False]
    papers = run_step(tiny.backbone, samples, StepSettings(same_image="negative"), TableConD())
    assert torch.equal(papers.i2t.positives, torch.eye(4, dtype=torch.bool))


def test_detach_other_removes_gradients_of_the_other_modality(tiny, samples):
    def text_gradient(detach):
        tiny.zero_grad()
        settings = StepSettings(detach_other=detach, loss_weights={"itc": 1, "itm": 0, "lm": 0})
        run_step(tiny.backbone, samples, settings).loss.backward()
        return tiny.text_proj.weight.grad.clone()

    assert not torch.allclose(text_gradient(True), text_gradient(False))


def test_losses_of_weight_zero_are_not_computed(tiny, samples):
    settings = StepSettings(loss_weights={"itc": 2.0, "itm": 0.0, "lm": 0.0})
    output = run_step(tiny.backbone, samples, settings)
    assert output.loss_itm is None and output.loss_lm is None
    assert output.loss.item() == pytest.approx(2 * output.loss_itc.item())
    with pytest.raises(ValueError, match="nothing to train"):
        nothing = StepSettings(loss_weights={"itc": 0.0, "itm": 0.0, "lm": 0.0})
        run_step(tiny.backbone, samples, nothing)


def test_oracle_returns_the_truth_of_the_data(tiny, toy_train, samples):
    con_d = _Oracle()
    with pytest.raises(RuntimeError, match="toy_scenes"):
        run_step(tiny.backbone, samples, StepSettings(), con_d)
    con_d.truth = toy_train.truth
    image_of, text_of = torch.arange(BATCH).repeat(BATCH), torch.arange(BATCH).repeat_interleave(10)
    verdicts = con_d.judge(samples, image_of, text_of)
    valid = toy_train.truth(image_of.numpy(), text_of.numpy())
    assert np.array_equal(verdicts.numpy() == 1, valid) and valid.sum() >= BATCH


def test_con_d_is_frozen_and_its_verdicts_equal_the_model(tiny, samples):
    judge = copy.deepcopy(tiny)
    con_d = ModelDiscriminator(judge)
    assert not any(p.requires_grad for p in judge.parameters()) and not judge.training
    image_of, text_of = torch.tensor([0, 3, 3]), torch.tensor([1, 2, 2])
    verdicts = con_d.judge(samples, image_of, text_of)
    images = tiny.backbone.encode_images(samples["image"])
    texts = tiny.backbone.encode_texts(samples["text_input"])
    expected = tiny.backbone.match(images, texts, image_of, text_of).softmax(1)[:, 1]
    assert torch.allclose(verdicts, expected, atol=1e-6) and verdicts[1] == verdicts[2]
    verdicts_bf16 = ModelDiscriminator(copy.deepcopy(judge), "bf16").judge(
        samples, image_of, text_of
    )
    assert torch.allclose(verdicts, verdicts_bf16, atol=0.02)
    settings = StepSettings(connections=MiningRule(low=0.0, high=0.0))
    run_step(tiny.backbone, samples, settings, con_d).loss.backward()
    assert tiny.itm_head.weight.grad is not None and judge.itm_head.weight.grad is None


def test_con_d_of_another_image_size_resizes_images(tiny, samples):

    from lavis_mafa.families import AlbefMafa

    larger = AlbefMafa.from_config(tiny_config(AlbefMafa, image_size=64))
    con_d = ModelDiscriminator(larger)
    assert con_d.image_size == 64 and samples["image"].shape[-1] == 32
    verdict = con_d.judge(samples, torch.tensor([0]), torch.tensor([1]))
    assert 0 <= verdict.item() <= 1
    assert load_model("albef_mafa", "tiny") is not None


def test_module_without_itm_head_cannot_be_con_d():
    with pytest.raises(TypeError, match="no ITM head"):
        ModelDiscriminator(torch.nn.Linear(2, 2))


def test_posterior_picker_is_used_by_the_step(toy_train, tmp_path):
    """The picker receives cosines, observes every mini-batch, and is saved in the checkpoint."""
    chosen = {"negatives": "posterior", "posterior": {"minimum": 0, "prior": 0.01}}
    torch.manual_seed(0)
    model = AlbefMafa.from_config(tiny_config(AlbefMafa, mafa=chosen)).eval()
    seen = []
    picker = model.posterior.train()
    pick = picker.pick
    picker.pick = lambda sim, known, own_sim: (seen.append(sim), pick(sim, known, own_sim))[1]
    positive, negative = [], []
    size = 2  # an untrained model rarely ranks a pair first among more candidates
    for first in range(0, 10 * size, size):
        batch = mini_batch(toy_train, range(first, first + size), epoch=1)
        output = model(batch)
        sim = output.image_features @ output.text_features.t()
        assert torch.allclose(seen[-2], sim, atol=1e-5) and torch.allclose(
            seen[-1], sim.t(), atol=1e-5
        )
        same = batch["image_id"][:, None] == batch["image_id"][None, :]
        for b in range(size):
            row, column = sim[b][~same[b]].max(), sim[:, b][~same[b]].max()
            if sim[b, b] > row and sim[b, b] > column:
                positive.append(sim[b, b].item())
                negative += [row.item(), column.item()]
        for found in (output.i2t, output.t2i):
            assert not found.positives[torch.arange(size), found.hard].any()
    assert int(picker.positive.count) == len(positive) > 1
    assert picker.positive.mean.item() == pytest.approx(np.mean(positive), abs=1e-5)
    assert picker.negative.mean.item() == pytest.approx(np.mean(negative), abs=1e-5)
    state = model.state_dict()
    assert state["posterior.positive.count"] == len(positive)
    assert any(value.requires_grad for value in model.parameters())
    with pytest.raises(ValueError, match="name classes .posterior., which must be built once"):
        run_step(model.backbone, batch, StepSettings(negatives="posterior"))
