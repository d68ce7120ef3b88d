"""Tiny exported models, and LAVIS's outputs for fixed inputs."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import lavis_mafa  # noqa: F401  before LAVIS, which lacks names of newer transformers

# isort: split
import numpy as np
import tiny_blip2
import torch
import torch.nn.functional as F

from lavis_mafa.checkpoints.hugging_face import _round_weights
from lavis_mafa.checkpoints.loading import build_model
from lavis_mafa.cli import main

CAPTIONS = ["a red ball on the big box", "two dogs", "the cat sits under a small blue box"]
LENGTH = 12
STAGE1, STAGE2 = "stage1", ("opt", "t5")


def make_checkpoints(folder: Path) -> None:
    """Write ``stage1.pth``, ``opt.pth`` and ``t5.pth`` to ``folder``, with what they need."""
    tiny_blip2.Tiny.folder = folder
    torch.manual_seed(0)
    tiny_blip2.make_vocabulary(folder)
    makers = {"opt": tiny_blip2.make_opt, "t5": tiny_blip2.make_t5}
    sizes = {"img_size": 32, "num_query_token": 8}
    model = tiny_blip2.TinyBlip2(**sizes)
    torch.save(model.visual_encoder.state_dict(), folder / "vit.pth")
    for part in (model.vision_proj, model.text_proj, model.itm_head):
        tiny_blip2.randomise(part)
    tiny_blip2.save_checkpoint(model, folder / "stage1.pth", arch="tiny_blip2")
    for name, model_cls in zip(
        STAGE2, (tiny_blip2.TinyBlip2Opt, tiny_blip2.TinyBlip2T5), strict=True
    ):
        language = {f"{name}_model": str(makers[name](folder / name))}
        model = model_cls(**sizes, **language)
        tiny_blip2.randomise(getattr(model, f"{name}_proj"), 0.5)
        arch = f"tiny_blip2_{name}"
        tiny_blip2.save_checkpoint(model, folder / f"{name}.pth", arch=arch, **language)


def language_options(checkpoint: Path) -> list[str]:
    """Return the options that name a checkpoint's language model: its own path is not followed."""
    name = checkpoint.stem
    return [f"{name}_model={checkpoint.parent / name}"] if name in STAGE2 else []


def lavis_model(checkpoint: Path):
    """Return a checkpoint's LAVIS model with all weights in float32."""
    model, _, _ = build_model(str(checkpoint), options=language_options(checkpoint))
    _round_weights(model, torch.float32)
    return model


def random_images(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def retrieval_outputs(model, pixels, captions) -> dict[str, torch.Tensor]:
    """Compute ITC features and similarities and ITM logits by LAVIS's own methods."""
    tokens = model.tokenizer(
        captions, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
    )
    with torch.no_grad():
        features, image_embeds = model.forward_image(pixels)
        image = F.normalize(model.vision_proj(features), dim=-1)
        text = F.normalize(model.text_proj(model.forward_text(tokens)), dim=-1)
        matched = model.compute_itm(image_embeds, tokens.input_ids, tokens.attention_mask)
    similarity = torch.einsum("iqd,td->iqt", image, text).amax(1)
    return {
        "ids": tokens.input_ids,
        "image": image,
        "text": text,
        "similarity": similarity,
        "matched": matched,
    }


def generated_tokens(model, pixels, prompt, **settings) -> torch.Tensor:
    """Return the new tokens of LAVIS's ``generate``, caught before its tokenizer decodes them."""
    tokenizer = getattr(model, "opt_tokenizer", None) or model.t5_tokenizer
    with mock.patch.object(type(tokenizer), "batch_decode", return_value=[]) as decode:
        if not hasattr(model, "opt_model"):
            model.generate({"image": pixels, "prompt": prompt}, **settings)
        else:
            # Blip2OPT repeats the queries for every beam, and later versions of generate do so too.
            generate, beams = model.opt_model.generate, settings.get("num_beams", 5)
            with mock.patch.object(
                model.opt_model,
                "generate",
                lambda query_embeds, **options: generate(
                    query_embeds=query_embeds[::beams], **options
                ),
            ):
                model.generate({"image": pixels, "prompt": prompt}, **settings)
    return decode.call_args.args[0]


def photograph() -> np.ndarray:
    """Make a photograph-like image ``(H, W, 3)`` of bytes: smooth, not square."""
    y, x = np.mgrid[0:53, 0:71]
    waves = [np.sin(x / 9 + 2 * c) + np.cos(y / 7 - c) for c in range(3)]
    return np.uint8(np.stack(waves, -1) * 60 + 127)


def write_folders(folder: Path) -> None:
    """Write the three checkpoints and export each, as ``hf_NAME``."""
    make_checkpoints(folder)
    for name in (STAGE1, *STAGE2):
        checkpoint = folder / f"{name}.pth"
        arguments = [str(checkpoint), str(folder / f"hf_{name}"), "--to", "hf"]
        if main(["export", *arguments, "--options", *language_options(checkpoint)]):
            raise SystemExit(f"{name} was not exported")
