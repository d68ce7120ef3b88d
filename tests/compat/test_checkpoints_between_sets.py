"""A checkpoint that one set of packages wrote gives the same outputs in the others.

`written/SET_ARCH.pth` was trained for three steps and saved by the runner with that set. As a
script, ``python tests/compat/test_checkpoints_between_sets.py SET`` writes the files of a set with
the packages of its interpreter. They hold what the model gave there (``expected``), and neither
optimizer nor state of the run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from lavis_mafa import load_model

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = Path(__file__).parent / "written"
BERT = WRITTEN / "bert.json"
SETS = ("today", "modern", "strict")
# Key of the language model's sizes and further options, by arch. FNE's BERT is that of
# transformers, the others' are LAVIS's.
ARCHS = {
    "albef_mafa": ("albef_toy", "med_config_path", {}),
    "blip_mafa": ("blip_toy", "med_config_path", {}),
    "blip2_mafa": ("blip2_toy", "q_former_config", {"model.num_query_token": 2}),
    "fne_retrieval": ("fne_toy", "bert_config", {"model.memory_size": 8}),
}
OPTIONS = {
    "datasets.toy_scenes.build_info.train_size": 24,
    "datasets.toy_scenes.build_info.val_size": 6,
    "datasets.toy_scenes.build_info.test_size": 10,
    "run.max_steps": 3,
    "run.batch_size_train": 8,
    "run.warmup_steps": 1,
    "run.init_lr": 0.01,
    "run.valid_splits": "[]",
    "run.test_splits": "[]",
    "run.loggers": "[]",
    "model.vit.width": 8,
    "model.vit.depth": 1,
    "model.vit.heads": 2,
}
GRIT = {"run.grit.enabled": False, "model.embed_dim": 4}  # FNE has neither
STEP = {"index": torch.arange(3), "image_id": torch.arange(3), "epoch": 1, "grouped": True}
STEP |= {"iters": 3, "num_iters_per_epoch": 10}
CAPTIONS = ["a red circle above a big blue square", "two green triangles", "a small yellow star"]
# Rounding differs between versions of torch.
TOLERANCE = 1e-5


def path_of(name, arch):
    return WRITTEN / f"{name}_{arch}.pth"


def outputs(model):
    """Return similarities ``(3, 3)`` of images and texts, and if the model has them, ITM's
    probabilities ``(3,)`` and the language loss."""
    numbers = np.random.RandomState(0).standard_normal((3, 3, 32, 32))
    images, pairs = torch.from_numpy(numbers.astype(np.float32)), torch.arange(3)
    backbone = model.eval().backbone
    with torch.no_grad():
        seen, texts = backbone.encode_images(images), backbone.encode_texts(CAPTIONS)
        found = {"similarities": backbone.similarity(seen.features, texts.features)}
        if hasattr(model, "itm_head"):
            logits = backbone.match(seen, texts, pairs, pairs.flip(0))
            found["probabilities"] = logits.softmax(dim=1)[:, 1]
            torch.manual_seed(0)  # of masked words
            found["language"] = model({"image": images, "text_input": CAPTIONS, **STEP})["loss_lm"]
    return found


def load(path, arch):
    return load_model(arch, checkpoint=str(path), is_eval=True, model={ARCHS[arch][1]: str(BERT)})


def write(name, arch):
    """Train, and write the checkpoint with the outputs of its model."""
    from lavis_mafa.training.session import run

    config, sizes, more = ARCHS[arch]
    options = {**OPTIONS, **({} if arch == "fne_retrieval" else GRIT), **more}
    options[f"model.{sizes}"] = BERT
    with tempfile.TemporaryDirectory() as folder:
        options |= {"run.output_dir": folder, "run.job_id": "job"}
        given = [f"{key}={value}" for key, value in options.items()]
        run(str(ROOT / f"projects/mafa/train/{config}.yaml"), given)
        saved = Path(folder) / "job" / "checkpoint_last.pth"
        content = torch.load(saved, weights_only=True)
        expected = outputs(load(saved, arch))
    for key in ("optimizer", "scaler", "run"):
        content.pop(key, None)
    content["config"] = {"model": {**content["config"]["model"], sizes: BERT.name}}
    packages = f"torch {torch.__version__}, transformers {transformers.__version__}"
    torch.save({**content, "expected": expected, "packages": packages}, path_of(name, arch))


@pytest.mark.strict_smoke
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SETS)
def test_outputs_equal_the_set_that_wrote_the_checkpoint(name, arch):
    path = path_of(name, arch)
    expected = torch.load(path, weights_only=True)["expected"]
    found = outputs(load(path, arch))
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], atol=TOLERANCE, rtol=0)


if __name__ == "__main__":
    WRITTEN.mkdir(exist_ok=True)
    for one in ARCHS:
        write(sys.argv[1], one)
