"""python newest_transformers.py FOLDER: do exported folders load here and say what LAVIS said?

Needs torch, transformers and pillow alone. ``references.py`` wrote FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoProcessor, Blip2ForConditionalGeneration, Blip2ForImageTextRetrieval

CLOSE = 1e-4
PROCESSED_CLOSE = 0.05  # later image processors resize numbers, LAVIS's bytes: one step is 0.015


class Unequal(AssertionError):
    """An output is not LAVIS's."""


def load(model_cls, folder: Path):
    """The model in float32; every weight must have a place, and no place be left."""
    model, told = model_cls.from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if told[kind]:
            raise Unequal(f"{folder.name}: {kind} {told[kind]}")
    return model.eval().float()


def close(name: str, output: torch.Tensor, expected: np.ndarray, allowed: float = CLOSE) -> None:
    """Print the largest difference, and raise `Unequal` if it is too large."""
    if tuple(output.shape) != expected.shape:
        raise Unequal(f"{name}: shape {tuple(output.shape)} instead of {expected.shape}")
    difference = float((output - torch.from_numpy(expected)).abs().max())
    print(f"  {name}: largest difference {difference:.2g}")
    if not difference <= allowed:
        raise Unequal(f"{name} differs by {difference:.2g}, allowed is {allowed:g}")


def check_retrieval(folder: Path, told) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    model = load(Blip2ForImageTextRetrieval, folder)
    inputs = processor(
        text=told["captions"].tolist(),
        padding="max_length",
        truncation=True,
        max_length=int(told["length"]),
        return_tensors="pt",
    )
    if inputs["input_ids"].tolist() != told["ids"].tolist():
        raise Unequal(f"token ids {inputs['input_ids'].tolist()} not {told['ids'].tolist()}")
    pixels = torch.from_numpy(told["pixels"])
    with torch.no_grad():
        itc = model(pixel_values=pixels, **inputs)
        itm = model(pixel_values=pixels, **inputs, use_image_text_matching_head=True)
    close("ITC image features", itc.image_embeds, told["image"])
    close("ITC text features", itc.text_embeds, told["text"])
    close("ITC similarities", itc.logits_per_image, told["similarity"])
    close("ITM logits", itm.logits_per_image[:, 1], told["matched"])


def check_generation(folder: Path, told) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    model = load(Blip2ForConditionalGeneration, folder)
    pixels = torch.from_numpy(told["pixels"])
    pad = model.config.text_config.pad_token_id
    for number, prompt in enumerate(told["prompts"].tolist()):
        blank = [Image.new("RGB", (32, 32))] * len(pixels)
        inputs = processor(images=blank, text=[prompt] * len(pixels), return_tensors="pt")
        inputs["pixel_values"] = pixels
        for beams in (1, 5):
            output = model.generate(
                **inputs, num_beams=beams, max_new_tokens=int(told["length"]), do_sample=False
            )
            if model.config.use_decoder_only_language_model:
                output = output[:, inputs["input_ids"].shape[1] :]
            said = [[i for i in row if i != pad] for row in output.tolist()]
            expected = [[i for i in row if i != pad] for row in told[f"said_{number}_{beams}"]]
            if said != expected:
                raise Unequal(f"{prompt!r}, {beams} beams: {said} instead of {expected}")
            count = sum(map(len, said))
            print(f"  prompt {prompt!r}, beams {beams}: the same {count} tokens")


def check(folder: Path) -> None:
    """Compare all that ``references.py`` wrote to ``folder``.

    Raises:
        Unequal: at the first output that is not LAVIS's.
    """
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for name in ("stage1", "opt", "t5"):
        told = np.load(folder / f"{name}.npz", allow_pickle=False)
        exported = folder / f"hf_{name}"
        print(name)
        (check_retrieval if name == "stage1" else check_generation)(exported, told)
        processor = AutoProcessor.from_pretrained(exported)
        processed = processor(images=Image.fromarray(told["picture"]), return_tensors="pt")
        close("image", processed["pixel_values"][0], told["processed"], PROCESSED_CLOSE)


if __name__ == "__main__":
    try:
        check(Path(sys.argv[1]))
    except Unequal as error:
        sys.exit(f"not equal to LAVIS: {error}")
