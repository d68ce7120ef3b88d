"""The losses in transformers' Trainer, as docs/with_open_clip.md prints them."""

from __future__ import annotations

import pytest
import torch
from test_pages import script_of
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel, TrainingArguments

from lavis_mafa import MiningRule, SoftLabels, StepSettings
from lavis_mafa.integrations.open_clip import ClipLoss, SigLipLoss

pytest.importorskip("accelerate")
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": 50, "max_position_embeddings": 16, "projection_size": 16}
TEXT |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
VISION = {**SIZES, "image_size": 16, "patch_size": 8}
PLAIN = {"detach_other": False, "soft_labels": SoftLabels("one_hot")}
MODELS = {
    "CLIP": lambda: CLIPModel(
        CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)
    ),
    "SigLIP": lambda: SiglipModel(SiglipConfig(text_config=TEXT, vision_config=VISION)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mines", [False, True])
def test_trainer(tmp_path, name, mines):
    torch.manual_seed(0)
    model = MODELS[name]()
    ids = torch.randint(2, 50, (24, 6))
    ids[:, -1] = 1
    rows = [
        {"pixel_values": pixels, "input_ids": row}
        for pixels, row in zip(torch.randn(24, 3, 16, 16), ids, strict=True)
    ]
    rule = MiningRule(score="similarity", rule="margin", top_k=0, action="drop")
    settings = StepSettings(**PLAIN, **({"connections": rule} if mines else {}))
    names = {"model": model, "settings": settings, "ClipLoss": ClipLoss, "SigLipLoss": SigLipLoss}
    exec(script_of("with_open_clip.md", 1), names)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=8, report_to=[], use_cpu=True
    )
    trainer = names["MinedTrainer"](model, arguments, train_dataset=rows)
    batch = torch.utils.data.default_collate(rows[:8])
    with torch.no_grad():
        found = trainer.compute_loss(model, batch)
        expected = model(**batch, return_loss=True).loss
    assert (float(found) == pytest.approx(float(expected), rel=1e-5)) != mines
    assert trainer.train().training_loss > 0
