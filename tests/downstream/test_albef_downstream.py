"""ALBEF's downstream models: LAVIS's losses, our checkpoints, ranked answers."""

from __future__ import annotations

import pytest
import torch
from albef_models import build, save, write_lavis_sizes, write_vocabulary
from lavis.models.albef_models.albef_classification import AlbefClassification
from lavis.models.albef_models.albef_vqa import AlbefVQA
from same_gradients import assert_same_gradients, perturb_copies

from lavis_mafa.downstream import AlbefNlvrMafa, AlbefVeMafa, AlbefVqaMafa
from lavis_mafa.families import AlbefMafa

ALL = (AlbefVeMafa, AlbefVqaMafa)
SCHEDULE = {"epoch": 1, "iters": 3, "num_iters_per_epoch": 10}


@pytest.fixture(autouse=True)
def local_tokenizer(tmp_path, monkeypatch):
    write_vocabulary(tmp_path)
    monkeypatch.chdir(tmp_path)


def questions(size=3):
    torch.manual_seed(1)
    return {
        "image": torch.randn(size, 3, 32, 32),
        "text_input": ["how many red circles?", "what is on white?", "is it big?"][:size],
        "answer": ["2", "two", "circle", "yes", "no", "big"],
        "weight": torch.tensor([0.6, 0.4, 1.0, 0.7, 0.2, 0.1]),
        "n_answers": torch.tensor([2, 1, 3]),
        **SCHEDULE,
    }


def sentences(size=4):
    torch.manual_seed(1)
    texts = ["a red circle", "big blue square on white", "cross", "two discs"]
    labels = torch.tensor([0, 2, 1, 2])
    images = torch.randn(size, 3, 32, 32)
    return {"image": images, "text_input": texts[:size], "label": labels[:size], **SCHEDULE}


def compare(ours, theirs, samples):
    """Compare losses, gradients and the state after a step."""
    mine, expected = ours(dict(samples)), theirs(dict(samples))
    mine.loss.backward(), expected.loss.backward()
    assert mine.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert_same_gradients(ours, theirs)
    for key, value in theirs.state_dict().items():
        assert torch.allclose(value.float(), ours.state_dict()[key].float(), atol=1e-5), key


# LAVIS's losses


@pytest.mark.parametrize("distilled", [True, False])
def test_vqa_loss_equals_lavis(distilled):
    ours = build(AlbefVqaMafa, use_distill=distilled)
    parts = build(AlbefVqaMafa)
    theirs = AlbefVQA(parts.visual_encoder, parts.text_encoder, parts.text_decoder, max_txt_len=48)
    theirs.load_state_dict(ours.state_dict(), strict=distilled)
    samples = questions()
    if distilled:
        perturb_copies(ours, theirs)
        compare(ours, theirs, samples)
    else:
        # LAVIS always distils, but at the first step distillation has weight 0.
        samples.update(epoch=0, iters=0)
        expected, mine = theirs(samples), ours(samples)
        expected.loss.backward(), mine.loss.backward()
        assert mine.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
        assert_same_gradients(ours, theirs)
        assert not any("_m." in name for name in ours.state_dict())


def slow_vqa_loss(model, samples, smoothing, sep_tokens):
    """Return the loss answer by answer and token by token; padding enters nowhere."""
    pad, number, total = model.tokenizer.sep_token_id, 0, 0.0
    teachers = (model.visual_encoder_m, model.text_encoder_m, model.text_decoder_m)
    students = (model.visual_encoder, model.text_encoder, model.text_decoder)
    for row, count in enumerate(samples["n_answers"].tolist()):
        question = model.tokenizer([samples["text_input"][row]], return_tensors="pt")
        states = [
            encoder.forward_automask(question, vision(samples["image"][row : row + 1]))
            for vision, encoder, _ in (students, teachers)
        ]
        for _ in range(count):
            ids = model.tokenizer(samples["answer"][number], return_tensors="pt").input_ids[0]
            ids = torch.cat([ids, torch.tensor([pad] * (sep_tokens - 1), dtype=torch.int64)])
            of_answer = 0.0
            for place in range(1, len(ids)):
                log_p, log_q = (
                    decoder(
                        ids[None, :place],
                        encoder_hidden_states=state.last_hidden_state,
                        encoder_attention_mask=question.attention_mask,
                        return_dict=True,
                    )
                    .logits[0, -1]
                    .log_softmax(-1)
                    for (_, _, decoder), state in zip((students, teachers), states, strict=True)
                )
                label = torch.full_like(log_p, smoothing / len(log_p))
                label[ids[place]] += 1 - smoothing
                target = (1 - model.alpha) * label + model.alpha * log_q.exp()
                of_answer = of_answer - (target * log_p).sum()
            total = total + samples["weight"][number] * of_answer
            number += 1
    return total / len(samples["n_answers"])


@pytest.mark.parametrize("smoothing, sep_tokens", [(0.0, 2), (0.0, 1), (0.1, 1), (0.3, 2)])
def test_vqa_loss_equals_a_slow_loop(smoothing, sep_tokens):
    """ALBEF's code: no smoothing and two [SEP]; LAVIS's: 0.1 and one."""
    model = build(AlbefVqaMafa, label_smoothing=smoothing, answer_sep_tokens=sep_tokens).double()
    model.eval()  # no dropout
    perturb_copies(model)
    model.momentum = 1.0  # the step's update would change the copies before they are used
    samples = questions()
    samples["image"] = samples["image"].double()
    with torch.no_grad():
        expected = slow_vqa_loss(model, samples, smoothing, sep_tokens).item()
        assert model(dict(samples)).loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("cls", "epochs", "weight"),
    [(AlbefVeMafa, None, 0.3), (AlbefVeMafa, 0, 1.0), (AlbefNlvrMafa, None, 0.15)]
    + [(AlbefNlvrMafa, 1, 0.3), (AlbefVqaMafa, 0.5, 0.6)],
)
def test_weight_of_distillation_grows_over_some_epochs(cls, epochs, weight):
    model = build(cls, **({} if epochs is None else {"ramp_epochs": epochs}))
    assert model._rampup_factor(0, 3, 10) == pytest.approx(weight)
    assert model._rampup_factor(2, 0, 10) == 1


@pytest.mark.parametrize("distilled", [True, False])
def test_entailment_loss_equals_lavis(distilled):
    ours = build(AlbefVeMafa, use_distill=distilled)
    parts = build(AlbefVeMafa)
    theirs = AlbefClassification(
        parts.visual_encoder, parts.text_encoder, num_classes=3, use_distill=distilled
    )
    theirs.load_state_dict(ours.state_dict())
    if distilled:
        perturb_copies(ours, theirs)
    compare(ours, theirs, sentences())
    predicted = ours.predict(sentences())
    assert predicted["predictions"].shape == (4, 3)


# Checkpoints


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("distilled", [True, False])
def test_fine_tuning_starts_from_our_checkpoint(cls, distilled):
    source = build(AlbefMafa)
    path = save(source, "pretrained.pth")
    loaded = build(cls, load_pretrained=True, pretrained=path, use_distill=distilled).state_dict()
    theirs = source.state_dict()
    for key, value in theirs.items():
        if key.startswith(("visual_encoder.", "text_encoder.bert.")):
            name = key.replace("bert.", "", 1)
            assert torch.equal(loaded[name], value), name
            momentum_name = name.replace("encoder.", "encoder_m.", 1)
            assert momentum_name not in loaded or torch.equal(loaded[momentum_name], value), (
                momentum_name
            )
    assert any("_m." in name for name in loaded) is distilled


def test_decoder_is_initialised_as_in_lavis(tmp_path):
    """Against LAVIS's own loader, which assumes six text and six fusion layers."""
    med = write_lavis_sizes(tmp_path / "med.json", vocab_size=177)
    source = build(AlbefMafa, med_config_path=med)
    state = source.state_dict()
    copies = {
        key.replace(f"{part}.", f"{part}_m.", 1): value
        for key, value in state.items()
        for part in ("visual_encoder", "text_encoder", "vision_proj", "text_proj")
        if key.startswith(f"{part}.")
    }
    torch.save({"model": {**state, **copies}}, "with.pth")
    parts = build(AlbefVqaMafa, med_config_path=med)
    theirs = AlbefVQA(parts.visual_encoder, parts.text_encoder, parts.text_decoder)
    theirs.load_from_pretrained("with.pth")
    for path in (save(source, "pretrained.pth"), "with.pth"):
        ours = build(AlbefVqaMafa, med_config_path=med, load_pretrained=True, pretrained=path)
        state = theirs.state_dict()
        assert state.keys() == ours.state_dict().keys()
        for key, value in ours.state_dict().items():
            assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("cls", ALL)
def test_fine_tuned_model_can_be_reloaded(cls):
    tuned = build(cls)
    path = save(tuned, "tuned.pth", config={"model": {"arch": "blip_mafa", "model_type": "tiny"}})
    torch.manual_seed(5)
    with pytest.raises(ValueError, match="of another family"):
        build(cls, load_finetuned=True, finetuned=path)
    path = save(tuned, "tuned.pth")
    reloaded = build(cls, load_finetuned=True, finetuned=path, use_distill=False).state_dict()
    assert all(torch.equal(value, tuned.state_dict()[key]) for key, value in reloaded.items())


@pytest.mark.parametrize("cls", [*ALL, AlbefNlvrMafa])
def test_unsuitable_checkpoints_are_rejected(cls):
    path = save(build(AlbefMafa), "pretrained.pth")
    wrong = "lacks (.|\n)*give this one as model.pretrained"
    if cls is AlbefNlvrMafa:  # its fusion is twice as deep
        wrong = "4 layers in the file, 6 in the model"
    with pytest.raises(ValueError, match=wrong):
        build(cls, load_finetuned=True, finetuned=path)
    with pytest.raises(ValueError, match="names no checkpoint to fine-tune"):
        build(cls, load_pretrained=True, pretrained=None)
    with pytest.raises(ValueError, match="model of other sizes"):
        wide = {"patch_size": 16, "width": 32, "depth": 3, "heads": 4}
        build(cls, load_pretrained=True, pretrained=path, vit=wide)
    state = {k: v for k, v in build(AlbefMafa).state_dict().items() if "blocks.1" not in k}
    torch.save({"model": state}, "part.pth")
    with pytest.raises(ValueError, match="lacks 12 weights:\n  visual_encoder: 12"):
        build(cls, load_pretrained=True, pretrained="part.pth")
    torch.save({"model": state, "config": {"model": {"arch": "blip_mafa"}}}, "blip.pth")
    with pytest.raises(ValueError, match="of another family"):
        build(cls, load_pretrained=True, pretrained="blip.pth")
    save(build(AlbefMafa), "words.pth", vocabulary="another")
    with pytest.raises(ValueError, match="trained with another vocabulary"):
        build(cls, load_pretrained=True, pretrained="words.pth")


# Answers


ANSWERS = ["yes", "no", "circle", "2", "red circle", "red", "big red circle on white"]


def slow_answer(model, samples, row):
    """Return the most probable answer: every answer separately, token by token."""
    images = model.visual_encoder(samples["image"][row : row + 1])
    question = model.tokenizer([samples["text_input"][row]], return_tensors="pt")
    states = model.text_encoder.forward_automask(question, images).last_hidden_state
    scores = []
    for answer in ANSWERS:
        ids = model.tokenizer(answer, return_tensors="pt").input_ids
        log_probability = 0.0
        for length in range(1, ids.shape[1]):
            logits = model.text_decoder(
                ids[:, :length],
                encoder_hidden_states=states,
                encoder_attention_mask=question.attention_mask,
                return_dict=True,
            ).logits
            log_probability += logits[0, -1].log_softmax(-1)[ids[0, length]].item()
        scores.append(log_probability)
    return ANSWERS[scores.index(max(scores))]


def train_on(samples):
    """Return a model overfitted to the samples, so that its answers differ."""
    model = build(AlbefVqaMafa, use_distill=False)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model(samples).loss.backward()
        optimizer.step()
    return model.eval()


def test_most_probable_answer_is_given(monkeypatch):
    samples = {
        **questions(),
        "answer": ["red circle", "big red circle on white", "no"],
        "weight": torch.ones(3),
        "n_answers": torch.ones(3, dtype=torch.int64),
    }
    model = train_on(samples)
    with torch.no_grad():
        expected = [slow_answer(model, samples, row) for row in range(3)]
    assert expected == samples["answer"]
    assert model.predict_answers(dict(samples), ANSWERS, inference_method="rank") == expected
    monkeypatch.setattr("lavis_mafa.downstream.albef_vqa_mafa._PAIRS_PER_PASS", 4)
    assert model.predict_answers(dict(samples), ANSWERS) == expected
    # With one candidate, the answer with the most probable first token.
    (first,) = {answer.split()[0] for answer in model.predict_answers(samples, ["no", "2"], 1)[2:]}
    assert first == "no"
    last_question = {"image": samples["image"][2:], "text_input": samples["text_input"][2]}
    assert model.predict_answers(last_question, ANSWERS) == ["no"]


def test_answering_does_not_change_the_model():
    """LAVIS's model updates the momentum encoders for every question that it answers."""
    model = build(AlbefVqaMafa).eval()
    perturb_copies(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    samples = questions()
    model.predict_answers(samples, ANSWERS)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("cls", ALL)
def test_momentum_copies_of_pre_training_are_kept(cls):
    """GRIT-VLP, supplement 4.2: fine-tuning with distillation continues with them."""
    mafa = {"soft_labels": {"type": "momentum"}}
    source = build(AlbefMafa, mafa=mafa)
    with torch.no_grad():
        for name, weight in source.named_parameters():
            if "_m." in name:
                weight.add_(0.5)
    path = save(source, "pretrained.pth")
    model = build(cls, load_pretrained=True, pretrained=path, use_distill=True)
    own = model.state_dict()
    for name, value in source.state_dict().items():
        if name.startswith(("visual_encoder_m.", "text_encoder_m.bert.")):
            assert torch.equal(own[name.replace("bert.", "", 1)], value), name
    copies = [name for name in own if "_m." in name]
    new = [name for name in copies if name.startswith("cls_head")]
    assert all(torch.equal(own[name], own[name.replace("_m.", ".", 1)]) for name in new)
    if cls is AlbefVqaMafa:
        name = "text_decoder_m.bert.encoder.layer.0.attention.self.query.weight"
        assert torch.allclose(own[name], own[name.replace("_m.", ".", 1)] + 0.5)
