"""Check that exported folders load in this environment and give LAVIS's outputs.

Usage: ``python newest_transformers.py FOLDER``. Needs only torch, transformers and pillow.
``references.py`` wrote FOLDER.
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
# later image processors resize floats, LAVIS resizes bytes: one step is 0.015
PROCESSED_CLOSE = 0.05


class NotEqualError(AssertionError):
    """An output differs from LAVIS's."""


def load(model_cls, folder: Path):
    """Load the model in float32, with no missing, unexpected or mismatched weights."""
    model, loading_info = model_cls.from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading_info[kind]:
            raise NotEqualError(f"{folder.name}: {kind} {loading_info[kind]}")
    return model.eval().float()


def check_close(
    name: str, output: torch.Tensor, expected: np.ndarray, allowed: float = CLOSE
) -> None:
    """Print the largest difference, and raise `NotEqualError` if it is too large."""
    if tuple(output.shape) != expected.shape:
        raise NotEqualError(f"{name}: shape {tuple(output.shape)} instead of {expected.shape}")
    difference = float((output - torch.from_numpy(expected)).abs().max())
    print(f"  {name}: largest difference {difference:.2g}")
    if not difference <= allowed:
        raise NotEqualError(f"{name} differs by {difference:.2g}, allowed is {allowed:g}")


def check_retrieval(folder: Path, expected) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    model = load(Blip2ForImageTextRetrieval, folder)
    inputs = processor(
        text=expected["captions"].tolist(),
        padding="max_length",
        truncation=True,
        max_length=int(expected["length"]),
        return_tensors="pt",
    )
    if inputs["input_ids"].tolist() != expected["ids"].tolist():
        raise NotEqualError(
            f"token ids {inputs['input_ids'].tolist()} not {expected['ids'].tolist()}"
        )
    pixels = torch.from_numpy(expected["pixels"])
    with torch.no_grad():
        itc = model(pixel_values=pixels, **inputs)
        itm = model(pixel_values=pixels, **inputs, use_image_text_matching_head=True)
    check_close("ITC image features", itc.image_embeds, expected["image"])
    check_close("ITC text features", itc.text_embeds, expected["text"])
    check_close("ITC similarities", itc.logits_per_image, expected["similarity"])
    check_close("ITM logits", itm.logits_per_image[:, 1], expected["matched"])


def check_generation(folder: Path, expected) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    model = load(Blip2ForConditionalGeneration, folder)
    pixels = torch.from_numpy(expected["pixels"])
    pad = model.config.text_config.pad_token_id
    for number, prompt in enumerate(expected["prompts"].tolist()):
        blank = [Image.new("RGB", (32, 32))] * len(pixels)
        inputs = processor(images=blank, text=[prompt] * len(pixels), return_tensors="pt")
        inputs["pixel_values"] = pixels
        for beams in (1, 5):
            output = model.generate(
                **inputs, num_beams=beams, max_new_tokens=int(expected["length"]), do_sample=False
            )
            if model.config.use_decoder_only_language_model:
                output = output[:, inputs["input_ids"].shape[1] :]
            tokens = [[i for i in row if i != pad] for row in output.tolist()]
            expected_tokens = [
                [i for i in row if i != pad] for row in expected[f"tokens_{number}_{beams}"]
            ]
            if tokens != expected_tokens:
                raise NotEqualError(
                    f"{prompt!r}, {beams} beams: {tokens} instead of {expected_tokens}"
                )
            count = sum(map(len, tokens))
            print(f"  prompt {prompt!r}, beams {beams}: the same {count} tokens")


def check(folder: Path) -> None:
    """Compare with every output that ``references.py`` wrote to ``folder``.

    Raises:
        NotEqualError: at the first output that differs from LAVIS's.
    """
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for name in ("stage1", "opt", "t5"):
        expected = np.load(folder / f"{name}.npz", allow_pickle=False)
        exported = folder / f"hf_{name}"
        print(name)
        (check_retrieval if name == "stage1" else check_generation)(exported, expected)
        processor = AutoProcessor.from_pretrained(exported)
        processed = processor(images=Image.fromarray(expected["picture"]), return_tensors="pt")
        check_close("image", processed["pixel_values"][0], expected["processed"], PROCESSED_CLOSE)


if __name__ == "__main__":
    try:
        check(Path(sys.argv[1]))
    except NotEqualError as error:
        sys.exit(f"not equal to LAVIS: {error}")
