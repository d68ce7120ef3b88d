"""ALBEF with two images: text assignment, NLVR2, and the checkpoints that both begin with."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import mini_batch
from lavis.models.albef_models.albef_nlvr import AlbefNLVR
from omegaconf import OmegaConf
from transformers import BertConfig

import lavis_mafa
from lavis_mafa.algorithm.losses.text_assignment import assign_texts
from lavis_mafa.io.checkpoints import CONFIGS, find_config
from lavis_mafa.models import AlbefMafa, AlbefNlvrMafa, AlbefNlvrPretrainMafa, BlipMafa

INNER = "encoder.layer.{}.output.dense.weight"


def config_of(cls, **changes):
    cfg = OmegaConf.load(cls.default_config_path("tiny")).model
    return OmegaConf.merge(cfg, changes)


def build(cls, seed=1, **changes):
    torch.manual_seed(seed)
    return cls.from_config(config_of(cls, **changes))


def saved(model, path, **more):
    torch.save({"model": model.state_dict(), **more}, path)
    return str(path)


def same(one, other, prefix=""):
    keys = [key for key in one if key.startswith(prefix)]
    assert keys
    return all(torch.equal(one[key], other[key]) for key in keys)


@pytest.fixture
def pairs(toy_train):
    """A mini-batch of five statements."""
    images = mini_batch(toy_train, range(10))["image"]
    texts = ["both show a red circle", "neither is on black", "a", "the left is big", "on on"]
    return {
        "image0": images[:5],
        "image1": images[5:],
        "text_input": texts,
        "label": torch.tensor([0, 1, 1, 0, 1]),
        **{"epoch": 1, "iters": 3, "num_iters_per_epoch": 10},
    }


# Text assignment


def judged_by_hand(model, caption, images):
    """Logits ``(1, 3)`` of one caption and two images (3, H, W), layer by layer."""
    bert = model.text_encoder
    ids = model.tokenizer([caption], return_tensors="pt").input_ids
    hidden, visible = bert.embeddings(ids), torch.zeros(1, 1, 1, ids.shape[1])
    seen = [model.visual_encoder.forward_features(image[None]) for image in images]
    layers = iter(bert.encoder.layer)
    for _ in range(2):
        hidden = next(layers)(hidden, visible, mode="text")[0]
    for _ in range(2):
        for one in seen:
            nothing_hidden = torch.zeros(1, 1, 1, one.shape[1])
            hidden = next(layers)(hidden, visible, None, one, nothing_hidden, mode="multimodal")[0]
    assert next(layers, None) is None
    return model.ta_head(hidden[:, 0])


@pytest.mark.parametrize("negatives", ["similar", "random"])
def test_the_loss_of_text_assignment_by_a_slow_loop(toy_train, negatives):
    model = build(AlbefNlvrPretrainMafa, ta_negatives=negatives)
    samples = mini_batch(toy_train, range(9))
    likeness = None
    if negatives == "similar":
        first = [model.visual_encoder.forward_features(i[None])[:, 0] for i in samples["image"]]
        features = [F.normalize(model.vision_proj(one)[0].detach(), dim=0) for one in first]
        likeness = torch.tensor([[float(a @ b) / 0.07 for b in features] for a in features])
    torch.manual_seed(5)
    drawn = assign_texts(samples["image_id"], likeness)
    assert set(drawn.labels.tolist()) == {0, 1, 2}
    losses = []
    for b, caption in enumerate(samples["text_input"]):
        pair = [samples["image"][int(place[b])] for place in (drawn.first, drawn.second)]
        told = judged_by_hand(model, caption, pair)[0]
        losses.append(-told.log_softmax(0)[drawn.labels[b]].item())
    torch.manual_seed(5)
    output = model(samples)
    assert torch.equal(output["labels"], drawn.labels)
    assert output["loss"].item() == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_all_that_learns_learns(toy_train):
    model = build(AlbefNlvrPretrainMafa)
    model(mini_batch(toy_train, range(8)))["loss"].backward()
    without = {name for name, value in model.named_parameters() if value.grad is None}
    assert without == {"vision_proj.weight", "vision_proj.bias"}


def test_captions_of_one_image_are_no_others(toy_train, monkeypatch):
    model, seen = build(AlbefNlvrPretrainMafa), []
    module = "lavis_mafa.models.downstream.albef_nlvr_mafa.assign_texts"
    monkeypatch.setattr(module, lambda ids, like: seen.append(ids) or assign_texts(ids, like))
    samples = mini_batch(toy_train, range(4))
    samples["image_id"] = torch.tensor([4, 4, 9, 4])
    model(samples)
    del samples["image_id"]
    model(samples)
    assert [ids.tolist() for ids in seen] == [[4, 4, 9, 4], [0, 1, 2, 3]]


def test_a_mini_batch_of_one(toy_train):
    with pytest.raises(ValueError, match="two different images in a mini-batch, got 1"):
        build(AlbefNlvrPretrainMafa)(mini_batch(toy_train, [3]))


def test_unknown_negatives():
    with pytest.raises(ValueError, match="ta_negatives is 'hard', expected similar or random"):
        build(AlbefNlvrPretrainMafa, ta_negatives="hard")


# NLVR2


def keys_and_values(model):
    layers = model.text_encoder.encoder.layer
    return [
        (
            getattr(layers[n].crossattention.self, name),
            getattr(layers[n + 1].crossattention.self, name),
        )
        for n in (2, 4)
        for name in ("key", "value")
    ]


@pytest.mark.parametrize("cls", [AlbefNlvrMafa, AlbefNlvrPretrainMafa])
def test_the_layers_of_a_pair_share_keys_and_values_only(cls, pairs, toy_train):
    model = build(cls)
    model(pairs if cls is AlbefNlvrMafa else mini_batch(toy_train, range(6)))["loss"].backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    for one, other in keys_and_values(model):
        assert one.weight is other.weight and one.bias is other.bias
    layers = model.text_encoder.encoder.layer
    for part in ("crossattention.self.query", "crossattention.output.dense", "output.dense"):
        one, other = (layers[n].get_submodule(part).weight for n in (2, 3))
        assert not torch.equal(one, other)


def test_left_and_right_are_told_apart(pairs):
    model = build(AlbefNlvrMafa)
    turned = {**pairs, "image0": pairs["image1"], "image1": pairs["image0"]}
    one, other = (model.predict(samples)["predictions"] for samples in (pairs, turned))
    assert not torch.allclose(one, other, atol=1e-3)
    assert torch.equal(model.predict(pairs)["targets"], pairs["label"])


@pytest.fixture
def like_lavis(tmp_path, monkeypatch):
    """A config with LAVIS's numbers of layers, which its class takes for granted, but narrow."""
    config = json.loads((CONFIGS / "models" / "med_config_tiny.json").read_text())
    config.update(num_hidden_layers=12, fusion_layer=6, hidden_size=32, intermediate_size=48)
    (tmp_path / "med.json").write_text(json.dumps(config))
    vocabulary = tmp_path / "bert-base-uncased" / "vocab.txt"  # LAVIS asks for it by this name
    vocabulary.parent.mkdir()
    shutil.copy(CONFIGS / "models" / "tiny_vocab.txt", vocabulary)
    monkeypatch.chdir(tmp_path)
    return {"med_config_path": str(tmp_path / "med.json"), "max_txt_len": 40}


def lavis_nlvr(like_lavis):
    """LAVIS's own class with distillation: without, its training fails."""
    torch.manual_seed(4)
    parts = AlbefNlvrMafa.from_config(config_of(AlbefNlvrMafa, **like_lavis))
    return AlbefNLVR(parts.visual_encoder, parts.text_encoder, num_classes=2)


@pytest.mark.strict_smoke
def test_it_is_lavis_s_albef_nlvr(like_lavis, pairs):
    theirs = lavis_nlvr(like_lavis)
    ours = build(AlbefNlvrMafa, use_distill=True, **like_lavis)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    mine, told = ours.predict(pairs), theirs.predict(pairs)
    assert torch.allclose(mine["predictions"], told["predictions"], atol=1e-6)
    mine, told = ours(pairs), theirs(pairs)
    assert float(mine["loss"]) == pytest.approx(float(told["loss"]), rel=1e-5)
    mine["loss"].backward(), told["loss"].backward()
    gradients = dict(theirs.named_parameters())
    compared = 0
    for name, value in ours.named_parameters():
        if value.grad is not None:
            assert torch.allclose(value.grad, gradients[name].grad, rtol=1e-3, atol=1e-6), name
            compared += 1
    assert compared > 100
    with pytest.raises(TypeError):  # the day it runs, compare it as well
        theirs.use_distill = False
        theirs(pairs)


def test_distillation_is_from_the_momentum_text_encoder(like_lavis, pairs):
    theirs = lavis_nlvr(like_lavis)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "_m." in name:
                value.add_(0.3 * torch.randn_like(value))
    ours = build(AlbefNlvrMafa, use_distill=True, momentum=1.0, **like_lavis)
    ours.load_state_dict(theirs.state_dict())
    theirs.momentum = 1.0
    teacher = build(AlbefNlvrMafa, **like_lavis)
    copies = {key: value for key, value in ours.state_dict().items() if "_m." in key}
    teacher.load_state_dict({key.replace("_m.", ".", 1): copies[key] for key in copies})
    taught = teacher.predict(pairs)["predictions"].softmax(1)
    told = ours.predict(pairs)["predictions"].log_softmax(1)
    weight = 0.4 * 13 / 20  # it grows to alpha over two epochs; 1.3 are done
    truth = F.one_hot(pairs["label"], 2)
    expected = -((1 - weight) * truth + weight * taught).mul(told).sum(1).mean()
    assert float(ours(pairs)["loss"]) == pytest.approx(float(expected), rel=1e-5)
    # LAVIS asks the text encoder that is being trained.
    assert float(theirs(pairs)["loss"]) != pytest.approx(float(expected), rel=1e-3)


def test_without_distillation_there_are_no_copies(pairs):
    model = build(AlbefNlvrMafa)
    assert not any("_m." in key for key in model.state_dict())
    output = model(pairs)
    expected = F.cross_entropy(model.predict(pairs)["predictions"], pairs["label"])
    assert float(output["loss"]) == pytest.approx(float(expected))
    output["loss"].backward()
    assert all(value.grad is not None for value in model.parameters())


# Checkpoints

TWO = [AlbefNlvrMafa, AlbefNlvrPretrainMafa]


@pytest.mark.parametrize("cls", TWO)
@pytest.mark.parametrize("form", ["bert", "plain"])
def test_it_begins_with_an_albef_for_one_image(tmp_path, tiny, cls, form):
    state = tiny.state_dict()
    if form == "plain":  # as LAVIS's models for downstream tasks name them
        state = {key.replace("text_encoder.bert.", "text_encoder."): state[key] for key in state}
    torch.save({"model": state}, tmp_path / "one.pth")
    model = build(cls, load_pretrained=True, pretrained=str(tmp_path / "one.pth"))
    loaded, one = model.state_dict(), tiny.state_dict()
    for layer, of_one in enumerate((0, 1, 2, 2, 3, 3)):
        expected = one["text_encoder.bert." + INNER.format(of_one)]
        assert torch.equal(loaded["text_encoder." + INNER.format(layer)], expected), layer
    assert same({k: v for k, v in loaded.items() if k.startswith("visual_encoder.")}, one)
    words = "embeddings.word_embeddings.weight"
    assert torch.equal(loaded[f"text_encoder.{words}"], one[f"text_encoder.bert.{words}"])
    if cls is AlbefNlvrPretrainMafa:
        assert torch.equal(loaded["vision_proj.weight"], one["vision_proj.weight"])


def test_nlvr_begins_with_text_assignment(tmp_path):
    before = build(AlbefNlvrPretrainMafa, seed=8)
    path = saved(before, tmp_path / "ta.pth")
    model = build(AlbefNlvrMafa, load_pretrained=True, pretrained=path)
    shared = {k: v for k, v in model.state_dict().items() if not k.startswith("cls_head.")}
    assert same(shared, before.state_dict())
    fresh = build(AlbefNlvrMafa)
    assert not same(fresh.state_dict(), before.state_dict(), "text_encoder.")


def test_lavis_s_own_checkpoints_load(like_lavis, pairs, tmp_path):
    theirs = lavis_nlvr(like_lavis)
    path = saved(theirs, tmp_path / "lavis.pt")
    for distil in (True, False):
        changes = {"load_finetuned": True, "finetuned": path, "use_distill": distil, **like_lavis}
        model = build(AlbefNlvrMafa, **changes)
        assert same(model.state_dict(), theirs.state_dict())
        mine, told = model.predict(pairs), theirs.predict(pairs)
        assert torch.allclose(mine["predictions"], told["predictions"], atol=1e-6)
    # ALBEF's published text assignment names BERT as pre-training models do.
    state = {k.replace("encoder.", "encoder.bert.", 1) if k.startswith("text") else k: v
             for k, v in theirs.state_dict().items() if not k.startswith("cls_head")}  # fmt: skip
    torch.save({"model": {**state, "ta_head.weight": torch.ones(3, 32)}}, path)
    model = build(AlbefNlvrMafa, load_pretrained=True, pretrained=path, **like_lavis)
    assert same(model.state_dict(), theirs.state_dict(), "text_encoder.")


@pytest.mark.parametrize("momentum", [False, True])
def test_momentum_copies_begin_as_the_encoders(tmp_path, momentum):
    mafa = {"soft_labels": {"type": "momentum"}} if momentum else {}
    before = build(AlbefMafa, mafa=mafa)
    with torch.no_grad():
        for name, value in before.named_parameters():
            if "_m." in name:
                value.zero_()
    path = saved(before, tmp_path / "one.pth")
    model = build(AlbefNlvrMafa, load_pretrained=True, pretrained=path, use_distill=True)
    state = model.state_dict()
    copies = [key for key in state if "_m." in key]
    assert len(copies) > 50
    assert all(torch.equal(state[key], state[key.replace("_m.", ".", 1)]) for key in copies)
    # A fine-tuned one's copies are its own.
    with torch.no_grad():
        model.cls_head_m[0].bias.fill_(7)
    path = saved(model, tmp_path / "two.pth")
    again = build(AlbefNlvrMafa, load_finetuned=True, finetuned=path, use_distill=True)
    assert same(again.state_dict(), state)


@pytest.mark.parametrize("cls", TWO)
def test_a_fine_tuned_model_must_be_whole(tmp_path, tiny, cls):
    head = {AlbefNlvrMafa: "cls_head", AlbefNlvrPretrainMafa: "ta_head"}[cls]
    other = build(next(one for one in TWO if one is not cls))
    for path in (saved(tiny, tmp_path / "one.pth"), saved(other, tmp_path / "other.pth")):
        with pytest.raises(ValueError, match=rf"lacks \d+ weights:(.|\n)*  {head}: "):
            build(cls, load_finetuned=True, finetuned=path)
    build(cls, load_pretrained=True, pretrained=saved(tiny, tmp_path / "one.pth"))
    begin = {"load_pretrained": True, "pretrained": saved(other, tmp_path / "other.pth")}
    if cls is AlbefNlvrPretrainMafa:  # the other knows no similarity
        with pytest.raises(ValueError, match="lacks 2 weights:\n  vision_proj: 2"):
            build(cls, **begin)
        begin["ta_negatives"] = "random"
    build(cls, **begin)


def test_what_is_no_checkpoint_for_it(tmp_path, tiny):
    def begin(state, **more):
        torch.save({"model": state, **more}, tmp_path / "c.pth")
        build(AlbefNlvrMafa, load_pretrained=True, pretrained=str(tmp_path / "c.pth"))

    state = tiny.state_dict()
    with pytest.raises(ValueError, match="has 3 layers .* expected 4.* or 6, of one for two"):
        begin({k: v for k, v in state.items() if ".layer.3." not in k})
    with pytest.raises(ValueError, match="lacks .* weights:\n  visual_encoder: "):
        begin({k: v for k, v in state.items() if not k.startswith("visual_encoder.")})
    with pytest.raises(ValueError, match="other sizes"):
        begin(build(AlbefMafa, vit={"patch_size": 8}).state_dict())
    config = {"model": {"arch": "blip_mafa"}}
    with pytest.raises(ValueError, match="another family than albef_nlvr_mafa"):
        begin(build(BlipMafa).state_dict(), config=config)
    with pytest.raises(ValueError, match="model.pretrained names no checkpoint"):
        build(AlbefNlvrMafa, load_pretrained=True)


def test_larger_images_than_the_checkpoint_s(tmp_path, tiny):
    path = saved(tiny, tmp_path / "one.pth")
    model = build(AlbefNlvrMafa, load_pretrained=True, pretrained=path, image_size=48)
    assert model.visual_encoder.pos_embed.shape == (1, 10, 64)
    assert torch.equal(model.visual_encoder.pos_embed[:, 0], tiny.visual_encoder.pos_embed[:, 0])


def test_they_are_loaded_by_name(tmp_path):
    model = lavis_mafa.load_model("albef_nlvr_mafa", "tiny")
    config = OmegaConf.to_container(config_of(AlbefNlvrMafa, num_classes=5))
    wide = build(AlbefNlvrMafa, num_classes=5)
    path = saved(wide, tmp_path / "five.pth", config={"model": config})
    again = lavis_mafa.load_model("albef_nlvr_mafa", checkpoint=path)
    assert again.cls_head[2].out_features == 5 and model.cls_head[2].out_features == 2
    assert same(again.state_dict(), wide.state_dict())
    assert lavis_mafa.load_model("albef_nlvr_pretrain_mafa", "tiny").ta_head.out_features == 3


@pytest.mark.parametrize("cls, kind", [(AlbefNlvrMafa, "nlvr"), (AlbefNlvrPretrainMafa, "base")])
def test_the_text_encoder_at_full_size(cls, kind):
    """Without allocating it."""
    cfg = OmegaConf.load(cls.default_config_path(kind)).model
    with torch.device("meta"):
        config = BertConfig.from_json_file(find_config(cfg.med_config_path))
        encoder = cls.language_parts(config)["text_encoder"]
    shapes = {name: tuple(value.shape) for name, value in encoder.state_dict().items()}
    assert shapes["embeddings.word_embeddings.weight"] == (30522, 768)
    assert shapes["encoder.layer.17.output.dense.weight"] == (768, 3072)
    crossing = [name for name in shapes if name.endswith("crossattention.self.query.weight")]
    assert crossing == [f"encoder.layer.{n}.crossattention.self.query.weight" for n in range(6, 18)]
