"""Hard negatives picked by a frozen encoder, not by the model in training (GRIT-VLP, Table 1)."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from conftest import mini_batch
from test_con_d_families import FAMILIES, build, config_of, save_checkpoint

from lavis_mafa.algorithm.discriminator import ENCODER_TOKENS, ENCODER_VIEW
from lavis_mafa.algorithm.parts import build_parts
from lavis_mafa.algorithm.pickers import hardest
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.data import TrainingSet
from lavis_mafa.judges.build import _ModelNegativesEncoder, build_negatives_encoder
from lavis_mafa.settings import ConfigError, load_config
from lavis_mafa.training.loaders import add_tokens, add_views

# MLM + ITM with hard negatives, without ITC.
WITHOUT_ITC = {"itc": 0.0, "itm": 1.0, "lm": 1.0}
TRAIN = "model.mafa.negatives_encoder"


@pytest.fixture
def samples(toy_train):
    return mini_batch(toy_train, range(8))


def other(family):
    """Return a model with other weights than those of `build`."""
    torch.manual_seed(23)
    model = FAMILIES[family].from_config(config_of(family))
    with torch.no_grad():
        model.temp.fill_(0.2)
    return model


def similarities_one_by_one(model, samples):
    """Return ``(B, B)`` similarities of images (rows) and texts, pair by pair; BLIP-2's by the
    image's best query."""
    model = copy.deepcopy(model).eval()
    backbone, size = model.backbone, len(samples["text_input"])
    found = torch.zeros(size, size)
    with torch.no_grad():
        for image in range(size):
            features = backbone.encode_images(samples["image"][image : image + 1]).features[0]
            for text in range(size):
                caption = backbone.encode_texts([samples["text_input"][text]]).features[0]
                found[image, text] = (features @ caption).max()
    return found


def hardest_one_by_one(sim, ids):
    """Return each row's most similar column that shows another image; -1: there is none."""
    picked = []
    for row in range(len(sim)):
        allowed = [column for column in range(len(sim)) if ids[column] != ids[row]]
        picked.append(max(allowed, key=lambda column: sim[row, column]) if allowed else -1)
    return picked


@pytest.mark.parametrize(("family", "judge"), product(FAMILIES, FAMILIES))
def test_negatives_follow_the_frozen_encoder(samples, family, judge):
    model, frozen = build(family), other(judge)
    sim, ids = similarities_one_by_one(frozen, samples), samples["image_id"].tolist()
    encoder = _ModelNegativesEncoder(frozen)
    settings = StepSettings(loss_weights=WITHOUT_ITC)
    before = {name: value.clone() for name, value in frozen.state_dict().items()}
    output = run_step(model.backbone, samples, build_parts(settings, negatives_encoder=encoder))
    assert output.i2t.hard.tolist() == hardest_one_by_one(sim, ids)
    assert output.t2i.hard.tolist() == hardest_one_by_one(sim.t(), ids)
    own = run_step(model.backbone, samples, settings)
    assert not torch.equal(own.i2t.hard, output.i2t.hard), "the model would pick the same"
    assert set(output.losses) == {"itm", "lm"}
    output.loss.backward()
    assert any(weight.grad is not None for weight in model.parameters())
    assert all(weight.grad is None for weight in frozen.parameters())
    assert all(torch.equal(before[name], value) for name, value in frozen.state_dict().items())


@pytest.mark.parametrize("judge", FAMILIES)
def test_grit_groups_by_the_frozen_encoder(samples, judge):
    model, frozen = build("albef_mafa"), other(judge)
    backbone = frozen.eval().backbone
    with torch.no_grad():
        expected = backbone.grit_vectors(
            backbone.encode_images(samples["image"]), backbone.encode_texts(samples["text_input"])
        )
    encoder = _ModelNegativesEncoder(frozen)
    parts = build_parts(StepSettings(), negatives_encoder=encoder)
    output = run_step(model.backbone, samples, parts)
    torch.testing.assert_close(output.image_features, expected[0])
    torch.testing.assert_close(output.text_features, expected[1])


def test_pickers_get_the_temperature_of_the_frozen_encoder(samples, monkeypatch):
    """Otherwise FNE's cosines and ALBEF's softmax would be scaled wrongly."""
    model, frozen = build("albef_mafa"), other("albef_mafa")
    cosines = similarities_one_by_one(frozen, samples)
    encoder, seen = _ModelNegativesEncoder(frozen), {}
    parts = build_parts(StepSettings(negatives="posterior"), negatives_encoder=encoder)

    def prepare(sim_i2t, sim_t2i, positives, own, temperature, epoch):
        seen.update(i2t=sim_i2t * temperature, t2i=sim_t2i, temperature=temperature)
        return hardest, hardest

    monkeypatch.setattr(parts.picker, "prepare", prepare)
    run_step(model.backbone, samples, parts)
    assert float(seen["temperature"]) == pytest.approx(0.2)
    torch.testing.assert_close(seen["i2t"], cosines, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(seen["t2i"] * 0.2, cosines.t(), atol=1e-5, rtol=1e-4)


def encoder_of(model, path, **more):
    checkpoint = save_checkpoint(model, path, config_of("albef_mafa"))
    return {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": checkpoint, **more}


def test_a_model_with_a_frozen_encoder_saves_nothing_of_it(tmp_path):
    cfg = config_of("albef_mafa")
    plain = build("albef_mafa").state_dict()
    cfg.mafa = {"negatives_encoder": encoder_of(other("albef_mafa"), tmp_path / "itc.pth")}
    torch.manual_seed(11)
    model = FAMILIES["albef_mafa"].from_config(cfg)
    assert isinstance(model.negatives_encoder, _ModelNegativesEncoder)
    state = model.state_dict()
    assert state.keys() == plain.keys(), "something of the encoder would be saved"
    assert all(torch.equal(state[name], plain[name]) for name in plain), "other random weights"
    assert len(list(model.parameters())) == len(list(build("albef_mafa").parameters()))


@pytest.mark.parametrize("lost", ["vision_proj.", "text_proj."])
def test_a_checkpoint_without_features_of_itc_is_refused(tmp_path, lost):
    state = other("albef_mafa").state_dict()
    path = tmp_path / "itc.pth"
    torch.save({"model": {n: v for n, v in state.items() if not n.startswith(lost)}}, path)
    chosen = {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": str(path)}
    with pytest.raises(ValueError, match=f"(?s)lacks 2 weights:.*{lost[:-1]}: 2"):
        build_negatives_encoder(chosen)


def test_a_model_without_temperature_is_refused():
    model = other("blip_mafa")
    del model.temp
    with pytest.raises(TypeError, match="it has no temperature of ITC"):
        _ModelNegativesEncoder(model)


def test_views_and_tokens_of_the_frozen_encoder_are_loaded(toy, tmp_path):
    """Images of its own size, and captions by its own tokenizer."""
    model = build("blip_mafa")
    chosen = encoder_of(other("albef_mafa"), tmp_path / "itc.pth", image_size=64, own_view=True)
    encoder = build_negatives_encoder(chosen)

    class Pictures:
        """The toy world's pictures, through a processor."""

        def __init__(self):
            self.vis_processor = lambda picture: toy["train"][0]["image"]

        def __len__(self):
            return 4

        def __getitem__(self, index):
            picture, caption = toy["train"].show(index)
            shown = self.vis_processor(picture)
            return {"image": shown, "text_input": caption}

    train_set = TrainingSet(Pictures())
    add_views(train_set, model, [encoder])
    add_tokens(train_set, model, [encoder])
    batch = mini_batch(train_set, range(4))
    assert batch[ENCODER_VIEW].shape[-1] == 64
    found = encoder.compare(batch)
    ids = encoder.model.tokenizer(batch["text_input"][0]).input_ids
    assert batch[ENCODER_TOKENS].input_ids[0, : len(ids)].tolist() == ids
    batch.pop(ENCODER_TOKENS)
    torch.testing.assert_close(encoder.compare(batch).i2t, found.i2t)


# Configs


def problems(tmp_path, **encoder):
    given = [f"{TRAIN}.{key}={value}" for key, value in encoder.items()]
    with pytest.raises(ConfigError) as refused:
        load_config("projects/mafa/train/albef_toy.yaml", [*given, f"run.output_dir={tmp_path}"])
    return str(refused.value)


def test_config_without_weights_or_features_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"{TRAIN}.checkpoint: .* the projections of ITC"):
        build_negatives_encoder({"arch": "albef_mafa", "model_type": "tiny"})
    told = problems(tmp_path, arch="albef_mafa", model_type="tiny", checkpoint="nowhere.pth")
    assert "nowhere.pth" in told
    blip2 = tmp_path / "blip2.pth"
    save_checkpoint(other("blip2_mafa"), blip2, config_of("blip2_mafa"))
    with pytest.raises(ValueError, match="of another family"):
        build_negatives_encoder(
            {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": str(blip2)}
        )
