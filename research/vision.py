"""Measure the usage of vision: accuracy of MLM with and without the image (GRIT-VLP 5.6, supplement
Figure 1).

Captions are masked at several rates, with exactly the same tokens with and without the image. UoV@k
is accuracy@k minus accuracy@k without the image. Without the image, every cross-attention outputs
zero. For BLIP and BLIP-2 the accuracy of predicting each next token is measured, without masking.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lavis_mafa.commands.arguments import add_data_arguments
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.io.processes import progress
from lavis_mafa.metrics.intervals import clustered, ratio
from lavis_mafa.mining.model_and_data import ModelAndData, data_source, load_model_and_data
from lavis_mafa.models.weight_loading import random_weights
from lavis_mafa.pages.charts import Table
from lavis_mafa.pages.tables import markdown_table
from lavis_mafa.runners.loaders import to_device
from research.token_prediction import COUNTS, TokenPredictor, share_of

# Prefixes of the weights that predict tokens of captions.
_LANGUAGE_PARTS = (
    "visual_encoder.",
    "text_encoder.",
    "text_decoder.",
    "Qformer.",
    "ln_vision.",
    "query_",
)
FIGURES = {
    "uov_1": "UoV@1",
    "accuracy_1": "accuracy@1",
    "without_1": "accuracy@1 without the image",
    "uov_5": "UoV@5",
    "accuracy_5": "accuracy@5",
    "without_5": "accuracy@5 without the image",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_data_arguments(parser)
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        default=[],
        metavar="[NAME=]PATH",
        help="weights to compare, all of the architecture in the config (default: the weights "
        "that the config names)",
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        type=float,
        default=[0.15, 0.35, 0.5, 0.75],
        help="masking rates of MLM (default: 0.15 0.35 0.5 0.75)",
    )
    parser.add_argument(
        "--samples", type=int, default=5000, help="captions to draw at random (default: 5000)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the samples and of masking (default: 0)"
    )
    parser.add_argument("--output", required=True, type=Path, help="folder for the results")


def run(args: argparse.Namespace) -> None:
    """Measure, print and write ``vision.json`` and ``vision.md``.

    Raises:
        ValueError: for rates out of range, or a model or checkpoint without a language head.
    """
    wrong = [rate for rate in args.rates if not 0.0 < rate <= 1.0]
    if wrong or args.samples < 1:
        raise ValueError(
            f"--rates {wrong} --samples {args.samples}: expected rates above 0 and at most 1, and "
            "at least 1 sample"
        )
    named = named_checkpoints(args.checkpoint)
    first = next(iter(named.values()), None)
    loaded = load_model_and_data(argparse.Namespace(**{**vars(args), "checkpoint": first}))
    size = len(loaded.data)
    count = min(size, args.samples)
    numbers = np.sort(np.random.default_rng((args.seed, 4)).choice(size, count, replace=False))
    predictor = TokenPredictor(loaded.model, args.seed)
    rates = sorted(set(args.rates)) if predictor.masks else [None]
    images = loaded.data.image_ids[numbers]
    rows, missing = [], None
    for name in named or ["the config's"]:
        if named:
            lacking = _load_weights(loaded.model, named[name])
            # What a checkpoint lacks would silently keep the weights of the one loaded before it.
            if missing not in (None, lacking):
                raise ValueError(
                    f"{named[name]} and {first} contain different parts of the model: give "
                    "checkpoints of the same kind"
                )
            missing = lacking
        counts = measure(loaded, predictor, numbers, rates, name)
        rows += [
            {"model": name, "rate": rate, **figures_of(one, images)}
            for rate, one in zip(rates, counts, strict=True)
        ]
    _write(args, rows, named)


def named_checkpoints(given: Sequence[str]) -> dict[str, str]:
    """Return checkpoint paths by name, given as ``NAME=PATH`` or as a path.

    A path without a name is named after its file, or after its folder if the file is called
    ``checkpoint*``.

    Raises:
        ValueError: if two checkpoints have the same name.
    """
    named: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            path = text
            stem = Path(text).stem
            folder = Path(text).resolve().parent.name
            name = folder if stem.startswith("checkpoint") else stem
        if name in named:
            raise ValueError(f"two checkpoints are called {name}: give --checkpoint NAME=PATH")
        named[name] = path
    return named


def _load_weights(model: Any, path: str) -> frozenset[str]:
    """Load a checkpoint into a model; return the names of the weights that it lacks.

    Raises:
        ValueError: if weights that predict tokens remain random.
    """
    missing = model.load_checkpoint(path).missing_keys
    lost = [name for name in random_weights(model, missing) if name.startswith(_LANGUAGE_PARTS)]
    if lost:
        raise ValueError(
            f"{path} lacks {len(lost)} weights that predict tokens, such as {lost[0]}: give a "
            "checkpoint of pre-training with the language loss"
        )
    return frozenset(missing)


def measure(
    loaded: ModelAndData,
    predictor: TokenPredictor,
    numbers: NDArray[Any],
    rates: Sequence[Any],
    name: str,
) -> NDArray[Any]:
    """Return `COUNTS` ``(R, 5, S)`` of S samples at R rates; 0 if a sample cannot be read."""
    size = int(loaded.cfg.run_cfg.batch_size_eval)
    batches = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    counts = torch.zeros(len(rates), len(COUNTS), len(numbers), dtype=torch.int64)
    bar = progress(desc=name, total=len(numbers), unit=" samples")
    for batch in loaded.data.batches(batches):
        index = np.asarray(batch["index"])
        samples = to_device(batch, loaded.device)
        with torch.inference_mode(), loaded.autocast():
            found = predictor.count(samples["image"], samples["text_input"], index, rates)
        readable = torch.tensor([not error for error in batch["load_error"]])
        counts[..., torch.from_numpy(np.searchsorted(numbers, index))] = found.cpu() * readable
        bar.update(len(index))
    bar.close()
    return counts.numpy()


def figures_of(counts: NDArray[Any], clusters: NDArray[Any]) -> dict[str, Any]:
    """Return accuracies with and without the image, 0 to 1, and UoV, with 95 % intervals.

    Args:
        counts: `COUNTS` ``(5, S)``.
        clusters: ``(S,)``, the image of every sample: its captions are not independent.
    """
    one = dict(zip(COUNTS, counts, strict=True))
    figures: dict[str, Any] = {"tokens": int(one["tokens"].sum())}
    for k in (1, 5):
        seen, blind = one[f"hits_{k}"], one[f"hits_{k}_without"]
        for kind, hits in (("uov", seen - blind), ("accuracy", seen), ("without", blind)):
            interval = ratio if kind == "uov" else clustered
            figures[f"{kind}_{k}"] = share_of(hits, one["tokens"], clusters, interval)
    return figures


def _write(
    args: argparse.Namespace,
    rows: Sequence[Mapping[str, Any]],
    named: Mapping[str, str],
) -> None:
    """Write the figures as JSON and Markdown, and print the table."""
    settings = {
        **data_source(args),
        "checkpoints": dict(named),
        "samples": args.samples,
        "seed": args.seed,
    }
    write_json(args.output / "vision.json", {**settings, "rows": list(rows)})
    columns = [title.replace("without the image", "w/o image") for title in FIGURES.values()]
    table = Table("Usage of vision, %", ["model", "masked", "tokens", *columns])
    table.note = "In brackets 95 % intervals; the images are the independent draws."
    for row in rows:
        cells = [_percent(row[key]) for key in FIGURES]
        table.rows.append([row["model"], _rate(row["rate"]), row["tokens"], *cells])
    text = markdown_table(table)
    write_text(args.output / "vision.md", f"# {table.title}\n\n{text}\n\n{table.note}\n")
    print(text)


def _rate(rate: float | None) -> str:
    return "next token" if rate is None else f"{100 * rate:g} %"


def _percent(figure: Mapping[str, float]) -> str:
    share, low, high = (100 * figure[key] for key in ("share", "low", "high"))
    return f"{share:.1f} ({low:.1f} to {high:.1f})"
