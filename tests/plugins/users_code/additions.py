"""A user's plugin with one component of each kind for the step, the metrics and the tasks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from lavis.common.registry import registry
from torch import nn

from lavis_mafa.algorithm.grit import HARDNESS
from lavis_mafa.algorithm.itc_forms import ITC_LOSSES, contrastive_loss
from lavis_mafa.algorithm.labels import SOFT_LABELS
from lavis_mafa.algorithm.losses import LOSSES
from lavis_mafa.algorithm.options import option
from lavis_mafa.algorithm.pickers import NONE, PICKERS
from lavis_mafa.algorithm.rules import KEPT, POSITIVE, RULES
from lavis_mafa.algorithm.scores import SCORES
from lavis_mafa.families.albef_mafa import AlbefMafa
from lavis_mafa.judges.discriminators import DISCRIMINATORS
from lavis_mafa.settings.loggers import LOGGERS, Logger
from lavis_mafa.tasks.mafa_pretrain import MafaPretrainTask
from lavis_mafa.tasks.metrics import METRICS


@dataclass(frozen=True)
class NearestSettings:
    """Settings of the picker."""

    target: float = option(0.5, "cosine similarity of the candidates to pick", low=-1, high=1)


@PICKERS.register("nearest_to", settings=NearestSettings, source="tests")
def nearest_to(sim, positives, own):
    """Pick the candidate whose similarity is nearest to a target."""
    distance = (sim * 0.07 - own.target).abs().masked_fill(positives, float("inf"))
    return torch.where(positives.all(dim=1), NONE, distance.argmin(dim=1))


@dataclass(frozen=True)
class SelfTaughtSettings:
    """Settings of the soft labels."""

    power: float = option(2.0, "exponent of the model's own distribution", low=1)


@SOFT_LABELS.register("self_taught", settings=SelfTaughtSettings, source="tests")
def self_taught(side, soft, own):
    """Return half the model's own distribution, sharpened."""
    taught = torch.softmax(own.power * side.sim.detach(), dim=1)
    return (1 - soft.alpha) * side.one_hot() + soft.alpha * taught


@dataclass(frozen=True)
class SharpenedSettings:
    """Settings of the form of ITC."""

    start: float = option(1.0, "initial factor of the similarities", low=0, above=True)


@ITC_LOSSES.register("sharpened", settings=SharpenedSettings, source="tests")
class Sharpened(nn.Module):
    """InfoNCE with a trained factor, which counts its calls and knows the number of samples."""

    def __init__(self, own):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(own.start))
        self.register_buffer("calls", torch.tensor(0))

    def allocate(self, size):
        """Prepare for a number of training samples."""
        self.register_buffer("of_samples", torch.zeros(size))

    def forward(self, side, labels):
        """Return the loss of one direction."""
        self.calls += 1
        return contrastive_loss(self.factor * side.sim, labels, side.dropped)


@dataclass(frozen=True)
class SpreadSettings:
    """Settings of the loss."""

    modality: str = option("images", "whose features are spread", choices=("images", "texts"))


@LOSSES.register("spread", settings=SpreadSettings, source="tests")
def spread(step, own):
    """Return the mean squared similarity of the mini-batch's features."""
    samples = step.batch.own_images if own.modality == "images" else step.batch.own_texts
    return (samples.features @ samples.features.t()).square().mean()


@dataclass(frozen=True)
class LengthSettings:
    """Settings of the score."""

    scale: float = option(10.0, "difference of length at which the score is 1 / e", low=1)


@SCORES.register("length", settings=LengthSettings, source="tests", probability=True)
def length(view, own):
    """Score candidates by how much the lengths of their captions differ."""
    words = torch.tensor([float(len(text)) for text in view.batch.samples["text_input"]])
    scores = torch.exp(-(words[:, None] - words[None]).abs() / own.scale)
    return scores, scores


@RULES.register("share_of_own", source="tests", needs_own=True)
def share_of_own(pairs, rule):
    """Call a pair positive from a share ``high`` of the own pair's score on."""
    return torch.where(pairs.score >= rule.high * pairs.own_score, POSITIVE, KEPT)


@dataclass(frozen=True)
class CoinSettings:
    """Settings of the discriminator."""

    probability: float = option(0.5, "that a pair matches", low=0, high=1)


@DISCRIMINATORS.register("coin", settings=CoinSettings, source="tests")
class Coin:
    """A discriminator that gives every pair the same probability."""

    def __init__(self, settings: CoinSettings) -> None:
        self.settings = settings

    def judge(self, samples, image_of, text_of, ranks=None, seen=None):
        """Return the same probability for every pair."""
        return torch.full(image_of.shape, self.settings.probability, device=image_of.device)


@METRICS.register("mean_rank", source="tests")
def mean_rank(scores_i2t, scores_t2i, dataset):
    """Return the mean rank of each text's own image, from 1."""
    own = np.array([scores_t2i[text, dataset.txt2img[text]] for text in range(len(scores_t2i))])
    return {"mean_rank": float((scores_t2i >= own[:, None]).sum(axis=1).mean())}


@METRICS.register("words", kind="caption", source="tests")
def words(references, captions):
    """Return the number of words of each caption, and that of the images."""
    counts = [len(captions[image][0].split()) for image in sorted(captions)]
    return {"Words": counts, "Images": len(references)}


@dataclass(frozen=True)
class SwingSettings:
    """Settings of the hardness schedule."""

    low: float = option(0.5, "hardness of every other epoch", low=0, above=True, high=1)


@HARDNESS.register("swing", settings=SwingSettings, source="tests")
def swing(grouped_epochs, hardness, own):
    """Change between two hardnesses from epoch to epoch."""
    return own.low if grouped_epochs % 2 else hardness


@LOGGERS.register("notebook", source="tests")
class Notebook(Logger):
    """A logger that writes the names of figures into a file."""

    def begin(self, run):
        """Open the file."""
        self.file = open(run.folder / "notebook.txt", "a", encoding="utf-8")

    def figures(self, figures, step, axis):
        """Write one line for each figure."""
        self.file.writelines(f"{axis} {step} {name}\n" for name in figures)

    def end(self, status):
        """Write how the run ended."""
        self.file.write(status)
        self.file.close()


@dataclass(frozen=True)
class GreetingOptions:
    """Keys of `run` that the task reads."""

    greeting: str = option("hello", "what the task prints before training")
    times: int = option(1, "how often", low=1, high=3)


@registry.register_task("greeting_pretrain")
class GreetingTask(MafaPretrainTask):
    """Pre-training that begins with a greeting."""

    run_options = GreetingOptions

    def before_training(self, model, train_set):
        """Print the greeting, then run the base class's preparation."""
        super().before_training(model, train_set)
        print(" ".join([self.cfg.greeting] * self.cfg.times))


@registry.register_model("albef_mine")
class AlbefMine(AlbefMafa):
    """ALBEF under another name."""
