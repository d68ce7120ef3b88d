"""Real photographs end to end: vocabulary, training, evaluation, loading into LAVIS."""

from __future__ import annotations

import json

import pytest
import torch
from omegaconf import OmegaConf
from runs import INFO, OWN, ROOT, TINY, TOY, put_small_lavis, records, run_here

from lavis_mafa.cli import main

EVALUATE = str(ROOT / "projects/mafa/eval/retrieval_own_data.yaml")
VIT = {"patch_size": 16, "width": 64, "depth": 3, "heads": 4}


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory, photographs):
    """A folder with a vocabulary and a part of the photographs' captions."""
    folder = tmp_path_factory.mktemp("own")
    pairs = json.loads((photographs / "train.json").read_text())
    (folder / "train.json").write_text(json.dumps(pairs[:200]))
    for split in ("val", "test"):
        images = json.loads((photographs / f"{split}.json").read_text())
        (folder / f"{split}.json").write_text(json.dumps(images[:20]))
    vocabulary = ["--vocab", str(folder / "vocab.txt"), "--vocab-size", "800"]
    given = ["--images", str(photographs), *vocabulary]
    assert main(["check-data", str(photographs / "train.json"), *given]) == 0
    return folder


def changes(data_folder, photographs, **more):
    """Return the options of a tiny model on the photographs, without keys of the toy world."""
    splits = {
        f"{INFO}__annotations__{split}__storage": data_folder / f"{split}.json"
        for split in ("train", "val", "test")
    }
    return {
        **TOY,
        **splits,
        f"{INFO}__images__storage": photographs,
        "model__mafa__con_d__arch": None,
        **TINY,
        "model__tokenizer": data_folder / "vocab.txt",
        "run__num_workers": 1,
        "run__batch_size_train": 16,
        "run__grit__queue_size": 96,
        "run__grit__search_space": 48,
        "run__max_epoch": 2,
        "run__valid_splits": '["val"]',
        "run__test_splits": '["test"]',
        **more,
    }


def test_train_and_evaluate(data_folder, photographs, tmp_path):
    settings = changes(data_folder, photographs)
    full = tmp_path / "whole"
    run_here(full, OWN, **settings)
    trained = records(full, "eval")[-1]
    assert trained["split"] == "test" and 0 <= trained["txt_r1"] <= trained["txt_r10"] <= 100

    best = full / "job" / "checkpoint_best.pth"
    for_training = ("num_workers", "batch", "grit", "max_epoch", "valid", "test_splits")
    kept = {
        key: value
        for key, value in settings.items()
        if not any(name in key for name in for_training) and "annotations__" not in key
    }
    evaluated = tmp_path / "told"
    run_here(
        evaluated,
        EVALUATE,
        **dict.fromkeys(("run__valid_splits", "run__test_splits")),
        **kept,
        **{f"{INFO}__annotations__test__storage": data_folder / "test.json"},
        model__finetuned=best,
        run__k_test=4,
        run__evaluate=True,
    )
    separate = records(evaluated, "eval")[-1]
    for key in ("txt_r1", "txt_r5", "img_r1", "img_r10"):
        assert separate[key] == trained[key]


@pytest.fixture(scope="module")
def small_albef(tmp_path_factory, data_folder):
    """A folder with the config of a narrow BERT; LAVIS's classes get a small image encoder."""
    folder = tmp_path_factory.mktemp("albef")
    with pytest.MonkeyPatch.context() as patch:
        # Depth as in ALBEF: LAVIS's loaders assume six text and six fusion layers.
        deep = {"num_hidden_layers": 12, "fusion_layer": 6}
        put_small_lavis(folder, patch, data_folder / "vocab.txt", **deep)
        yield folder


@pytest.fixture(scope="module")
def base_checkpoint(small_albef, data_folder):
    """A checkpoint of a small albef_mafa; return its model."""
    from lavis_mafa.families import AlbefMafa

    cfg = OmegaConf.load(AlbefMafa.default_config_path("base")).model
    cfg.update(
        load_pretrained=False,
        image_size=32,
        vit=VIT,
        med_config_path=str(small_albef / "med.json"),
        tokenizer=str(data_folder / "vocab.txt"),
    )
    torch.manual_seed(0)
    model = AlbefMafa.from_config(cfg)
    torch.save({"model": model.state_dict()}, small_albef / "checkpoint.pth")
    model.text_encoder.save_pretrained(small_albef / "bert-base-uncased", safe_serialization=False)
    return model


def build_downstream(name, small_albef, **more):
    """Build a downstream model of LAVIS with the weights of our checkpoint."""
    from lavis.common.registry import registry

    model_cls = registry.get_model_class(name)
    cfg = OmegaConf.load(
        model_cls.default_config_path(next(iter(model_cls.PRETRAINED_MODEL_CONFIG_DICT)))
    ).model
    cfg.update(
        image_size=32,
        med_config_path=str(small_albef / "med.json"),
        load_finetuned=False,
        load_pretrained=True,
        pretrained=str(small_albef / "checkpoint.pth"),
    )
    cfg.update(more)
    return model_cls.from_config(cfg)


def test_momentum_encoders_are_initialised_from_the_encoders(
    small_albef, base_checkpoint, monkeypatch
):
    from lavis_mafa.checkpoints.weight_loading import complete_lavis_loading

    monkeypatch.chdir(small_albef)
    key = "visual_encoder{}.blocks.0.attn.qkv.weight"
    model = build_downstream("albef_retrieval", small_albef, queue_size=64)
    assert not torch.equal(model.state_dict()[key.format("_m")], model.state_dict()[key.format("")])
    complete_lavis_loading(model, str(small_albef / "checkpoint.pth"))
    assert torch.equal(model.state_dict()[key.format("_m")], model.state_dict()[key.format("")])


def test_retrieval_model_can_be_con_d(small_albef, base_checkpoint, monkeypatch, toy_train):
    from conftest import mini_batch

    from lavis_mafa.judges.discriminators import ModelDiscriminator

    monkeypatch.chdir(small_albef)
    model = build_downstream("albef_retrieval", small_albef, queue_size=64)
    con_d = ModelDiscriminator(model)
    samples = mini_batch(toy_train, range(4))
    image_of, text_of = torch.tensor([0, 2]), torch.tensor([1, 3])
    verdicts = con_d.judge(samples, image_of, text_of)
    expected = ModelDiscriminator(base_checkpoint).judge(samples, image_of, text_of)
    assert torch.allclose(verdicts, expected, atol=1e-5)
    base_checkpoint.requires_grad_(True)
