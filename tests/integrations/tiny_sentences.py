"""A tiny SentenceTransformer, a tiny CrossEncoder, and pairs; as a script: a training."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

from lavis_mafa import GritSettings
from lavis_mafa.algorithm.features_step import PLAIN
from lavis_mafa.integrations.sentence_transformers import Grit, KeepLoss, MinedLoss, numbered

WORDS = "red green blue grey circle square line dot large small left right top bottom".split()
GROUPED = GritSettings(enabled=True, queue_size=16, search_space=8)


def write_bert(folder, kind=BertModel, seed=0, **more):
    """Write a random BERT with its tokenizer; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(tokens))
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokens), intermediate_size=32, **sizes, **more)
    kind(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


def encoder(folder, seed=0):
    """Return a tiny SentenceTransformer without dropout, so that runs can be compared."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    words = Transformer(write_bert(folder / f"bert{seed}", seed=seed, **none))
    return SentenceTransformer(modules=[words, Pooling(16)], device="cpu")


def cross_encoder(folder):
    path = write_bert(folder / "cross", BertForSequenceClassification, num_labels=1)
    return CrossEncoder(path, device="cpu")


def pairs(size=36, seed=1):
    drawn = torch.Generator().manual_seed(seed)
    texts = [
        " ".join(WORDS[k] for k in torch.randint(len(WORDS), (4,), generator=drawn))
        for _ in range(2 * size)
    ]
    return numbered(Dataset.from_dict({"anchor": texts[:size], "positive": texts[size:]}))


class Recording(MinedLoss):
    """Appends the places of the rows of every mini-batch and its loss to a file.

    Attributes:
        collected: their places, and the features of both sides.
    """

    def forward(self, sentence_features, labels=None):
        loss = super().forward(sentence_features, labels)
        if self.model.training:
            places = self.grit.rows.places(labels)
            self.collected.append((places, self.output.image_features, self.output.text_features))
            with self.file.open("a") as file:
                file.write(json.dumps([places.tolist(), float(loss.detach())]) + "\n")
        return loss


def train(folder, resume=False, steps=-1, rank=0, data=None, order=3, settings=PLAIN, **changes):
    """Train three epochs of mini-batches of 4, saving every 5 steps; return the trainer."""
    data = pairs() if data is None else data
    evaluation = changes.pop("evaluation", data.select(range(6)))
    grit = Grit(data, GROUPED, seed=order)
    model = encoder(folder)
    loss = Recording(model, settings=settings, grit=grit)
    loss.collected = []
    loss.file = folder / f"rows_{rank}.jsonl"
    arguments = {
        "output_dir": str(folder / "out"),
        "num_train_epochs": 3,
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "seed": 5,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": 5,
        "logging_steps": 100,
        "report_to": "none",
        "batch_sampler": grit.batch_sampler,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    given = SentenceTransformerTrainingArguments(**{**arguments, **changes})
    trainer = SentenceTransformerTrainer(
        model, given, data, evaluation, loss=loss, callbacks=[grit, KeepLoss(loss)]
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


if __name__ == "__main__":
    import os

    rank = int(os.environ["RANK"])
    sigmoid = replace(PLAIN, itc_loss="sigmoid") if "sigmoid" in sys.argv else PLAIN
    folder = Path(sys.argv[1])
    done = train(folder / str(rank), rank=rank, output_dir=f"{folder}/out", settings=sigmoid)
    if "sigmoid" in sys.argv:
        bias = done.loss.parts.form.relative_bias.item()
        (folder / f"bias_{rank}.json").write_text(json.dumps(bias))
