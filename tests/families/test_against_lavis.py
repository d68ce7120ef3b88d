"""With MAFA off, losses and gradients equal those of LAVIS's own class."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import mini_batch, tiny_config
from lavis.models.albef_models.albef_pretrain import AlbefPretrain
from lavis.models.albef_models.albef_retrieval import AlbefRetrieval
from lavis.models.blip2_models.blip2_qformer import Blip2Qformer
from lavis.models.blip_models.blip_pretrain import BlipPretrain
from lavis.models.med import XBertEncoder
from same_gradients import assert_same_gradients, perturb_copies

from lavis_mafa.algorithm import pickers
from lavis_mafa.families import AlbefMafa, Blip2Mafa, BlipMafa
from lavis_mafa.families.blip2_parts import Blip2Parts, Parts
from lavis_mafa.families.tokenizers import build_tokenizer
from lavis_mafa.io.project_files import CONFIGS

SIZE = 8


@pytest.fixture
def process_group(tmp_path):
    """LAVIS's BLIP-2 needs a process group even for one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def hardest_negatives(monkeypatch):
    """Pick what has the largest weight where LAVIS and our pickers draw negatives."""
    monkeypatch.setattr(torch, "multinomial", lambda weights, count: weights.argmax(-1, True))
    monkeypatch.setattr(pickers, "one_of", lambda weights: weights.argmax(-1))


def assert_same_queue(ours, theirs):
    for name in ("image_queue", "text_queue", "queue_ptr"):
        assert torch.allclose(ours.state_dict()[name], theirs.state_dict()[name], atol=1e-5)


def assert_same_copies(ours, theirs):
    others = dict(theirs.named_parameters()).values()
    for (name, mine), other in zip(ours.named_parameters(), others, strict=True):
        if "_m." in name:
            assert torch.allclose(mine, other, atol=1e-6), name


MOMENTUM = {"soft_labels": {"type": "momentum"}, "detach_other": False}
LATE = {"epoch": 1, "iters": 3, "num_iters_per_epoch": 10}


def compare(ours, theirs, samples, schedule=LATE):
    mine = ours(dict(samples))
    mine.loss.backward()
    expected = theirs({**samples, **schedule})
    expected.loss.backward()
    lm = "loss_mlm" if "loss_mlm" in expected else "loss_lm"
    for name in ("loss_itc", "loss_itm", "loss_lm", "loss"):
        expected_loss = expected[lm if name == "loss_lm" else name].item()
        assert mine[name].item() == pytest.approx(expected_loss, rel=1e-5), name
    assert_same_gradients(ours, theirs)


OFF = {"soft_labels": {"type": "one_hot", "label_smoothing": 0.1}, "same_image": "negative"}


def blip2_pair(**mafa):
    """Return our tiny BLIP-2 and LAVIS's, with equal weights."""

    class SmallBlip2(Blip2Parts, Blip2Qformer):
        parts = Parts.from_config(tiny_config(Blip2Mafa))

    torch.manual_seed(0)
    sizes = {"img_size": 32, "num_query_token": 8, "embed_dim": 64}
    theirs = SmallBlip2(vit_precision="fp32", freeze_vit=False, **sizes)
    ours = Blip2Mafa.from_config(tiny_config(Blip2Mafa, mafa={**OFF, **mafa}))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def blip_pair(tmp_path, monkeypatch, **mafa):
    """Return our tiny BLIP with momentum and LAVIS's, with equal weights."""
    # LAVIS loads this tokenizer by name; a local folder of that name takes precedence.
    vocabulary = tmp_path / "bert-base-uncased" / "vocab.txt"
    vocabulary.parent.mkdir()
    shutil.copy(CONFIGS / "models" / "tiny_vocab.txt", vocabulary)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    mafa = {**MOMENTUM, "same_image": "negative", **mafa}
    cfg = tiny_config(BlipMafa, mafa=mafa, queue_size=5 * SIZE)
    ours, parts = BlipMafa.from_config(cfg), BlipMafa.from_config(cfg)
    theirs = BlipPretrain(
        parts.visual_encoder,
        parts.text_encoder,
        parts.text_decoder,
        queue_size=5 * SIZE,
        embed_dim=64,
        max_txt_len=30,
    )
    assert theirs.tokenizer.get_vocab() == ours.tokenizer.get_vocab()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    assert ours.state_dict().keys() - theirs.state_dict().keys() == {"idx_queue"}
    perturb_copies(ours)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    return ours, theirs


@pytest.mark.strict_smoke
@pytest.mark.parametrize("temperature", [0.07, 0.7])
def test_blip2_with_mafa_off_is_lavis_blip2(
    toy_train, process_group, hardest_negatives, temperature
):
    """LAVIS does not clamp the temperature of BLIP-2."""
    ours, theirs = blip2_pair()
    for model in (ours, theirs):
        model.temp.data.fill_(temperature)
    compare(ours, theirs, mini_batch(toy_train, range(SIZE)))


@pytest.mark.strict_smoke
@pytest.mark.parametrize("family", ["blip", "blip2"])
def test_negatives_are_drawn_by_the_weights_of_lavis(
    toy_train, process_group, tmp_path, monkeypatch, family
):
    """At a low temperature, where the own pair has nearly all of the softmax."""
    negatives = {"negatives": "sampled_blip"}
    ours, theirs = (
        blip2_pair(**negatives)
        if family == "blip2"
        else blip_pair(tmp_path, monkeypatch, **negatives)
    )
    weights = []

    def recorded(draw):
        def drawn(given, *count):
            weights.append(given / given.sum(dim=-1, keepdim=True))
            return draw(given, *count)

        return drawn

    monkeypatch.setattr(torch, "multinomial", recorded(torch.multinomial))
    monkeypatch.setattr(pickers, "one_of", recorded(pickers.one_of))
    batch = {**mini_batch(toy_train, range(SIZE)), **LATE}
    for model in (ours, theirs):
        model.temp.data.fill_(0.01)
        model(dict(batch))
    i2t, t2i, *of_lavis = weights
    assert torch.allclose(torch.cat([t2i, i2t]), torch.stack(of_lavis), atol=1e-5)
    assert (torch.cat([t2i, i2t]).max(dim=1).values < 0.9).any()


@pytest.mark.strict_smoke
def test_blip_with_momentum_is_lavis_blip_pretrain(
    toy_train, hardest_negatives, tmp_path, monkeypatch
):
    ours, theirs = blip_pair(tmp_path, monkeypatch)
    for first in (0, SIZE):
        batch = mini_batch(toy_train, range(first, first + SIZE))
        compare(ours, theirs, {**batch, **LATE})
        ours.zero_grad(), theirs.zero_grad()
        assert_same_queue(ours, theirs)
    assert_same_copies(ours, theirs)


def mask_every_third(ids, special):
    """A deterministic mask, because the two implementations draw in different orders."""
    position = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    hidden = (position % 3 == 1) & ~torch.isin(ids, torch.tensor(special))
    return torch.where(hidden, 4, ids), torch.where(hidden, ids, -100)


@pytest.mark.strict_smoke
def test_albef_with_momentum_is_lavis_albef_pretrain(toy_train, hardest_negatives, monkeypatch):
    """Queue, momentum distillation of ITC and MLM, the ramp of its weight, sampled negatives
    (ALBEF 3).
    """
    settings = {**MOMENTUM, "same_image": "negative", "negatives": "sampled"}
    torch.manual_seed(0)
    cfg = tiny_config(AlbefMafa, mafa=settings, queue_size=5 * SIZE)
    ours, parts = AlbefMafa.from_config(cfg), AlbefMafa.from_config(cfg)
    monkeypatch.setattr(AlbefPretrain, "init_tokenizer", lambda self: ours.tokenizer)
    # LAVIS uses this name, which NumPy 2 has removed
    monkeypatch.setattr(np, "Inf", np.inf, raising=False)
    theirs = AlbefPretrain(
        parts.visual_encoder,
        parts.text_encoder,
        queue_size=5 * SIZE,
        embed_dim=64,
        max_txt_len=ours.max_txt_len,
    )
    assert ours.state_dict().keys() - theirs.state_dict().keys() == {"idx_queue"}
    perturb_copies(ours)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    for model in (ours, theirs):  # no dropout, because its draws depend on the padding
        model.eval()
    special = (ours.tokenizer.cls_token_id, ours.tokenizer.pad_token_id)
    monkeypatch.setattr(
        "lavis_mafa.families.albef_driver.mask_tokens",
        lambda ids, *args, **kwargs: mask_every_third(ids, special),
    )
    monkeypatch.setattr(theirs, "mask", lambda ids, *args, **kwargs: mask_every_third(ids, special))
    for step, first in enumerate((0, SIZE)):
        batch = mini_batch(toy_train, range(first, first + SIZE))
        at = {**LATE, "epoch": step}
        compare(ours, theirs, {**batch, **at}, at)
        ours.zero_grad(), theirs.zero_grad()
        assert_same_queue(ours, theirs)
    assert_same_copies(ours, theirs)


@pytest.mark.parametrize("family", [AlbefMafa, BlipMafa])
def test_momentum_distillation_without_a_queue(toy_train, family):
    """MDNQ (MAFA Table 17): the candidates are the mini-batch's momentum features."""
    torch.manual_seed(0)
    mafa = {"soft_labels": {"type": "momentum"}, "same_image": "negative"}
    model = family.from_config(tiny_config(family, mafa=mafa, queue_size=0, alpha=0.4)).eval()
    perturb_copies(model)
    batch = {**mini_batch(toy_train, range(SIZE), epoch=5), "num_iters_per_epoch": 10}
    loss = model(batch).loss_itc
    momentum = model.momentum_encoders
    copies = {n: p.clone() for n, p in model.named_parameters() if "_m." in n}
    momentum.rate = 1.0  # the copies were already updated in the step
    images, texts = momentum.encode(batch)
    assert all(torch.equal(copies[n], p) for n, p in model.named_parameters() if n in copies)
    own_i = model.backbone.encode_images(batch["image"]).features
    own_t = model.backbone.encode_texts(batch["text_input"]).features
    expected = []
    for b in range(SIZE):
        for mine, copy, all_others in (
            (own_i[b], images.features[b], texts.features),
            (own_t[b], texts.features[b], images.features),
        ):
            soft = torch.softmax(all_others @ copy / model.temp, 0)
            target = 0.6 * torch.eye(SIZE)[b] + 0.4 * soft
            expected.append(-(target * torch.log_softmax(all_others @ mine / model.temp, 0)).sum())
    assert loss.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)


def test_queue_accepts_any_batch_size(toy_train):
    """LAVIS asserts that the queue size is a multiple of the mini-batch size."""
    cfg = tiny_config(BlipMafa, mafa={"soft_labels": {"type": "momentum"}}, queue_size=13)
    model = BlipMafa.from_config(cfg)
    before = model.image_queue.clone()
    model(mini_batch(toy_train, range(10), epoch=0))
    assert int(model.queue_ptr) == 10
    assert torch.equal(model.image_queue[:, 10:], before[:, 10:])
    model(mini_batch(toy_train, range(20, 30)))
    assert int(model.queue_ptr) == 7
    assert not (model.image_queue == before).all(dim=0).any()
    norms = model.image_queue.norm(dim=0)
    assert torch.allclose(norms, torch.ones(13), atol=1e-5)
    model(mini_batch(toy_train, range(20)))  # more samples than the queue holds
    assert torch.isfinite(model.text_queue).all()


class LavisRetrieval(AlbefRetrieval):
    """LAVIS's class with a tokenizer that needs no download."""

    def init_tokenizer(self):
        return build_tokenizer("tiny_vocab.txt")


@pytest.mark.strict_smoke
def test_retrieval_fine_tuning_is_lavis_albef_retrieval(toy_train, hardest_negatives):
    """As a setting of the step: momentum queue with image ids, no distillation, no MLM (MAFA F)."""
    settings = {**MOMENTUM, "negatives": "sampled", "loss_weights": {"lm": 0.0}}
    torch.manual_seed(0)
    cfg = tiny_config(AlbefMafa, mafa=settings, queue_size=5 * SIZE, alpha=0.0)
    ours, parts = AlbefMafa.from_config(cfg).eval(), AlbefMafa.from_config(cfg)
    theirs = LavisRetrieval(
        parts.visual_encoder,
        XBertEncoder(config=parts.text_encoder.config, add_pooling_layer=False),
        queue_size=5 * SIZE,
        embed_dim=64,
        max_txt_len=ours.max_txt_len,
        use_distill=True,  # LAVIS's class cannot train without it
        alpha=0.0,
    ).eval()
    names = {name: name.replace(".bert.", ".") for name in ours.state_dict()}
    perturb_copies(ours)
    state = {names[name]: value for name, value in ours.state_dict().items()}
    losses_with = theirs.load_state_dict(state, strict=False)
    assert not losses_with.missing_keys and all(
        ".cls." in name for name in losses_with.unexpected_keys
    )
    # Captions of the same image, within a mini-batch and in the queue.
    for images in ([1, 1, 2, 3, 4, 5, 6, 6], [6, 7, 8, 8, 9, 1, 2, 10]):
        batch = mini_batch(toy_train, range(images[0], images[0] + SIZE))
        batch["image_id"] = torch.tensor(images)
        mine = ours({**batch, "epoch": 1})
        mine.loss.backward()
        other = theirs({**batch, **LATE})
        other.loss.backward()
        for name in ("loss_itc", "loss_itm"):
            assert mine[name].item() == pytest.approx(other[name].item(), rel=1e-5), name
        assert_same_gradients(ours, theirs, names.get)
        assert torch.equal(ours.idx_queue, theirs.idx_queue)
        ours.zero_grad(), theirs.zero_grad()
