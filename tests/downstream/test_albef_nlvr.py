"""ALBEF with two images: text assignment, NLVR2, and the checkpoints that both start from."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from albef_models import build, save, write_lavis_sizes, write_vocabulary
from conftest import mini_batch
from lavis.models.albef_models.albef_nlvr import AlbefNLVR
from same_gradients import assert_same_gradients, perturb_copies

from lavis_mafa.downstream import AlbefNlvrMafa, AlbefNlvrPretrainMafa
from lavis_mafa.downstream.albef_nlvr_mafa import _assign_texts
from lavis_mafa.families import AlbefMafa

INNER = "encoder.layer.{}.output.dense.weight"


def same_weights(state, other_state, prefix=""):
    keys = [key for key in state if key.startswith(prefix)]
    assert keys
    return all(torch.equal(state[key], other_state[key]) for key in keys)


@pytest.fixture
def pairs(toy_train):
    """A mini-batch of five statements about two images each."""
    images = mini_batch(toy_train, range(10))["image"]
    texts = ["both show a red circle", "neither is on black", "a", "the left is big", "on on"]
    return {
        "image0": images[:5],
        "image1": images[5:],
        "text_input": texts,
        "label": torch.tensor([0, 1, 1, 0, 1]),
        "epoch": 1,
        "iters": 3,
        "num_iters_per_epoch": 10,
    }


# Text assignment


def slow_logits(model, caption, images):
    """Return the logits ``(1, 3)`` of one caption and two images (3, H, W), layer by layer."""
    bert = model.text_encoder
    ids = model.tokenizer([caption], return_tensors="pt").input_ids
    hidden, visible = bert.embeddings(ids), torch.zeros(1, 1, 1, ids.shape[1])
    image_embeddings = [model.visual_encoder.forward_features(image[None]) for image in images]
    layers = iter(bert.encoder.layer)
    for _ in range(2):
        hidden = next(layers)(hidden, visible, mode="text")[0]
    for _ in range(2):
        for embeddings in image_embeddings:
            nothing_hidden = torch.zeros(1, 1, 1, embeddings.shape[1])
            hidden = next(layers)(
                hidden, visible, None, embeddings, nothing_hidden, mode="multimodal"
            )[0]
    assert next(layers, None) is None
    return model.ta_head(hidden[:, 0])


@pytest.mark.parametrize("negatives", ["similar", "random"])
def test_text_assignment_loss_equals_slow_loop(toy_train, negatives):
    model = build(AlbefNlvrPretrainMafa, ta_negatives=negatives)
    samples = mini_batch(toy_train, range(9))
    preference = None
    if negatives == "similar":
        first = [model.visual_encoder.forward_features(i[None])[:, 0] for i in samples["image"]]
        features = [
            F.normalize(model.vision_proj(embedding)[0].detach(), dim=0) for embedding in first
        ]
        preference = torch.tensor([[float(a @ b) / 0.07 for b in features] for a in features])
    torch.manual_seed(5)
    drawn = _assign_texts(samples["image_id"], preference)
    assert set(drawn.labels.tolist()) == {0, 1, 2}
    losses = []
    for b, caption in enumerate(samples["text_input"]):
        pair = [samples["image"][int(indices[b])] for indices in (drawn.first, drawn.second)]
        logits = slow_logits(model, caption, pair)[0]
        losses.append(-logits.log_softmax(0)[drawn.labels[b]].item())
    torch.manual_seed(5)
    output = model(samples)
    assert torch.equal(output["labels"], drawn.labels)
    assert output["loss"].item() == pytest.approx(sum(losses) / len(losses), rel=1e-4)


# NLVR2


def keys_and_values(model):
    layers = model.text_encoder.encoder.layer
    pairs = [(layers[n].crossattention.self, layers[n + 1].crossattention.self) for n in (2, 4)]
    return [(left.get_submodule(k), right.get_submodule(k)) for left, right in pairs
            for k in ("key", "value")]  # fmt: skip


@pytest.mark.parametrize("cls", [AlbefNlvrMafa, AlbefNlvrPretrainMafa])
def test_layers_of_a_pair_share_only_keys_and_values(cls, pairs, toy_train):
    model = build(cls)
    model(pairs if cls is AlbefNlvrMafa else mini_batch(toy_train, range(6)))["loss"].backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    for left, right in keys_and_values(model):
        assert left.weight is right.weight and left.bias is right.bias
    layers = model.text_encoder.encoder.layer
    for part in ("crossattention.self.query", "crossattention.output.dense", "output.dense"):
        left, right = (layers[n].get_submodule(part).weight for n in (2, 3))
        assert not torch.equal(left, right)


@pytest.fixture
def lavis_sizes(tmp_path, monkeypatch):
    """A narrow config with the numbers of layers that LAVIS's class assumes."""
    write_vocabulary(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = write_lavis_sizes(tmp_path / "med.json", hidden_size=32, intermediate_size=48)
    return {"med_config_path": path, "max_txt_len": 40}


def lavis_nlvr(lavis_sizes):
    """Build LAVIS's own class with distillation, because its training fails without it."""
    parts = build(AlbefNlvrMafa, seed=4, **lavis_sizes)
    return AlbefNLVR(parts.visual_encoder, parts.text_encoder, num_classes=2)


@pytest.mark.strict_smoke
def test_nlvr_model_equals_lavis_albef_nlvr(lavis_sizes, pairs):
    theirs = lavis_nlvr(lavis_sizes)
    ours = build(AlbefNlvrMafa, use_distill=True, **lavis_sizes)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    mine, expected = ours.predict(pairs), theirs.predict(pairs)
    assert torch.allclose(mine["predictions"], expected["predictions"], atol=1e-6)
    mine, expected = ours(pairs), theirs(pairs)
    assert float(mine["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    mine["loss"].backward(), expected["loss"].backward()
    assert_same_gradients(ours, theirs)
    with pytest.raises(TypeError):  # when LAVIS fixes this, compare it as well
        theirs.use_distill = False
        theirs(pairs)


def test_distillation_uses_the_momentum_text_encoder(lavis_sizes, pairs):
    theirs = lavis_nlvr(lavis_sizes)
    ours = build(AlbefNlvrMafa, use_distill=True, momentum=1.0, **lavis_sizes)
    perturb_copies(theirs, ours, by=0.3)
    theirs.momentum = 1.0
    teacher = build(AlbefNlvrMafa, **lavis_sizes)
    copies = {key: value for key, value in ours.state_dict().items() if "_m." in key}
    teacher.load_state_dict({key.replace("_m.", ".", 1): copies[key] for key in copies})
    soft_labels = teacher.predict(pairs)["predictions"].softmax(1)
    log_probabilities = ours.predict(pairs)["predictions"].log_softmax(1)
    weight = 0.4 * 13 / 20  # it grows to alpha over two epochs; 1.3 have passed
    truth = F.one_hot(pairs["label"], 2)
    expected = -((1 - weight) * truth + weight * soft_labels).mul(log_probabilities).sum(1).mean()
    assert float(ours(pairs)["loss"]) == pytest.approx(float(expected), rel=1e-5)
    # LAVIS's teacher is the text encoder that is being trained.
    assert float(theirs(pairs)["loss"]) != pytest.approx(float(expected), rel=1e-3)


# Checkpoints

TWO = [AlbefNlvrMafa, AlbefNlvrPretrainMafa]


@pytest.mark.parametrize("cls", TWO)
@pytest.mark.parametrize("form", ["bert", "plain"])
def test_model_starts_from_an_albef_for_one_image(tmp_path, tiny, cls, form):
    state = tiny.state_dict()
    if form == "plain":  # with the names of LAVIS's downstream models
        state = {key.replace("text_encoder.bert.", "text_encoder."): state[key] for key in state}
    torch.save({"model": state}, tmp_path / "one.pth")
    model = build(cls, load_pretrained=True, pretrained=str(tmp_path / "one.pth"))
    loaded, source = model.state_dict(), tiny.state_dict()
    for layer, source_layer in enumerate((0, 1, 2, 2, 3, 3)):
        expected = source["text_encoder.bert." + INNER.format(source_layer)]
        assert torch.equal(loaded["text_encoder." + INNER.format(layer)], expected), layer
    assert same_weights(
        {k: v for k, v in loaded.items() if k.startswith("visual_encoder.")}, source
    )
    words = "embeddings.word_embeddings.weight"
    assert torch.equal(loaded[f"text_encoder.{words}"], source[f"text_encoder.bert.{words}"])
    if cls is AlbefNlvrPretrainMafa:
        assert torch.equal(loaded["vision_proj.weight"], source["vision_proj.weight"])


def test_lavis_checkpoints_load(lavis_sizes, pairs, tmp_path):
    theirs = lavis_nlvr(lavis_sizes)
    path = save(theirs, tmp_path / "lavis.pt")
    for distil in (True, False):
        changes = {"load_finetuned": True, "finetuned": path, "use_distill": distil, **lavis_sizes}
        model = build(AlbefNlvrMafa, **changes)
        assert same_weights(model.state_dict(), theirs.state_dict())
        mine, expected = model.predict(pairs), theirs.predict(pairs)
        assert torch.allclose(mine["predictions"], expected["predictions"], atol=1e-6)
    # ALBEF's published text-assignment checkpoint uses the BERT names of pre-training models.
    state = {k.replace("encoder.", "encoder.bert.", 1) if k.startswith("text") else k: v
             for k, v in theirs.state_dict().items() if not k.startswith("cls_head")}  # fmt: skip
    torch.save({"model": {**state, "ta_head.weight": torch.ones(3, 32)}}, path)
    model = build(AlbefNlvrMafa, load_pretrained=True, pretrained=path, **lavis_sizes)
    assert same_weights(model.state_dict(), theirs.state_dict(), "text_encoder.")


@pytest.mark.parametrize("momentum", [False, True])
def test_momentum_copies_start_equal_to_the_encoders(tmp_path, momentum):
    mafa = {"soft_labels": {"type": "momentum"}} if momentum else {}
    before = build(AlbefMafa, mafa=mafa)
    with torch.no_grad():
        for name, value in before.named_parameters():
            if "_m." in name:
                value.zero_()
    path = save(before, tmp_path / "one.pth")
    model = build(AlbefNlvrMafa, load_pretrained=True, pretrained=path, use_distill=True)
    state = model.state_dict()
    copies = [key for key in state if "_m." in key]
    assert len(copies) > 50
    assert all(torch.equal(state[key], state[key.replace("_m.", ".", 1)]) for key in copies)
    # The copies of a fine-tuned checkpoint are kept.
    with torch.no_grad():
        model.cls_head_m[0].bias.fill_(7)
    path = save(model, tmp_path / "two.pth")
    reloaded = build(AlbefNlvrMafa, load_finetuned=True, finetuned=path, use_distill=True)
    assert same_weights(reloaded.state_dict(), state)
