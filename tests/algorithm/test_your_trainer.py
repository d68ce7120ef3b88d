"""The loop of docs/your_trainer.md and the script examples/mafa_from_scratch.py."""

import os
import re
import subprocess
import sys

import torch
import torch.nn.functional as F
from conftest import ROOT
from torch import nn

KINDS = 60


class Pairs:
    """Vectors of a few kinds: an image and a text match if they are of the same kind."""

    def __init__(self, size):
        draw = torch.Generator().manual_seed(0)
        self.kinds = torch.randint(KINDS, (size,), generator=draw)
        self.images = F.one_hot(self.kinds, KINDS) + 0.2 * torch.randn(size, KINDS, generator=draw)

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, index):
        return self.images[index], [str(int(k)) for k in self.kinds[index]], index


def test_documented_loop_learns_and_finds_false_negatives():
    page = (ROOT / "docs" / "your_trainer.md").read_text()
    loop = re.search(r"```python\n(.*?)```", page, re.S).group(1)
    assert len([line for line in loop.splitlines() if line.strip()]) <= 25
    torch.manual_seed(0)
    image_encoder, text_encoder = nn.Linear(KINDS, 16), nn.Embedding(KINDS, 16)
    judged = []

    def kinds_of(texts):
        return torch.tensor([int(text) for text in texts])

    def judge(images, texts):
        judged.append((images.argmax(1) == kinds_of(texts)).float())
        return judged[-1]

    dataset = Pairs(300)
    namespace = {
        "dataset": dataset,
        "encode_images": lambda images: F.normalize(image_encoder(images), dim=1),
        "encode_texts": lambda texts: F.normalize(text_encoder(kinds_of(texts)), dim=1),
        "judge": judge,
        "optimizer": torch.optim.Adam(
            [*image_encoder.parameters(), *text_encoder.parameters()], lr=0.05
        ),
    }

    def recall():
        images, texts, _ = dataset[torch.arange(300)]
        with torch.no_grad():
            sim = namespace["encode_images"](images) @ namespace["encode_texts"](texts).T
        return (dataset.kinds[sim.argmax(1)] == dataset.kinds).float().mean().item()

    before = recall()
    exec(loop, namespace)
    assert torch.cat(judged).mean() > 0.3, "the hardest negatives of similar pairs often match"
    assert before < 0.05 and recall() > 0.3  # chance level: 1 / KINDS
    assert namespace["plan"].grouped


def run_example(*arguments):
    process = subprocess.run(
        [sys.executable, ROOT / "examples" / "mafa_from_scratch.py", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_example_trains_and_counts_false_negatives():
    lines = run_example("--epochs", "2", "--pairs", "192").splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("before training: R@1") and lines[-1].startswith("after training")
    for line in lines[1:3]:
        picked, remaining = map(int, re.search(r"(\d+) picked, (\d+) left in ITM", line).groups())
        assert picked > 0 == remaining, "the oracle finds every false negative"
