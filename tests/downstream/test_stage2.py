"""Stage 2 of BLIP-2 under the runner: from stage 1, stopped and resumed, on several ranks."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf
from runs import ROOT, finish, records, run_here, same_weights, start, weights

from lavis_mafa.downstream.tiny_language_models import tiny_opt, tiny_t5
from lavis_mafa.settings import load_config

KEYS = {"blip2_opt_mafa": "opt_model", "blip2_t5_mafa": "t5_model"}
BOTH = list(KEYS)
CONFIG = ROOT / "tests/downstream/configs/train/blip2_stage2_toy.yaml"
NO_STEP = {f"run__grit__{key}": None for key in ("queue_size", "search_space", "start_epoch")}
NO_STEP |= {"model__mafa__con_d__arch": None, "run__k_test": None, "run__max_epoch": 2}


def write_config(folder, arch, **model):
    """Write the toy config of stage 2 with another model, on captions of `toy_scenes`."""
    config = OmegaConf.load(CONFIG)
    config.model = {"arch": arch, "model_type": "tiny", **model}
    config.datasets = {"toy_scenes": {"type": "dense"}}
    del config.run.plugins
    path = folder / f"{arch}.yaml"
    OmegaConf.save(config, path)
    return str(path)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Language models, a checkpoint of stage 1, and a config of stage 2 for each arch."""
    folder = tmp_path_factory.mktemp("stage_2")
    models = {"opt_model": tiny_opt(folder / "opt"), "t5_model": tiny_t5(folder / "t5")}
    stage_1 = ROOT / "projects/mafa/train/blip2_toy.yaml"
    run_here(
        folder / "stage_1", config=str(stage_1), model__mafa__con_d__arch=None, run__max_steps=4
    )
    stage_1 = str(folder / "stage_1" / "job" / "checkpoint_last.pth")
    configs = {
        arch: write_config(
            folder, arch, load_pretrained=True, pretrained=stage_1, **{key: str(models[key])}
        )
        for arch, key in KEYS.items()
    }
    return {"configs": configs, "stage_1": stage_1}


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    folders = {}
    for arch in BOTH:
        folders[arch] = tmp_path_factory.mktemp(arch)
        run_here(folders[arch], config=world["configs"][arch], **NO_STEP)
    return folders


def losses(folder):
    return [(r["epoch"], r["step"], r["loss"]) for r in records(folder, "step")]


@pytest.mark.parametrize("arch", BOTH)
def test_stage_2_trains_and_saves_trained_weights(world, undisturbed, arch):
    told = [r["loss"] for r in records(undisturbed[arch], "epoch")]
    assert len(losses(undisturbed[arch])) == 18 and told[1] < told[0]
    content = torch.load(undisturbed[arch] / "job" / "checkpoint_last.pth", weights_only=True)
    first = torch.load(world["stage_1"], weights_only=True)["model"]
    same = [torch.equal(v, first[n]) for n, v in content["model"].items() if n in first]
    assert len(same) > 20 and sum(same) < 5  # trained from there


@pytest.mark.parametrize("arch, stop", zip(BOTH, [5, 9], strict=True))
def test_stopped_and_resumed(world, undisturbed, tmp_path, arch, stop):
    config = world["configs"][arch]
    run_here(tmp_path, config=config, **NO_STEP, run__max_steps=stop)
    run_here(tmp_path, config=config, **NO_STEP, run__resume_ckpt_path="auto")
    assert same_weights(weights(tmp_path), weights(undisturbed[arch]))
    assert losses(tmp_path) == losses(undisturbed[arch])


@pytest.mark.parametrize("arch", BOTH)
def test_bf16_and_a_trained_image_encoder(world, tmp_path, arch):
    config = world["configs"][arch]
    changes = {**NO_STEP, "model__freeze_vit": False, "run__max_epoch": 1}
    run_here(tmp_path / "exact", config=config, **changes)
    run_here(tmp_path / "mixed", config=config, **changes, run__amp=True, run__amp_dtype="bf16")
    exact, mixed = ([loss for *_, loss in losses(tmp_path / name)] for name in ("exact", "mixed"))
    assert mixed == pytest.approx(exact, rel=0.05) and mixed != exact
    saved = weights(tmp_path / "exact")
    assert any(name.startswith("visual_encoder.") for name in saved)
    assert not any(name.startswith(KEYS[arch]) for name in saved)


@pytest.mark.slow
@pytest.mark.parametrize("arch", BOTH)
def test_two_processes_stopped_and_resumed(world, tmp_path, arch):
    changes = {**NO_STEP, "run__batch_size_train": 4, "model__freeze_vit": False, "ranks": 2}
    changes["config"] = world["configs"][arch]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    finish(start("train.py", whole, **changes))
    finish(start("train.py", cut, **changes, run__max_steps=5))
    finish(start("train.py", cut, **changes, run__resume_ckpt_path="auto"))
    assert same_weights(weights(whole), weights(cut))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("amp_dtype", ["fp16", "bf16"])
def test_mixed_precision_on_a_gpu(world, tmp_path, arch, amp_dtype):
    changes = {**NO_STEP, "run__device": "cuda", "run__max_epoch": 1}
    changes["config"] = world["configs"][arch]
    mixed = {"run__amp": True, "run__amp_dtype": amp_dtype, "model__vit_precision": "fp16"}
    if arch == "blip2_opt_mafa":
        changes["model__llm_precision"] = "fp32"
        mixed["model__llm_precision"] = amp_dtype
    exact = run_here(tmp_path / "exact", **changes)
    runner = run_here(tmp_path / "mixed", **{**changes, **mixed})
    told = [[loss for *_, loss in losses(tmp_path / name)] for name in ("exact", "mixed")]
    assert told[1] == pytest.approx(told[0], rel=0.1)
    batch = {"image": torch.rand(2, 3, 32, 32, device="cuda"), "text_input": ["a circle", "how?"]}
    for one in (exact, runner):
        model = one._model.eval()
        assert len(model.generate(batch)) == len(model.predict_answers(batch, prompt="{}?")) == 2


@pytest.mark.parametrize("arch", BOTH)
def test_every_published_type_makes_a_config(world, arch):
    from lavis.common.registry import registry

    for model_type in registry.get_model_class(arch).PRETRAINED_MODEL_CONFIG_DICT:
        if model_type == "tiny":
            continue
        changes = [f"model.model_type={model_type}", f"model.{KEYS[arch]}=some/model"]
        size = 364 if model_type.startswith("caption") else 224
        for part in ("train", "eval"):
            name = f"datasets.toy_scenes.vis_processor.{part}"
            changes += [f"{name}.name=blip_image_eval", f"{name}.image_size={size}"]
        cfg = load_config(world["configs"][arch], changes, machine=False)
        assert cfg.model_cfg.image_size == size
        assert "mafa" not in cfg.model_cfg and not cfg.run_cfg.grit.enabled
