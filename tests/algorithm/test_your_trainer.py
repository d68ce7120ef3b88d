"""The loop of docs/your_trainer.md and the script examples/mafa_from_scratch.py."""

import re

import torch
import torch.nn.functional as F
from conftest import ROOT
from fresh import fresh_python
from simulated_gpu import host_waits
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


def test_documented_loop_runs_on_a_gpu():
    page = (ROOT / "docs" / "your_trainer.md").read_text()
    loop = re.search(r"```python\n(.*?)```", page, re.S).group(1)
    torch.manual_seed(0)
    with host_waits():
        given, weight = torch.randn(64, 5, device="cuda"), torch.randn(5, 4, device="cuda")
        weight.requires_grad_()

        def rows_of(texts):
            return torch.tensor([int(text) for text in texts]).to("cuda")

        class OnGpu(Pairs):
            def __getitem__(self, index):
                return given[index.to("cuda")], [str(int(n)) for n in index], index

        names = {
            "dataset": OnGpu(64),
            "optimizer": torch.optim.SGD([weight], 0.001),
            "encode_images": lambda images: F.normalize(images @ weight, dim=1),
            "encode_texts": lambda texts: F.normalize(given[rows_of(texts)] @ weight, dim=1),
            "judge": lambda images, texts: torch.full((len(texts),), 0.9, device="cuda"),
        }
        exec(loop, names)
    assert names["loss"].device.type == "cuda" and names["plan"].grouped


def test_documented_backbone_trains_on_tokens_by_the_whole_step(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from mafa_from_scratch import Model, World, vocabulary

    page = (ROOT / "docs" / "your_trainer.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.S)[1]
    torch.manual_seed(0)
    words = vocabulary()
    world, model = World(96, 1, words), Model(3 + len(words), 64)
    index = torch.arange(96).view(4, 24)
    judged, losses = [], []

    class ConD:
        def judge(self, samples, image_of, text_of, ranks=None, seen=None):
            assert "text_input" not in samples
            rows = samples["image_id"]
            judged.append(world.truth[rows[image_of], rows[text_of]].float())
            return judged[-1]

    def batches():
        for rows in [*index] * 3:
            yield world.images[rows], world.tokens[rows], rows
            losses.append({name: loss.item() for name, loss in names["output"].losses.items()})

    names = {
        "model": model,
        "con_d": ConD(),
        "batches": batches(),
        "epoch": 0,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=2e-3),
    }
    exec(code, names)
    assert losses[0].keys() == {"itc", "itm", "lm"} and len(losses) == 12
    assert all(losses[-1][name] < losses[0][name] for name in losses[0])
    assert len(judged) == 12 and torch.cat(judged).any(), "a hard negative matches"


def run_example(*arguments):
    return fresh_python(ROOT / "examples/mafa_from_scratch.py", *arguments)


def test_example_trains_and_counts_false_negatives():
    lines = run_example("--epochs", "2", "--pairs", "192").splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("before training: R@1") and lines[-1].startswith("after training")
    for line in lines[1:3]:
        picked, remaining = map(int, re.search(r"(\d+) picked, (\d+) left in ITM", line).groups())
        assert picked > 0 == remaining, "the oracle finds every false negative"
