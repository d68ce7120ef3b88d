"""Fine-tune MiniLM on pairs of captions of one image, and search held-out captions (a run of a
study).

    python -m research.text_pairs --data FOLDER --model MINILM --output measured.json loss=mined

The word embeddings and the lower layers are frozen, so that their output is computed once for each
text. Two captions match if an image has both. ``key=value`` pairs after the options are ``loss``
(library, gist, mined or none), ``judge`` (guide, the model before training, or truth), ``hardness``
of grouping, ``no_duplicates``, ``learning_rate`` and settings of `MinedLoss`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from datasets import Dataset
from numpy.typing import NDArray
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    GISTEmbedLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor, nn

from lavis_mafa.algorithm.grit.grit_settings import GritSettings
from lavis_mafa.integrations.cross_encoders import PAIR_TEXTS
from lavis_mafa.integrations.sentence_transformers import Grit, MinedLoss, numbered
from lavis_mafa.io.files import read_json, write_json
from research.studies.plan import Job

TRAINED = 2  # number of trained layers, the highest ones
_BATCH, _EPOCHS = 64, 2


def captions_of(folder: str | Path, split: str) -> dict[str, list[str]]:
    """Return the distinct captions of each image of a split, normalised by `_same`."""
    found: dict[str, dict[str, None]] = {}
    for row in read_json(Path(folder) / f"{split}.json"):
        texts = row["caption"] if isinstance(row["caption"], list) else [row["caption"]]
        found.setdefault(row["image"], {}).update(dict.fromkeys(map(_same, texts)))
    return {image: list(texts) for image, texts in found.items()}


def _same(text: str) -> str:
    """Return a text in lower case without punctuation, in which a tokenizer's decoding may
    differ."""
    words = "".join(one if one.isalnum() else " " for one in text.lower()).split()
    return " ".join(words)


class _Kept(nn.Module):
    """Replacement of the embeddings by the output of the frozen layers, computed once per text."""

    def __init__(self, embeddings: nn.Module, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.frozen = [embeddings.eval(), *(layer.eval() for layer in layers)]  # no parameters
        self.known: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def _of(self, ids: tuple[int, ...]) -> Tensor:
        if ids not in self.known:
            hidden = self.frozen[0](input_ids=torch.tensor([ids]))
            for layer in self.frozen[1:]:
                hidden = layer(hidden, None)
            self.known[ids] = hidden[0]
        return self.known[ids]

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        """Return hidden states ``(B, T, H)``, which are 0 for padding (id 0)."""
        rows = [self._of(tuple(one[one != 0].tolist())) for one in input_ids]
        width = input_ids.shape[1]
        return torch.stack([nn.functional.pad(one, (0, 0, 0, width - len(one))) for one in rows])


@cache
def _frozen(path: str, trained: int) -> _Kept:
    bert: Any = SentenceTransformer(path, device="cpu")[0].model
    layers = list(bert.encoder.layer)
    return _Kept(bert.embeddings, layers[: len(layers) - trained])


def load(path: str, trained: int = TRAINED) -> SentenceTransformer:
    """Return MiniLM with frozen lower layers whose outputs are stored."""
    model = SentenceTransformer(path, device="cpu")
    bert: Any = model[0].model
    bert.embeddings = _frozen(path, trained)
    bert.encoder.layer = bert.encoder.layer[len(bert.encoder.layer) - trained :]
    return model


class Truth:
    """A judge that knows which captions match: two captions that an image has both."""

    reads_texts = True

    def __init__(self, captions: Sequence[Sequence[str]]) -> None:
        self.pairs = {(a, b) for own in captions for a in own for b in own}

    def can_read(self, numbers: Tensor | None) -> bool:
        return True

    def judge(
        self, samples: Any, image_of: Tensor, text_of: Tensor, ranks: Any = None, seen: Any = None
    ) -> Tensor:
        left, right = samples[PAIR_TEXTS]
        places = zip(image_of.tolist(), text_of.tolist(), strict=True)
        found = [(_same(left[i]), _same(right[k])) in self.pairs for i, k in places]
        return torch.tensor(found, dtype=torch.float32)


def training_pairs(captions: dict[str, list[str]], share: float, seed: int) -> Dataset:
    """Return two distinct captions of each image in a random share of the images."""
    rng = np.random.default_rng(seed)
    images = rng.permutation(list(captions))[: round(share * len(captions))]
    pairs = [rng.permutation(captions[image])[:2].tolist() for image in images]
    return Dataset.from_dict(
        {"anchor": [one[0] for one in pairs], "positive": [one[1] for one in pairs]}
    )


def train(
    model: SentenceTransformer,
    data: Dataset,
    guide: SentenceTransformer,
    truth: Truth,
    seed: int,
    options: dict[str, Any],
) -> None:
    """Train a model by the library's trainer.

    Args:
        guide: the frozen model, for GISTEmbed and ``judge=guide``.
        options: options of the run; names not used here are settings of `MinedLoss`.
    """
    options = dict(options)
    rate, kind = options.pop("learning_rate"), options.pop("loss")
    sampler: Any = "no_duplicates" if options.pop("no_duplicates", False) else "batch_sampler"
    judge = {"guide": guide, "truth": truth, None: None}[options.pop("judge", None)]
    hardness = options.pop("hardness", None)
    callbacks: list[Any] = []
    both: Any = ("query_to_doc", "doc_to_query")
    if kind == "library":
        loss: Any = MultipleNegativesRankingLoss(
            model, directions=both, partition_mode="per_direction"
        )
    elif kind == "gist":
        loss = GISTEmbedLoss(model, guide, temperature=0.05, **options)
    else:
        grit = None
        if hardness:
            data = numbered(data)
            grit = Grit(data, GritSettings(True, search_space=len(data), hardness=hardness))
            callbacks, sampler = [grit], grit.batch_sampler
        loss = MinedLoss(model, judge=judge, grit=grit, **options)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder,
            num_train_epochs=_EPOCHS,
            per_device_train_batch_size=_BATCH,
            learning_rate=rate,
            warmup_steps=0.1,
            batch_sampler=sampler,
            dataloader_drop_last=True,
            seed=seed,
            bf16=True,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SentenceTransformerTrainer(model, arguments, data, loss=loss, callbacks=callbacks)
        trainer.train()


def search(model: SentenceTransformer, captions: dict[str, list[str]]) -> list[float]:
    """Return, for each image, the mean mAP@R (percent) of its captions as queries.

    A query is compared with all other captions of the split; captions that share an image with it
    are relevant.
    """
    texts = sorted({text for own in captions.values() for text in own})
    place = {text: number for number, text in enumerate(texts)}
    features = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
    scores = np.asarray(features @ features.T)
    right = np.zeros(scores.shape, bool)
    for own in captions.values():
        numbers = [place[text] for text in own]
        right[np.ix_(numbers, numbers)] = True
    np.fill_diagonal(right, False)
    np.fill_diagonal(scores, -np.inf)
    precision = _average_precision_at_r(scores, right)
    return [100 * float(np.mean([precision[place[t]] for t in own])) for own in captions.values()]


def _average_precision_at_r(scores: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    order = np.argsort(-scores, axis=1, kind="stable")
    hits = np.take_along_axis(right, order, axis=1)
    counts, places = hits.sum(axis=1), np.arange(1, scores.shape[1] + 1)
    precision = hits.cumsum(axis=1) / places * hits * (places <= counts[:, None])
    return np.asarray(precision.sum(axis=1) / np.maximum(counts, 1))


def measure(runs: Sequence[Job], judges: Sequence[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield each run with its measured figures."""
    for run in runs:
        yield run, json.loads(run.checkpoint.read_text(encoding="utf-8"))


def main(argv: list[str] | None = None) -> int:
    """Train and measure one model."""
    parser = argparse.ArgumentParser(
        prog="python -m research.text_pairs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", required=True, help="folder with train.json, val.json, test.json")
    parser.add_argument("--model", required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--split", default="test", help="split to search")
    parser.add_argument("--share", type=float, default=0.5, help="share of the training images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("options", nargs="*", help="key=value")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    pairs = (one.partition("=") for one in args.options)
    options = {key: yaml.safe_load(value) for key, _, value in pairs}
    captions = captions_of(args.data, "train")
    model, guide = load(args.model), load(args.model, 0)
    data = training_pairs(captions, args.share, args.seed)
    if options.get("loss") != "none":
        train(model, data, guide, Truth(list(captions.values())), args.seed, options)
    values = search(model.eval(), captions_of(args.data, args.split))
    write_json(args.output, {"map_r": float(np.mean(values)), "by_image": {"map_r": values}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
