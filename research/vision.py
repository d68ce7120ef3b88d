"""Measure the usage of vision: accuracy of MLM with and without the image (GRIT-VLP 5.6, supplement
Figure 1).

Captions are masked at several rates, with exactly the same tokens with and without the image. UoV@k
is accuracy@k minus accuracy@k without the image. Without the image, every cross-attention outputs
zero. For BLIP and BLIP-2 the accuracy of predicting each next token is measured, without masking.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lavis_mafa.commands.arguments import add_config_arguments
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.io.processes import progress
from lavis_mafa.metrics.intervals import clustered, ratio
from lavis_mafa.mining.model_and_data import ModelAndData, data_source, load_model_and_data
from lavis_mafa.models.mafa_model import checkpoint_of
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_arguments(parser)
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
    loaded = load_model_and_data(args)
    _require_language_weights(loaded)
    size = len(loaded.data)
    count = min(size, args.samples)
    numbers = np.sort(np.random.default_rng((args.seed, 4)).choice(size, count, replace=False))
    predictor = TokenPredictor(loaded.model, args.seed)
    rates = sorted(set(args.rates)) if predictor.masks else [None]
    images = loaded.data.image_ids[numbers]
    counts = measure(loaded, predictor, numbers, rates)
    rows = [
        {"rate": rate, **figures_of(one, images)} for rate, one in zip(rates, counts, strict=True)
    ]
    source = data_source(args, checkpoint=args.checkpoint, samples=args.samples, seed=args.seed)
    write_json(args.output / "vision.json", {**source, "rows": rows})
    table = Table("Usage of vision, %", ["masked", "tokens"])
    for k in (1, 5):
        table.columns += [f"UoV@{k}", f"accuracy@{k}", f"accuracy@{k} w/o image"]
    for row in rows:
        rate = "next token" if row["rate"] is None else f"{100 * row['rate']:g} %"
        table.rows.append([rate, row["tokens"], *map(_percent, list(row.values())[2:])])
    text = markdown_table(table)
    note = "In brackets 95 % intervals; the images are the independent draws."
    write_text(args.output / "vision.md", f"# {table.title}\n\n{text}\n\n{note}\n")
    print(text)


def _require_language_weights(loaded: ModelAndData) -> None:
    """Refuse a checkpoint that leaves weights random that predict tokens."""
    path = checkpoint_of(loaded.cfg.model_cfg)
    missing = loaded.model.load_checkpoint(path).missing_keys if path else []
    lost = [one for one in random_weights(loaded.model, missing) if one.startswith(_LANGUAGE_PARTS)]
    if lost:
        raise ValueError(
            f"{path} lacks {len(lost)} weights that predict tokens, such as {lost[0]}: give a "
            "checkpoint of pre-training with the language loss"
        )


def measure(
    loaded: ModelAndData, predictor: TokenPredictor, numbers: NDArray[Any], rates: Sequence[Any]
) -> NDArray[Any]:
    """Return `COUNTS` ``(R, 5, S)`` of S samples at R rates; 0 if a sample cannot be read."""
    size = int(loaded.cfg.run_cfg.batch_size_eval)
    batches = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    counts = torch.zeros(len(rates), len(COUNTS), len(numbers), dtype=torch.int64)
    bar = progress(desc="tokens", total=len(numbers), unit=" samples")
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


def _percent(figure: dict[str, float]) -> str:
    share, low, high = (100 * figure[key] for key in ("share", "low", "high"))
    return f"{share:.1f} ({low:.1f} to {high:.1f})"
