"""BLIP-2 stage 1 at full size with random weights: dry run, memory estimate and one step."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
import yaml
from conftest import ROOT

pytestmark = pytest.mark.slow
# All other settings are those of the shipped config.
CHANGES = {
    "model.model_type": "pretrain_vitL",
    "model.vit_weights": "null",
    "model.bert_weights": "null",
    "model.tokenizer": "tiny_vocab.txt",
    "model.mafa.con_d": "{arch: oracle}",
    "run.device": "cpu",
    "run.amp": False,
    "run.batch_size_train": 3,
    "run.num_workers": 0,
    "run.max_steps": 1,
    "run.job_id": "job",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Write the shipped config with the toy world's images at the config's image size."""
    folder = tmp_path_factory.mktemp("full")
    content = yaml.safe_load((ROOT / "projects/mafa/blip2_stage1.yaml").read_text())
    pictures = {"name": "blip2_image_train", "image_size": 224}
    content["datasets"] = {
        "toy_scenes": {
            "vis_processor": {"train": pictures, "eval": {**pictures, "name": "blip_image_eval"}},
            "build_info": {"train_size": 12, "val_size": 2, "test_size": 2},
        }
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder


def train(folder, *arguments):
    options = [f"{key}={value}" for key, value in CHANGES.items()]
    process = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--cfg-path", "config.yaml", *arguments]
        + ["--options", *options, "run.output_dir=out"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout + process.stderr


def test_dry_run_estimates_memory(config):
    output = train(config, "--dry-run")
    trained, frozen = re.search(
        r"model: ([\d.]+) M trainable and ([\d.]+) M frozen", output
    ).groups()
    assert 250 < float(frozen) < 280  # CLIP's ViT-L, 22 of its layers
    assert 150 < float(trained) < 200  # the Q-Former
    total = float(re.search(r"memory per rank, estimated: (\d+) MiB", output)[1])
    parts = [
        float(x)
        for x in re.findall(r"(?:weights|gradients|AdamW|frozen models|activations) (\d+)", output)
    ]
    assert total == pytest.approx(sum(parts), abs=3)
    assert total > 4 * (float(frozen) + 4 * float(trained)) * 1e6 / 2**20
    assert "RANDOM weights" in output


def test_one_training_step_is_saved(config):
    train(config)
    saved = torch.load(config / "out/job/checkpoint_last.pth", weights_only=True)
    assert saved["run"]["global_step"] == 1
    assert not any(name.startswith("visual_encoder.") for name in saved["model"])
    assert saved["model"]["Qformer.bert.encoder.layer.11.output.dense.weight"].shape == (768, 3072)
