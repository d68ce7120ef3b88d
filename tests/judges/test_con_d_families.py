"""A model of any family as Con-D of any other: verdicts, views, shared encoders, errors."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from conftest import mini_batch, tiny_config
from omegaconf import OmegaConf
from PIL import Image

from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.algorithm.discriminator import VIEW
from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.checkpoints.checkpoints import vocabulary_of
from lavis_mafa.data import TrainingSet
from lavis_mafa.families import AlbefMafa, Blip2Mafa, BlipMafa
from lavis_mafa.judges.build import build_discriminator
from lavis_mafa.judges.discriminators import ModelDiscriminator

FAMILIES = {"albef_mafa": AlbefMafa, "blip_mafa": BlipMafa, "blip2_mafa": Blip2Mafa}
PAIRS = torch.tensor([0, 3, 3, 1]), torch.tensor([1, 2, 2, 0])


@pytest.fixture
def samples(toy_train):
    return mini_batch(toy_train, range(6))


def config_of(family, **changes):
    return tiny_config(FAMILIES[family], **changes)


def build(family, **changes):
    torch.manual_seed(11)
    return FAMILIES[family].from_config(config_of(family, **changes))


def save_checkpoint(model, path, cfg, **content):
    config = {"model": OmegaConf.to_container(cfg)}
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    state = {name: value for name, value in model.state_dict().items() if name not in frozen}
    vocabulary = vocabulary_of(model.tokenizer)
    torch.save({"model": state, "config": config, "vocabulary": vocabulary, **content}, path)
    return str(path)


@pytest.mark.parametrize(("family", "judge"), product(FAMILIES, FAMILIES))
def test_any_family_can_judge_for_any_other(samples, family, judge):
    model, other = build(family), build(judge)
    expected = copy.deepcopy(other).eval()
    con_d = ModelDiscriminator(other)
    verdicts = con_d.judge(samples, *PAIRS)
    backbone = expected.backbone
    images = backbone.encode_images(samples["image"])
    texts = backbone.encode_texts(samples["text_input"])
    logits = backbone.match(images, texts, *PAIRS)
    assert (
        torch.allclose(verdicts, logits.softmax(1)[:, 1], atol=1e-6) and verdicts[1] == verdicts[2]
    )
    settings = StepSettings(connections=MiningRule(low=0.0, high=0.0))
    output = run_step(model.backbone, samples, settings, con_d)
    output.loss.backward()
    assert (output.counts[:, 2] == 6).all(), "all probabilities are above 0"
    assert all(weight.grad is None for weight in other.parameters())


@pytest.mark.parametrize("name", ["blip_image_text_matching", "blip2_image_text_matching"])
def test_verdicts_equal_lavis_matching_models(samples, name):
    """LAVIS's own ``forward(match_head="itm")``, one pair at a time because Blip2ITM does not
    pad.
    """
    from lavis.models.blip2_models.blip2_image_text_matching import Blip2ITM
    from lavis.models.blip_models.blip_image_text_matching import BlipITM

    ours = build("blip_mafa" if name == "blip_image_text_matching" else "blip2_mafa").eval()
    lavis = BlipITM if name == "blip_image_text_matching" else Blip2ITM
    verdicts = ModelDiscriminator(copy.deepcopy(ours)).judge(samples, *PAIRS)
    for row, (i, j) in enumerate(zip(*PAIRS, strict=True)):
        pair = {"image": samples["image"][i : i + 1], "text_input": [samples["text_input"][j]]}
        with torch.no_grad():
            logits = lavis.forward(ours, pair, match_head="itm")
        assert verdicts[row].item() == pytest.approx(logits.softmax(1)[0, 1].item(), abs=1e-5)


# A frozen image encoder shared by the model and Con-D


def frozen_pair(tmp_path, **changes):
    """Return a blip2 with a frozen image encoder from a file; its Con-D was trained from the
    same file.
    """
    torch.save({"model": build("blip2_mafa").state_dict()}, tmp_path / "vit.pth")
    cfg = config_of("blip2_mafa", freeze_vit=True, vit_weights=str(tmp_path / "vit.pth"))
    torch.manual_seed(5)
    trained = Blip2Mafa.from_config(cfg)
    checkpoint = save_checkpoint(trained, tmp_path / "con_d.pth", cfg)
    state = torch.load(checkpoint, weights_only=True)["model"]
    assert not any("visual_encoder" in k for k in state)
    con_d = {"arch": "blip2_mafa", "model_type": "tiny", "checkpoint": checkpoint, **changes}
    torch.manual_seed(6)
    return Blip2Mafa.from_config(OmegaConf.merge(cfg, {"mafa": {"con_d": con_d}}))


def count_encoded_images(encoder, monkeypatch):
    runs = []
    forward = encoder.forward
    monkeypatch.setattr(encoder, "forward", lambda x: (runs.append(len(x)), forward(x))[1])
    return runs


def test_shared_frozen_encoder_runs_once(tmp_path, samples, monkeypatch):
    model = frozen_pair(tmp_path)
    assert model.con_d.shares_encoder
    assert model.con_d.model.visual_encoder is model.visual_encoder
    separate = copy.deepcopy(model.con_d.model)
    runs = count_encoded_images(model.visual_encoder, monkeypatch)
    output = model(samples)
    assert runs == [6]
    expected = ModelDiscriminator(separate).judge(samples, *PAIRS)
    verdicts = model.con_d.judge(
        samples, *PAIRS, seen=model.backbone.image_tokens(samples["image"])
    )
    assert torch.allclose(verdicts, expected, atol=1e-6)
    output.loss.backward()
    assert model.Qformer.bert.embeddings.word_embeddings.weight.grad is not None


def test_encoder_kept_in_bf16_can_be_shared(tmp_path, samples):
    model = frozen_pair(tmp_path)
    other = copy.deepcopy(model.con_d.model)
    other.visual_encoder = copy.deepcopy(model.visual_encoder)
    changed = copy.deepcopy(other)
    with torch.no_grad():
        changed.visual_encoder.blocks[1].mlp.fc1.bias[3] += 1e-4
    con_d = ModelDiscriminator(other, "bf16")
    assert other.visual_encoder.blocks[0].mlp.fc1.weight.dtype is torch.bfloat16
    assert con_d.share_encoder(model)
    assert con_d.model.visual_encoder is model.visual_encoder
    assert model.visual_encoder.blocks[0].mlp.fc1.weight.dtype is torch.float32
    assert not ModelDiscriminator(changed, "bf16").share_encoder(model)


@pytest.mark.parametrize("change", ["weights", "trained", "size", "precision", "family"])
def test_only_an_identical_frozen_encoder_is_shared(tmp_path, change):
    model = frozen_pair(tmp_path)
    other = copy.deepcopy(model.con_d.model)
    if change == "weights":
        other.visual_encoder = copy.deepcopy(other.visual_encoder)
        other.visual_encoder.blocks[1].mlp.fc1.bias.data[3] += 1e-4
    elif change == "trained":
        model.visual_encoder.requires_grad_(True)
    elif change == "size":
        other.visual_encoder.patch_embed.img_size = (64, 64)
    elif change == "precision":
        other.visual_encoder = copy.deepcopy(other.visual_encoder).half()
    else:
        other = build("blip_mafa")
    assert not ModelDiscriminator(other).share_encoder(model)


def test_shared_encoder_must_stay_frozen(tmp_path, samples):
    model = frozen_pair(tmp_path)
    model.visual_encoder.requires_grad_(True)
    with pytest.raises(RuntimeError, match="freeze_vit"):
        model(samples)


# Con-D's own view of the image


class CountedImages(torch.utils.data.Dataset):
    """Coloured images; counts how often one is read."""

    def __init__(self):
        self.reads = 0
        self.vis_processor = lambda picture: torch.full((3, 32, 32), 1.0)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.reads += 1
        picture = Image.new("RGB", (50, 40), (10 * index, 0, 0))
        return {"image": self.vis_processor(picture), "text_input": f"picture {index}"}


def test_image_is_decoded_once_for_both_views(tmp_path):
    larger = config_of("albef_mafa", image_size=64)
    path = save_checkpoint(AlbefMafa.from_config(larger), tmp_path / "con_d.pth", larger)
    con_d = build_discriminator({"arch": "albef_mafa", "model_type": "tiny", "checkpoint": path})
    model = build("blip2_mafa", mafa={"connections": {"low": 0.0, "high": 0.0}})
    assert con_d.image_size == 64 and con_d.wants_view(model)
    assert not ModelDiscriminator(build("blip_mafa")).wants_view(model)
    data = CountedImages()
    train_set = TrainingSet(data, seed=0)
    assert train_set.add_view(VIEW, con_d.processor)
    samples = train_set.collater([train_set[i, 0] for i in range(4)])
    assert data.reads == 4
    assert samples["image"].shape == (4, 3, 32, 32) and samples[VIEW].shape == (4, 3, 64, 64)
    expected = con_d.processor(Image.new("RGB", (50, 40), (20, 0, 0)))
    assert torch.equal(samples[VIEW][2], expected)
    verdicts = con_d.judge(samples, *PAIRS)
    resized = con_d.judge({**samples, VIEW: samples[VIEW] * 0.5}, *PAIRS)
    assert not torch.allclose(verdicts, resized), "Con-D must use its own view"
    model.con_d = con_d
    assert model(samples).judged_pairs > 0


def test_own_view_can_be_enabled_or_disabled(tmp_path):
    cfg = config_of("albef_mafa")
    path = save_checkpoint(AlbefMafa.from_config(cfg), tmp_path / "con_d.pth", cfg)
    con_d = {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": path}
    model = build("blip_mafa")
    assert not build_discriminator(con_d).wants_view(model)
    assert build_discriminator({**con_d, "own_view": True}).wants_view(model)
    assert not build_discriminator({**con_d, "own_view": False, "image_size": 64}).wants_view(model)


# Models that cannot judge


def test_model_without_itm_head_is_rejected():
    model = build("blip2_mafa")
    del model.itm_head
    with pytest.raises(TypeError, match="no ITM head"):
        ModelDiscriminator(model)
    model.itm_head = torch.nn.Linear(64, 2)
    del model.Qformer
    with pytest.raises(TypeError, match="no registered family"):
        backbone_of(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_error_lists_missing_weights(tmp_path, family):
    model = build(family)
    removed = ("itm_head.", "visual_encoder.", "text_encoder.", "Qformer.")
    state = {k: v for k, v in model.state_dict().items() if not k.startswith(removed)}
    torch.save({"model": state}, tmp_path / "c.pth")
    con_d = {"arch": family, "model_type": "tiny", "checkpoint": str(tmp_path / "c.pth")}
    with pytest.raises(ValueError, match="(?s)lacks .* weights.*itm_head: 2.*") as error:
        build_discriminator(con_d)
    text = "Qformer: " if family == "blip2_mafa" else "text_encoder: "
    assert "visual_encoder: " in str(error.value) and text in str(error.value)


def test_random_frozen_encoder_counts_as_missing(tmp_path):
    """Frozen weights are not saved in checkpoints, so the config must name their file."""
    cfg = config_of("blip2_mafa", freeze_vit=True)
    checkpoint = save_checkpoint(Blip2Mafa.from_config(cfg), tmp_path / "c.pth", cfg)
    con_d = {"arch": "blip2_mafa", "model_type": "tiny", "checkpoint": checkpoint}
    with pytest.raises(ValueError, match="(?s)lacks .*visual_encoder"):
        build_discriminator(con_d)
    vit = tmp_path / "vit.pth"
    torch.save({"model": build("blip2_mafa").state_dict()}, vit)
    assert build_discriminator({**con_d, "model": {"vit_weights": str(vit)}}) is not None


def test_other_vocabulary_is_rejected(tmp_path):
    words = (tmp_path / "vocab.txt").resolve()
    cfg = config_of("blip_mafa")
    model = BlipMafa.from_config(cfg)
    ordered = sorted(model.tokenizer.get_vocab(), key=model.tokenizer.get_vocab().get)[:-2]
    ordered[10], ordered[11] = ordered[11], ordered[10]  # the same number of words in another order
    words.write_text("\n".join(ordered) + "\n")
    path = save_checkpoint(model, tmp_path / "c.pth", cfg)
    con_d = {"arch": "blip_mafa", "model_type": "tiny", "checkpoint": path}
    assert build_discriminator(con_d) is not None
    with pytest.raises(ValueError, match="another vocabulary"):
        build_discriminator({**con_d, "model": {"tokenizer": str(words)}})
