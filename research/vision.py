"""Measure the usage of vision: accuracy of MLM with and without the image (GRIT-VLP 5.6, supplement
Figure 1).

Captions are masked at several rates, with exactly the same tokens with and without the image. UoV@k
is accuracy@k minus accuracy@k without the image, where every cross-attention outputs zero. Hits are
counted for each sample, so the result does not depend on the mini-batch size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.losses.language import IGNORED, mask_tokens
from lavis_mafa.commands.arguments import add_config_arguments
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.io.processes import progress
from lavis_mafa.metrics.intervals import clustered, ratio
from lavis_mafa.mining.model_and_data import ModelAndData, data_source, load_model_and_data
from lavis_mafa.models.families.albef.albef_driver import AlbefBackbone
from lavis_mafa.models.families.family import tokenize
from lavis_mafa.models.mafa_model import checkpoint_of
from lavis_mafa.models.weight_loading import random_weights
from lavis_mafa.pages.charts import Table
from lavis_mafa.pages.tables import markdown_table
from lavis_mafa.runners.loaders import to_device

COUNTS = ("tokens", "hits_1", "hits_5", "hits_1_without", "hits_5_without")
_CROSS_ATTENTION = ".crossattention.self"  # its name in LAVIS's BERT
_READERS = ("visual_encoder.", "text_encoder.")  # prefixes of the weights that predict tokens
Interval = Callable[[NDArray[Any], NDArray[Any]], tuple[float, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_arguments(parser)
    parser.add_argument(
        "--rates",
        nargs="+",
        type=float,
        default=[0.15, 0.35, 0.5, 0.75],
        help="masking rates (default: 0.15 0.35 0.5 0.75)",
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
        ValueError: for rates out of range, or a model or checkpoint without MLM.
    """
    wrong = [rate for rate in args.rates if not 0.0 < rate <= 1.0]
    if wrong or args.samples < 1:
        raise ValueError(
            f"--rates {wrong} --samples {args.samples}: expected rates above 0 and at most 1, and "
            "at least 1 sample"
        )
    loaded = load_model_and_data(args)
    _require_mlm(loaded)
    size = len(loaded.data)
    count = min(size, args.samples)
    numbers = np.sort(np.random.default_rng((args.seed, 4)).choice(size, count, replace=False))
    rates = sorted(set(args.rates))
    counts = measure(loaded, numbers, rates, args.seed)
    images = loaded.data.image_ids[numbers]
    rows = [
        {"rate": rate, **figures_of(one, images)} for rate, one in zip(rates, counts, strict=True)
    ]
    source = data_source(args, checkpoint=args.checkpoint, samples=args.samples, seed=args.seed)
    write_json(args.output / "vision.json", {**source, "rows": rows})
    table = Table("Usage of vision, %", ["masked", "tokens"])
    for k in (1, 5):
        table.columns += [f"UoV@{k}", f"accuracy@{k}", f"accuracy@{k} w/o image"]
    for row in rows:
        figures = [_percent(figure) for figure in list(row.values())[2:]]
        table.rows.append([f"{100 * row['rate']:g} %", row["tokens"], *figures])
    text = markdown_table(table)
    note = "In brackets 95 % intervals; the images are the independent draws."
    write_text(args.output / "vision.md", f"# {table.title}\n\n{text}\n\n{note}\n")
    print(text)


def _require_mlm(loaded: ModelAndData) -> None:
    """Refuse a model without MLM, and a checkpoint that leaves weights random that it needs."""
    backbone = getattr(loaded.model, "backbone", None)
    if not isinstance(backbone, AlbefBackbone) or not hasattr(loaded.model.text_encoder, "cls"):
        raise ValueError(
            f"{loaded.cfg.model_cfg.arch} has no masked language modelling: use albef_mafa"
        )
    path = checkpoint_of(loaded.cfg.model_cfg)
    missing = loaded.model.load_checkpoint(path).missing_keys if path else []
    lost = [one for one in random_weights(loaded.model, missing) if one.startswith(_READERS)]
    if lost:
        raise ValueError(
            f"{path} lacks {len(lost)} weights that predict tokens, such as {lost[0]}: give a "
            "checkpoint of pre-training with the language loss"
        )


def measure(
    loaded: ModelAndData, numbers: NDArray[Any], rates: Sequence[float], seed: int
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
            given = samples["image"], samples["text_input"], index
            found = count_hits(loaded.model, *given, rates, seed)
        readable = torch.tensor([not error for error in batch["load_error"]])
        counts[..., torch.from_numpy(np.searchsorted(numbers, index))] = found.cpu() * readable
        bar.update(len(index))
    bar.close()
    return counts.numpy()


def count_hits(
    model: Any,
    images: Tensor,
    captions: Sequence[str],
    numbers: NDArray[Any],
    rates: Sequence[float],
    seed: int,
) -> Tensor:
    """Return `COUNTS` ``(R, 5, B)`` int64 of the samples of a mini-batch at R rates.

    Args:
        model: an ALBEF with its MLM head.
        images: ``(B, 3, H, W)``.
        numbers: ``(B,)``, sample numbers.
        rates: masking rates, 0 to 1.
        seed: of the masks.
    """
    tokens = tokenize(model, captions, None)
    ids, mask = tokens.input_ids, tokens.attention_mask
    embeds = model.backbone.encode_images(images).embeds
    found = []
    for rate in rates:
        masked, targets = mask_captions(model, ids, mask, numbers, rate, seed)
        given = model, embeds, masked.to(images.device), mask, targets.to(images.device)
        seen = _hits(*given)
        with without_image(model):
            found.append(torch.cat([seen, _hits(*given)[1:]]))
    return torch.stack(found)


def _hits(model: Any, embeds: Tensor, ids: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
    """Count for each sample ``(3, B)`` the masked tokens, and the top-1 and the top-5 hits."""
    tokens = torch.nonzero(targets.flatten() != IGNORED).squeeze(1)
    guesses = model.backbone._predict(ids, mask, embeds, tokens).topk(5, dim=1).indices
    right = guesses == targets.flatten()[tokens][:, None]
    row = tokens // targets.shape[1]
    counted = torch.zeros(3, len(targets), dtype=torch.int64, device=targets.device)
    counted[0].index_add_(0, row, torch.ones_like(row))
    counted[1].index_add_(0, row, right[:, 0].long())
    counted[2].index_add_(0, row, right.any(dim=1).long())
    return counted


@contextmanager
def without_image(model: torch.nn.Module) -> Iterator[None]:
    """Hide the image from the text: the weighted sum of every cross-attention is replaced by 0.

    This is attention to an empty set: the layer adds only the bias of its output projection.
    """
    hooks = [
        part.register_forward_hook(_zero_attention)
        for name, part in model.named_modules()
        if name.endswith(_CROSS_ATTENTION)
    ]
    assert hooks, "an ALBEF has cross-attention"
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _zero_attention(part: Any, given: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward hook that replaces the output of attention, not its further return values."""
    return torch.zeros_like(output[0]), *output[1:]


def mask_captions(
    model: Any, ids: Tensor, mask: Tensor, numbers: NDArray[Any], rate: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Mask captions as in training (80 % [MASK], 10 % random, 10 % unchanged).

    Each sample has its own seed, so its mask does not depend on the mini-batch, and a token that is
    masked at one rate is also masked at every higher rate.

    Args:
        ids, mask: ``(B, L)``.
        numbers: ``(B,)``, sample numbers.

    Returns:
        ``(B, L)`` ids and targets on the CPU, targets `IGNORED` where no token is predicted.
    """
    tokenizer = model.tokenizer
    masked, targets = ids.cpu().clone(), torch.full(ids.shape, IGNORED)
    for row, number in enumerate(numbers):
        length = int(mask[row].sum())
        drawn = np.random.SeedSequence((seed, int(number))).generate_state(1, np.uint32)[0]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(drawn))
            masked[row, :length], targets[row, :length] = mask_tokens(
                masked[row, :length],
                rate,
                mask_id=tokenizer.mask_token_id,
                vocab_size=model.text_encoder.config.vocab_size,
                special_ids=(tokenizer.cls_token_id, tokenizer.pad_token_id),
            )
    return masked, targets


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


def share_of(
    hits: NDArray[Any], counts: NDArray[Any], clusters: NDArray[Any], interval: Interval
) -> dict[str, float]:
    """Return ``hits.sum() / counts.sum()`` as ``share``, with its 95 % interval ``low``, ``high``.

    All are NaN if the counts are 0.

    Args:
        hits, counts: ``(S,)`` for each sample.
        clusters: ``(S,)`` int64, equal for samples that are not independent.
        interval: from `lavis_mafa.metrics.intervals`: `clustered` for shares of 0 to 1, `ratio` for
            values that may be negative.
    """
    total = counts.sum()
    if not total:
        return dict.fromkeys(("share", "low", "high"), float("nan"))
    cluster = np.unique(clusters, return_inverse=True)[1].reshape(-1)
    low, high = interval(*(np.bincount(cluster, weights=each) for each in (hits, counts)))
    return {"share": float(hits.sum() / total), "low": low, "high": high}


def _percent(figure: dict[str, float]) -> str:
    share, low, high = (100 * figure[key] for key in ("share", "low", "high"))
    return f"{share:.1f} ({low:.1f} to {high:.1f})"
