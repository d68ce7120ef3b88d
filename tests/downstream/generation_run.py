"""A model that generates without training, as a module and as a program.

The program is ``evaluate.py`` with `Speaker` registered. If TRY_TOGETHER in the environment names a
folder, its ranks also test there what ranks do together.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import lavis_mafa  # noqa: F401  before LAVIS, which lacks names of newer transformers

# isort: split
import torch
from lavis.common.dist_utils import get_rank
from lavis.common.registry import registry
from lavis.models.base_model import BaseModel
from torch import nn

from lavis_mafa.cli import main
from lavis_mafa.downstream import task_records as results
from lavis_mafa.io.processes import on_main_process

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}


def colour_of(image):
    """Return the name of the colour that fills a normalised image."""
    high = (image.mean(dim=(1, 2)) > 0.5).tolist()
    return {tuple(v == 255 for v in rgb): name for name, rgb in COLOURS.items()}[tuple(high)]


@registry.register_model("test_speaker")
class Speaker(BaseModel):
    """Generates the colour of an image, and records the arguments."""

    PRETRAINED_MODEL_CONFIG_DICT = {"tiny": str(Path(__file__).with_name("generation_run.yaml"))}
    reads_prompt = True

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(1, 1)
        self.calls = []

    @classmethod
    def from_config(cls, cfg):
        return cls()

    def before_evaluation(self, **kwargs):
        if "TRY_TOGETHER" in os.environ:
            try_together(os.environ["TRY_TOGETHER"])

    def generate(
        self,
        samples,
        use_nucleus_sampling=False,
        num_beams=3,
        max_length=30,
        min_length=10,
        top_p=0.9,
        repetition_penalty=1.0,
        length_penalty=1.0,
    ):
        prompt = samples["prompt"] if self.reads_prompt and "prompt" in samples.keys() else None
        self.calls.append({k: v for k, v in locals().items() if k not in ("self", "samples")})
        return [f"a picture that is {colour_of(image)}" for image in samples["image"]]

    def predict_answers(
        self,
        samples,
        num_beams=5,
        inference_method="generate",
        max_len=10,
        min_len=1,
        num_ans_candidates=128,
        answer_list=None,
        prompt="",
        length_penalty=0,
        **kwargs,
    ):
        self.calls.append({k: v for k, v in locals().items() if k not in ("self", "samples")})
        return [f"The {colour_of(image)}." for image in samples["image"]]


def try_together(folder):
    """Write what this rank gets from gathering three records and one, a value and a failure."""
    rank = get_rank()
    result = {"gathered": results._gather_records([{"id": (rank, i)} for i in range(3 - 2 * rank)])}
    result["value"] = on_main_process(lambda: f"made on {rank}")

    def fail():
        raise ValueError(f"wrong on {rank}")

    try:
        on_main_process(fail)
    except (ValueError, RuntimeError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(["evaluate", *sys.argv[1:]]))
