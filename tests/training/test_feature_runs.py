"""Runs on features of images: the three families, Con-D, the analysis commands."""

from __future__ import annotations

import json

import numpy as np
import pytest
import timm
import torch
from lavis.common.registry import registry
from lavis.processors.base_processor import BaseProcessor
from PIL import Image
from runs import (
    INFO,
    OWN,
    ROOT,
    TINY,
    TOY,
    options,
    recording,
    records,
    resume_bit_for_bit,
    run_here,
    same_weights,
    weights,
)

from lavis_mafa import load_model
from lavis_mafa.cli import main
from lavis_mafa.data.feature_folder import FeatureFolder
from lavis_mafa.families.feature_encoder import Features
from lavis_mafa.settings import ConfigError, load_config

IMAGES, S, V = 40, 4, 6
EACH = ["albef", "blip", "blip2"]
CONFIGS = {"albef": OWN, "blip2": str(ROOT / "projects/mafa/train/blip2_own_data.yaml")}
COLOURS, THINGS = ("red", "blue", "green"), ("circle", "box", "line", "star")


def encode(picture):
    """The features (S, V) of a picture: the pixels of its four quarters, mixed."""
    pixels = np.asarray(picture, np.float32).reshape(2, 2, 2, 2, 3) / 255
    quarters = pixels.transpose(0, 2, 1, 3, 4).reshape(S, -1)
    mix = np.random.default_rng(1).normal(size=(quarters.shape[1], V)).astype(np.float32)
    return (quarters @ mix).astype(np.float16)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pictures with captions, and their features in one's own format."""
    folder, draw = tmp_path_factory.mktemp("features"), np.random.default_rng(0)
    features = []
    for k in range(IMAGES):
        picture = Image.fromarray(draw.integers(0, 255, (4, 4, 3), dtype=np.uint8))
        picture.save(folder / f"{k}.png")
        features.append(encode(picture))
    write_features(folder / "one_view", features)
    write_features(folder / "views", [[one, one[::-1]] for one in features])
    rows = [
        {"image": f"{k}.png", "caption": [f"a {c} {t} {k % n}" for n in (2, 5)]}
        for k in range(IMAGES)
        for c, t in [(draw.choice(COLOURS), draw.choice(THINGS))]
    ]
    for split, part in (("train", rows[:24]), ("val", rows[24:30]), ("test", rows[30:])):
        (folder / f"{split}.json").write_text(json.dumps(part))
    return folder


def write_features(folder, features):
    folder.mkdir(exist_ok=True)
    np.save(folder / "features.npy", np.array(features, np.float16))
    names = [f"{k}.png" for k in range(len(features))]
    (folder / "names.json").write_text(json.dumps(names))


def changes(data, family, features="one_view", **more):
    of_blip = {"model__arch": "blip_mafa"} if family == "blip" else {}
    splits = {
        f"{INFO}__annotations__{split}__storage": data / f"{split}.json"
        for split in ("train", "val", "test")
    }
    return {
        **TOY,
        **TINY,
        **splits,
        "model__image_encoder": "features",
        "model__tokenizer": None,
        "model__mafa__con_d__arch": None,
        f"{INFO}__features__storage": features and data / features,
        "run__max_epoch": 2,
        "run__valid_splits": '["val"]',
        "run__test_splits": '["test"]',
        **of_blip,
        **more,
    }


@registry.register_processor("features_on_the_fly")
class OnTheFly(BaseProcessor):
    def __call__(self, picture):
        return torch.from_numpy(encode(picture).astype(np.float32))


@pytest.mark.parametrize("family", EACH)
def test_run_equals_one_with_the_encoder_in_it(data, tmp_path, family):
    config = CONFIGS.get(family, OWN)
    with recording() as kept:
        run_here(tmp_path / "kept", config, **changes(data, family))
    processors = {
        f"datasets__image_text_json__vis_processor__{phase}": "{name: features_on_the_fly}"
        for phase in ("train", "eval")
    }
    pictures = {
        f"{INFO}__images__storage": data,
        f"{INFO}__features__storage": None,
        "model__feature_width": V,
    }
    with recording() as computed:
        run_here(
            tmp_path / "computed", config, **{**changes(data, family), **pictures, **processors}
        )
    assert len(kept) == 12 and kept == computed
    assert same_weights(weights(tmp_path / "kept"), weights(tmp_path / "computed"))
    figures = [records(tmp_path / name, "eval")[-1] for name in ("kept", "computed")]
    assert figures[0]["txt_r1"] == figures[1]["txt_r1"] and figures[0]["split"] == "test"


def test_features_of_the_frozen_encoder_of_blip2(data, tmp_path, capsys):
    """Losses are those of training on the pictures, but for float16, and are not those of another
    encoder; one with random weights, or of another family, is refused."""
    weights_of = tmp_path / "vit.pth"
    torch.manual_seed(3)
    model = load_model("blip2_mafa", "tiny")
    for weight in model.visual_encoder.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    torch.save(model.visual_encoder.state_dict(), weights_of)
    start = {key: value for key, value in model.state_dict().items() if "visual" not in key}
    torch.save({"model": start}, tmp_path / "start.pth")
    files = [str(data / f"{split}.json") for split in ("train", "val", "test")]
    command = ["features", *files, "--images", str(data), "--output"]
    name, own = "vit_tiny_patch16_224", tmp_path / "timm.pth"
    torch.save(timm.create_model(name, num_classes=0).state_dict(), own)
    for given, told in (
        ([name, "--weights", str(own), "--image-size", "384"], "Input height (384) doesn't match"),
        ([name, "--weights", str(own), "--device", "gpu"], "Expected one of cpu"),
        (["vit_small_patch16_224", "--weights", str(own)], "size mismatch for cls_token"),
        (["blip2_mafa:tiny"], "RANDOM weights"),
        (["blip2_mafa:huge"], "no type 'huge' of Blip2Mafa; known: pretrain"),
        (["albef_mafa"], "expected a model of timm"),
    ):
        with pytest.raises(SystemExit):
            main([*command, str(tmp_path / "none"), "--encoder", *given])
        assert told in capsys.readouterr().err
    out = tmp_path / "kept"
    own = ["--encoder", "blip2_mafa:tiny", "--weights", str(weights_of), "--views", "plain"]
    assert main([*command, str(out), *own]) == 0
    assert FeatureFolder(out).shape == (1, 5, 64) and len(FeatureFolder(out).names()) == 40

    def losses(name, **more):
        given = {**changes(data, "blip2"), "run__valid_splits": "[]", "run__test_splits": "[]"}
        given |= {"model__load_pretrained": True, "model__pretrained": tmp_path / "start.pth"}
        processor = {"datasets__image_text_json__vis_processor__train__name": "blip_image_eval"}
        with recording() as found:
            run_here(tmp_path / name, CONFIGS["blip2"], **{**given, **processor, **more})
        return [step["losses"]["loss"] for step in found]

    pictures = {
        f"{INFO}__images__storage": data,
        f"{INFO}__features__storage": None,
        "model__image_encoder": None,
        "model__vit_weights": weights_of,
        "model__freeze_vit": True,
    }
    kept = losses("features", **{f"{INFO}__features__storage": out})
    assert kept == pytest.approx(losses("pictures", **pictures), rel=2e-3)
    assert kept != pytest.approx(
        losses("random", **pictures | {"model__vit_weights": None}), rel=2e-3
    )


@pytest.mark.parametrize("family", EACH)
def test_resumed_run_is_equal_and_its_checkpoint_loads(data, tmp_path, family):
    """With two views, of which training draws one; in albef with momentum encoders and Con-D."""
    more = changes(data, family, "views", run__num_workers=1, run__valid_splits="[]")
    config = CONFIGS.get(family, OWN)
    if family == "albef":
        run_here(tmp_path / "judge", config, **more)
        more |= {
            "model__mafa__con_d__arch": "albef_mafa",
            "model__mafa__con_d__model_type": "tiny",
            "model__mafa__con_d__checkpoint": tmp_path / "judge/job/checkpoint_last.pth",
            "model__mafa__con_d__self_check": "skip",
            "model__mafa__soft_labels__type": "momentum",
            "model__queue_size": 24,
        }
    runner, whole, _ = resume_bit_for_bit(tmp_path, 8, config, **more)
    model = runner.unwrap_dist_model(runner.model)
    assert isinstance(model.visual_encoder, Features)
    if family == "albef":
        assert isinstance(model.con_d.model.visual_encoder, Features)
        assert model.momentum_encoders is not None and "visual_encoder_m.proj.weight" in whole
        assert sum(one["judged_pairs"] for one in records(tmp_path / "whole", "step")) > 0
    path = tmp_path / "whole/job/checkpoint_last.pth"
    loaded = load_model(f"{family}_mafa", checkpoint=str(path), is_eval=True)
    assert loaded.visual_encoder.num_features == V
    features = torch.randn(3, S, V)
    with torch.no_grad():
        mine, theirs = (one.backbone.encode_images(features) for one in (model.eval(), loaded))
    assert torch.equal(mine.features, theirs.features)
    with pytest.raises(ValueError, match=r"expects features \(B, S, 6\), got \(1, 3, 32, 32\)"):
        loaded.backbone.encode_images(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model__feature_width": 5}, "the features have width 6, expected 5"),
        ({"model__image_encoder": "vit"}, "model.image_encoder: is not features: a vit reads"),
        ({f"{INFO}__features__storage": "nowhere"}, "no such folder"),
        ({"model__image_encoder": "fetures"}, "fetures"),
    ],
)
def test_config_that_does_not_fit_the_features(data, tmp_path, more, message):
    with pytest.raises(ConfigError, match=message):
        load_config(OWN, options(tmp_path, **{**changes(data, "albef"), **more}))
