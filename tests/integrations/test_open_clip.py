"""The losses beside open_clip's own, on one rank and on two, and a training of a tiny CLIP."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from PIL import Image
from runs import finish, spawn
from two_forks import answers_of_a_group

from lavis_mafa import GritSchedule, GritSettings, MiningRule, SoftLabels, StepSettings
from lavis_mafa.algorithm import rules

open_clip = pytest.importorskip("open_clip")

from lavis_mafa.integrations.open_clip import (  # noqa: E402
    ClipLoss,
    CoCaLoss,
    DistillClipLoss,
    SigLipLoss,
)


def features(size=8, width=16, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    made = [torch.randn(size, width, generator=drawn) for _ in range(2)]
    return [(one / one.norm(dim=1, keepdim=True)).requires_grad_() for one in made]


PAIRS = {
    "softmax": (
        ClipLoss,
        lambda rank, world: open_clip.ClipLoss(
            local_loss=True, gather_with_grad=True, rank=rank, world_size=world
        ),
    ),
    "sigmoid": (
        SigLipLoss,
        lambda rank, world: open_clip.loss.SigLipLoss(
            rank=rank, world_size=world, dist_impl="gather"
        ),
    ),
}


def loss_and_gradients(loss, rank=0):
    images, texts = features(seed=rank)
    scale = torch.tensor(12.0, requires_grad=True)
    bias = torch.tensor(-5.0, requires_grad=True)
    more = (bias,) if "SigLip" in type(loss).__name__ else ()
    value = loss(images, texts, scale, *more)
    value.backward()
    found = [value.detach(), images.grad, texts.grad, scale.grad, *(one.grad for one in more)]
    return [one.tolist() for one in found]


@pytest.mark.parametrize("form", PAIRS)
def test_without_mining_it_is_open_clips_loss(form):
    ours, theirs = PAIRS[form]
    found, expected = loss_and_gradients(ours()), loss_and_gradients(theirs(0, 1))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-6)


def both(rank, form):
    ours, theirs = PAIRS[form]
    return [loss_and_gradients(one, rank) for one in (ours(), theirs(rank, 2))]


@pytest.mark.parametrize("form", PAIRS)
def test_mean_and_gradients_on_two_ranks_equal_open_clips(tmp_path, form):
    """DDP averages the gradients of parameters: here those of the scale and the bias."""
    ranks = answers_of_a_group(both, tmp_path, form)
    ours, theirs = ([torch.tensor(answer[k][0]) for answer in ranks] for k in (1, 2))
    assert torch.allclose(sum(ours), sum(theirs), rtol=1e-4)
    for place in range(1, len(ranks[0][1])):
        one, other = ([torch.tensor(answer[k][place]) for answer in ranks] for k in (1, 2))
        if place > 2:  # of parameters
            one, other = [sum(one)], [sum(other)]
        for mine, its in zip(one, other, strict=True):
            assert torch.allclose(mine, its, rtol=1e-3, atol=1e-6)
    assert not torch.allclose(ours[0], ours[1])


def test_a_false_negative_is_converted_in_training():
    """Two captions fit both of their images; the loss of a plain CLIP pushes them apart."""
    rule = MiningRule(score="similarity", low=0.5, high=0.9)
    settings = StepSettings(detach_other=False, soft_labels=SoftLabels("one_hot"), connections=rule)
    images, texts = features()
    with torch.no_grad():
        texts[0], texts[1] = images[0], images[0] + 0.3 * texts[1]
        images[1] = images[0] + 0.2 * images[1]
        for both in (images, texts):
            both /= both.norm(dim=1, keepdim=True)
    mined = ClipLoss(settings=settings)
    scale = torch.tensor(10.0)
    plain = open_clip.ClipLoss()(images, texts, scale)
    found = mined(images, texts, scale, output_dict=True)["contrastive_loss"]
    labels = torch.eye(8)
    labels[:2, :2] = 0.5
    sim = scale * images @ texts.t()
    expected = -(labels * (sim.log_softmax(1) + sim.t().log_softmax(1).t())).sum() / 16
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert found.item() != pytest.approx(plain.item(), rel=1e-4)
    assert mined.output.counts[0, 2] == 2  # found, image to text


def test_siglip_without_its_bias_is_refused():
    with pytest.raises(ValueError, match="needs logit_bias"):
        SigLipLoss()(*features(), torch.tensor(10.0))
    with pytest.raises(ValueError, match="got itc_loss='softmax', but with the model's bias"):
        SigLipLoss(itc_loss="softmax")


def test_settings_without_a_word_on_gradients_keep_the_librarys():
    """MAFA detaches the other side of a pair; in this door only if it is asked for."""
    rule = MiningRule(score="similarity", rule="margin", top_k=0, action="drop")
    settings = StepSettings(soft_labels=SoftLabels("one_hot"), connections=rule)
    found = {
        name: loss_and_gradients(ClipLoss(settings=one))[1]
        for name, one in {
            "unsaid": settings,
            "both": replace(settings, detach_other=False),
            "one": replace(settings, detach_other=True),
        }.items()
    }
    assert found["unsaid"] == found["both"] != found["one"]


def test_arguments_and_keys_equal_open_clips():
    named = {"local_loss": True, "gather_with_grad": True, "cache_labels": True}
    clip = ClipLoss(**named, rank=0, world_size=1, use_horovod=False)
    siglip = SigLipLoss(rank=0, world_size=1, dist_impl="bidir")
    assert isinstance(clip, open_clip.ClipLoss) and isinstance(siglip, open_clip.loss.SigLipLoss)
    logits = clip.get_logits(*features(), 10.0)
    theirs = open_clip.ClipLoss().get_logits(*features(), 10.0)
    assert all(torch.equal(one, other) for one, other in zip(logits, theirs, strict=True))
    with pytest.raises(ValueError, match="got rank 1 of 2, but torch.distributed has rank 0 of 1"):
        ClipLoss(rank=1, world_size=2)
    with pytest.raises(TypeError, match="settings: got True, expected StepSettings"):
        ClipLoss(True, True)
    with pytest.raises(TypeError, match="'local_los'; did you mean local_loss"):
        ClipLoss(local_los=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gather_with_grad'"):
        SigLipLoss(gather_with_grad=True)
    with pytest.raises(ValueError, match="dist_impl: got 'ring', expected bidir"):
        SigLipLoss(dist_impl="ring")
    with pytest.raises(ValueError, match="got itc_loss='rince', but with the model's bias"):
        SigLipLoss(settings=StepSettings(itc_loss="rince"))
    with pytest.raises(TypeError, match="got loaded_indx, expected some of image_id"):
        ClipLoss()(*features(), torch.tensor(10.0), loaded_indx=torch.arange(8))
    assert (
        ClipLoss()(*features(), 10.0).item() == ClipLoss()(*features(), torch.tensor(10.0)).item()
    )


def three_steps(rank):
    """A model with logit_bias under DDP: every parameter must get a gradient."""
    model = torch.nn.Linear(8, 8)
    model.bias_of_pairs = torch.nn.Parameter(torch.tensor(-10.0))
    forward = model.forward
    model.forward = lambda rows: (*(forward(one) for one in rows), model.bias_of_pairs)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(3):
        drawn = torch.Generator().manual_seed(10 * step + rank)
        rows = [torch.randn(4, 8, generator=drawn) for _ in range(2)]
        images, texts, bias = wrapped(rows)
        normal = torch.nn.functional.normalize
        wrapped.zero_grad()
        loss = ClipLoss()(normal(images, dim=1), normal(texts, dim=1), 10.0, bias)
        loss.backward()
    return (model.bias_of_pairs.grad.item(),)


def test_a_bias_that_changes_no_softmax_gets_its_gradient_on_ranks(tmp_path):
    assert answers_of_a_group(three_steps, tmp_path) == [(0, 0.0), (1, 0.0)]


def of_other_forms(name, kind):
    """Both terms of a loss, and the gradients."""
    images, texts = features()
    drawn = torch.Generator().manual_seed(4)
    if name == "CoCa":
        logits = torch.randn(8, 5, 11, generator=drawn, requires_grad=True)
        labels = torch.randint(0, 3, (8, 5), generator=drawn)  # 0 pads
        found = kind(2.0, 0.5)(images, texts, logits, labels, torch.tensor(10.0))
    else:
        logits = torch.zeros(1, requires_grad=True)
        teacher = [one.detach() for one in features(seed=3)]
        found = kind()(images, texts, torch.tensor(10.0), *teacher, torch.tensor(20.0))
    (found[0] + found[1]).backward()
    grads = [one.grad for one in (images, texts, logits) if one.grad is not None]
    return [*(one.detach() for one in found), *grads]


@pytest.mark.parametrize(
    "name, ours, theirs",
    [
        ("CoCa", CoCaLoss, open_clip.CoCaLoss),
        ("distillation", DistillClipLoss, open_clip.DistillClipLoss),
    ],
)
def test_other_forms_equal_open_clips(name, ours, theirs):
    found, expected = of_other_forms(name, ours), of_other_forms(name, theirs)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert isinstance(ours(1.0, 1.0) if name == "CoCa" else ours(), open_clip.ClipLoss)


@pytest.mark.parametrize("form", PAIRS)
def test_accumulation_has_the_gradients_of_open_clip(form):
    """Each part is compared with the stored features of the others; nothing is divided."""
    towers = [torch.nn.Linear(16, 16, bias=False) for _ in range(2)]
    scale = torch.nn.Parameter(torch.tensor(10.0))
    more = [torch.nn.Parameter(torch.tensor(-5.0))] if form == "sigmoid" else []
    trained = [scale, *more, *(tower.weight for tower in towers)]
    rows = [one.detach() for one in features()]

    def of(part):
        sides = [tower(one[part]) for tower, one in zip(towers, rows, strict=True)]
        return [torch.nn.functional.normalize(one, dim=1) for one in sides]

    def summed(loss):
        for one in trained:
            one.grad = None
        with torch.no_grad():
            stored = of(slice(None))
        for begin in (0, 2, 4, 6):
            parts = [
                torch.cat([kept[:begin], own, kept[begin + 2 :]])
                for kept, own in zip(stored, of(slice(begin, begin + 2)), strict=True)
            ]
            loss(*parts, scale, *more).backward()
        return [one.grad.clone() for one in trained]

    ours, theirs = PAIRS[form]
    for one, other in zip(summed(ours()), summed(theirs(0, 1)), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


RULES = {"plain": {}, "drop": {"margin": -0.1, "action": "drop"}, "convert": {"margin": -0.1}}


@pytest.mark.parametrize("form", PAIRS)
@pytest.mark.parametrize("rule", RULES)
def test_float64_stays_float64(form, rule):
    ours, theirs = PAIRS[form]
    images, texts = (one.detach().double() for one in features())
    more = [torch.tensor(-5.0)] if form == "sigmoid" else []
    found = ours(**RULES[rule])(images, texts, 12.0, *more)
    assert found.dtype == torch.float64
    if rule == "plain":
        expected = theirs(0, 1)(images, texts, 12.0, *more)
        assert found.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("itc_loss", ["softmax", "sigmoid", "debiased", "rince"])
def test_forms_of_the_general_step_keep_float64(itc_loss):
    images, texts = (one.detach().double() for one in features())
    assert ClipLoss(itc_loss=itc_loss, alpha=0.1)(images, texts, 12.0).dtype == torch.float64


@pytest.mark.parametrize("form", PAIRS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_is_near_full_precision(form, rule, kind):
    """Under autocast, and of a model in half precision."""
    loss = PAIRS[form][0](**RULES[rule])
    more = [torch.tensor(-5.0)] if form == "sigmoid" else []
    found = {}
    for name in ("full", "autocast", "half"):
        given = [one.detach().to(kind if name == "half" else torch.float32) for one in features()]
        given = [one.requires_grad_() for one in given]
        with torch.autocast("cpu", kind, enabled=name == "autocast"):
            value = loss(*given, torch.tensor(100.0), *more)
        value.backward()
        found[name] = value.item(), given[0].grad.float()
    for name in ("autocast", "half"):
        assert found[name][0] == pytest.approx(found["full"][0], rel=0.05)
        full, other = found["full"][1], found[name][1]
        assert other.isfinite().all() and (other - full).norm() < 0.1 * full.norm()


@pytest.mark.parametrize("form", PAIRS)
@pytest.mark.parametrize("rule", RULES)
def test_a_loop_with_cached_gradients_has_those_of_the_whole_mini_batch(form, rule):
    """GradCache: encode without a graph, differentiate the loss, encode again in chunks."""
    tower, rows = torch.nn.Linear(16, 16), [one.detach() for one in features()]
    loss = PAIRS[form][0](**RULES[rule])
    more = [torch.tensor(-5.0)] if form == "sigmoid" else []

    def encode(part):
        return torch.nn.functional.normalize(tower(part), dim=1)

    loss(*map(encode, rows), 12.0, *more).backward()
    whole = tower.weight.grad.clone()
    tower.zero_grad()
    with torch.no_grad():
        cached = [encode(one) for one in rows]
    cached = [one.requires_grad_() for one in cached]
    loss(*cached, 12.0, *more).backward()
    for side, one in zip(rows, cached, strict=True):
        for part, gradient in zip(side.split(3), one.grad.split(3), strict=True):
            encode(part).backward(gradient)
    torch.testing.assert_close(tower.weight.grad, whole)


def test_a_schedule_gets_the_features_from_the_loss():
    schedule = GritSchedule(16, 4, GritSettings(enabled=True, queue_size=16, search_space=8))
    loss, seen = ClipLoss(grit=schedule, alpha=0.1), []
    for epoch in range(2):
        plan = schedule.begin(epoch)
        for rows in plan.mini_batches(0):
            images, texts = features(4, seed=int(rows[0]))
            loss(images, texts, 10.0, loaded_index=torch.from_numpy(rows))
            seen.append(loss.output.loss_itc.item())
        assert plan.grouped == bool(epoch)
        schedule.end(epoch)
    images, texts = features(4)
    with pytest.raises(ValueError, match="no row numbers: give loaded_index, or train on"):
        loss(images, texts, 10.0)
    assert len(seen) == 8


def test_a_distilling_loss_takes_what_a_judge_and_grouping_read():
    class Judge:
        def judge(self, samples, image_of, text_of, ranks=None, seen=None):
            return torch.tensor([samples["text_input"][t] == "same" for t in text_of.tolist()])

    schedule = GritSchedule(8, 8)
    rows = torch.from_numpy(schedule.begin(0).mini_batches(0)[0])
    loss = DistillClipLoss(judge=Judge(), grit=schedule)
    given = [*features(), torch.tensor(10.0), *features(seed=3), torch.tensor(20.0)]
    loss(*given, loaded_index=rows, text_input=["same" for _ in rows])
    schedule.end(0)
    assert loss.output.counts[:, 2].tolist() == [8, 8]  # found


def test_own_settings_by_their_first_field_and_of_unknown_fields():
    first, named = (ClipLoss(itc_loss="rince", rince=one) for one in (0.7, {"exponent": 0.7}))
    assert first.parts.settings == named.parts.settings
    with pytest.raises(ValueError, match="unknown setting margin.margn; did you mean margin"):
        ClipLoss(margin={"margn": 1})
    with pytest.raises(ValueError, match="unknown setting connections.scor; did you mean score"):
        StepSettings.from_config({"connections": {"scor": "similarity"}})


def test_a_users_rule_with_settings_may_read_the_thresholds(monkeypatch):
    monkeypatch.setattr(rules.RULES, "_entries", rules.RULES.entries())
    rules.RULES.register("mine", settings=rules.Margin)(lambda pairs, rule, own: pairs.score)
    assert ClipLoss(rule="mine", high=0.9).parts.settings.connections.high == 0.9
    with pytest.raises(TypeError, match="high: no effect with rule='margin'"):
        ClipLoss(rule="margin", high=0.9)


SCRIPT = """
import sys
import open_clip, open_clip_train.main as main
from lavis_mafa.integrations.open_clip import create_loss
open_clip.add_model_config(sys.argv[1])
if sys.argv[2] != "theirs":
    main.create_loss = create_loss(**({"margin": 0.0} if sys.argv[2] == "mines" else {}))
main.main(sys.argv[3:])
"""


@pytest.mark.parametrize("form", ["clip", "siglip"])
def test_open_clips_command_line_trains_with_it(tmp_path, form):
    """Eight pictures in a CSV file, a tiny model; without settings, it logs open_clip's losses."""
    pytest.importorskip("open_clip_train.main")  # here, for all forks
    lines = ["filepath\ttitle"]
    for number in range(8):
        Image.new("RGB", (32, 32), (number * 30, 99, 255 - number * 30)).save(
            tmp_path / f"{number}.png"
        )
        lines.append(f"{tmp_path / f'{number}.png'}\tpicture number {number}")
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    vision = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
    text = {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 1}
    model = {"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}
    if form == "siglip":
        model |= {"init_logit_bias": -10.0}
    (tmp_path / "tiny.json").write_text(json.dumps(model))
    logged = {}
    for which in ("theirs", "ours", "mines"):
        command = [sys.executable, "-c", SCRIPT, tmp_path / "tiny.json", which]
        command += ["--model", "tiny", "--train-data", tmp_path / "pairs.csv", "--epochs", "1"]
        command += ["--batch-size", "4", "--workers", "0", "--logs", tmp_path, "--name", which]
        command += ["--device", "cpu", "--precision", "fp32", "--warmup", "1", "--log-every", "1"]
        command += ["--csv-separator", "\t", "--seed", "1"]
        command += ["--siglip"] if form == "siglip" else []
        finish(spawn(tmp_path, command))
        lines = (tmp_path / which / "out.log").read_text().splitlines()
        found = [
            line.split("Contrastive_loss: ")[1] for line in lines if "Contrastive_loss" in line
        ]
        logged[which] = [float(one.split()[0]) for one in found]
    assert len(logged["theirs"]) == 2
    assert logged["ours"] == pytest.approx(logged["theirs"], abs=2e-4)
    assert logged["mines"] != pytest.approx(logged["theirs"], abs=2e-3)
