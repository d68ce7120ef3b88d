"""Usage of vision: accuracy of MLM with and without the image (GRIT-VLP 5.6, supplement Figure 1).

Captions are masked at several rates, exactly the same tokens with and without the image, and UoV@k
is accuracy@k less accuracy@k without the image. Without the image means that cross-attention adds
up nothing. For BLIP and BLIP-2 it is the accuracy of every next token, without rates.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lavis.common.dist_utils import get_rank, get_world_size, is_main_process
from tqdm import tqdm

from lavis_mafa.analysis.corpus import (
    Opened,
    about,
    add_data_arguments,
    open_config,
    tell,
)
from lavis_mafa.analysis.intervals import clustered, ratio
from lavis_mafa.analysis.usage import COUNTS, Reader, share_of
from lavis_mafa.io.checkpoints import left_random
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.pages.report import Curve, Series, Table, write_report
from lavis_mafa.pages.tables import markdown_table
from lavis_mafa.runners.loaders import to_device

READING = ("visual_encoder.", "text_encoder.", "text_decoder.", "Qformer.", "ln_vision.", "query_")
FIGURES = {
    "uov_1": "UoV@1",
    "accuracy_1": "accuracy@1",
    "without_1": "accuracy@1 without the image",
    "uov_5": "UoV@5",
    "accuracy_5": "accuracy@5",
    "without_5": "accuracy@5 without the image",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_data_arguments(parser)
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        default=[],
        metavar="[NAME=]PATH",
        help="weights of models of the config's sizes, to be compared; otherwise the config's own",
    )
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[0.15, 0.35, 0.5, 0.75], help="of masking, MLM's"
    )
    parser.add_argument("--samples", type=int, default=5000, help="captions, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the samples and of masking")
    parser.add_argument("--output", required=True, type=Path, help="folder of results")


def run(args: argparse.Namespace) -> None:
    """Measure, print and write ``vision.json``, ``vision.md`` and ``report.html``.

    Raises:
        ValueError: for rates out of range, or a model or checkpoint without a language head.
    """
    wrong = [rate for rate in args.rates if not 0.0 < rate <= 1.0]
    if wrong or args.samples < 1:
        raise ValueError(f"--rates are above 0 up to 1, --samples at least 1; got {wrong}")
    named = named_checkpoints(args.checkpoint)
    first = next(iter(named.values()), None)
    opened = open_config(argparse.Namespace(**{**vars(args), "checkpoint": first}))
    size = len(opened.data)
    count = min(size, args.samples)
    numbers = np.sort(np.random.default_rng((args.seed, 4)).choice(size, count, replace=False))
    reader = Reader(opened.model, args.seed)
    rates = sorted(set(args.rates)) if reader.masks else [None]
    images = opened.data.image_ids[numbers]
    rows, missing = [], None
    for name in named or ["the config's"]:
        if named:
            lacking = load(opened.model, named[name])
            if missing not in (None, lacking):
                raise ValueError(f"{named[name]} holds other parts of the model than {first}")
            missing = lacking
        counts = measure(opened, reader, numbers, rates, name)
        rows += [
            {"model": name, "rate": rate, **figures_of(one, images)}
            for rate, one in zip(rates, counts, strict=True)
        ]
    if is_main_process():
        write(args, rows, named)


def named_checkpoints(given: Sequence[str]) -> dict[str, str]:
    """Paths by name: ``NAME=PATH``, or a path, named by its folder or file.

    Raises:
        ValueError: if two have one name.
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
            raise ValueError(f"two checkpoints are named {name}: write --checkpoint NAME=PATH")
        named[name] = path
    return named


def load(model: Any, path: str) -> frozenset[str]:
    """Load a checkpoint into a model; the names of what it does not hold.

    Raises:
        ValueError: if it leaves random what reads captions.
    """
    missing = model.load_checkpoint(path).missing_keys
    lost = [name for name in left_random(model, missing) if name.startswith(READING)]
    if lost:
        raise ValueError(
            f"{path} lacks {len(lost)} weights by which tokens are predicted, such as {lost[0]}: "
            "name a checkpoint of pre-training with the language loss"
        )
    return frozenset(missing)


def measure(
    opened: Opened, reader: Reader, numbers: np.ndarray, rates: Sequence[Any], name: str
) -> np.ndarray:
    """`COUNTS` ``(R, 5, S)`` of S samples at R rates; all ranks must call it and get all.

    A sample that cannot be read counts nothing.
    """
    size = int(opened.cfg.run_cfg.batch_size_eval)
    batches = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    mine = batches[get_rank() :: get_world_size()]
    counts = torch.zeros(len(rates), len(COUNTS), len(numbers), dtype=torch.int64)
    quiet = not is_main_process()
    bar = tqdm(total=sum(map(len, mine)), unit=" samples", desc=name, disable=quiet)
    for batch in opened.data.batches(mine):
        asked = np.asarray(batch["index"])
        samples = to_device(batch, opened.device)
        with torch.inference_mode(), opened.autocast():
            found = reader.count(samples["image"], samples["text_input"], asked, rates)
        readable = torch.tensor([not error for error in batch["load_error"]])
        counts[..., torch.from_numpy(np.searchsorted(numbers, asked))] = found.cpu() * readable
        bar.update(len(asked))
    bar.close()
    if get_world_size() > 1:
        together = counts.to(opened.device)
        dist.all_reduce(together)
        counts = together.cpu()
    return counts.numpy()


def figures_of(counts: np.ndarray, clusters: np.ndarray) -> dict[str, Any]:
    """Accuracies, 0 to 1, with and without the image, and UoV, with 95 % intervals.

    Args:
        counts: `COUNTS` ``(5, S)``.
        clusters: ``(S,)``, the image of every sample.
    """
    one = dict(zip(COUNTS, counts, strict=True))
    figures: dict[str, Any] = {"tokens": int(one["asked"].sum())}
    for k in (1, 5):
        seen, blind = one[f"hits_{k}"], one[f"hits_{k}_without"]
        for kind, hits in (("uov", seen - blind), ("accuracy", seen), ("without", blind)):
            interval = ratio if kind == "uov" else clustered
            figures[f"{kind}_{k}"] = share_of(hits, one["asked"], clusters, interval)
    return figures


def write(
    args: argparse.Namespace, rows: Sequence[Mapping[str, Any]], named: Mapping[str, str]
) -> None:
    """Write the figures as JSON, Markdown and a page, and print the table."""
    told = {
        **about(args),
        "checkpoints": dict(named),
        "samples": args.samples,
        "seed": args.seed,
    }
    write_json(args.output / "vision.json", {**told, "rows": list(rows)})
    columns = [title.replace("without the image", "w/o image") for title in FIGURES.values()]
    table = Table("Usage of vision, %", ["model", "masked", "tokens", *columns])
    table.note = "In brackets 95 % intervals; the images are the independent draws."
    for row in rows:
        cells = [_told(row[key]) for key in FIGURES]
        table.rows.append([row["model"], _rate(row["rate"]), row["tokens"], *cells])
    text = markdown_table(table)
    write_text(args.output / "vision.md", f"# {table.title}\n\n{text}\n\n{table.note}\n")
    page = write_report(
        args.output / "report.html",
        title="Usage of vision",
        intro=(__doc__ or "").split("\n\n", 1)[1],
        tables=[table],
        curves=[_curve(key, rows) for key in FIGURES if rows[0]["rate"] is not None],
        settings=told,
    )
    print(text)
    tell("written: %s", page)


def _rate(rate: float | None) -> str:
    return "next token" if rate is None else f"{100 * rate:g} %"


def _told(figure: Mapping[str, float]) -> str:
    share, low, high = (100 * figure[key] for key in ("share", "low", "high"))
    return f"{share:.1f} ({low:.1f} to {high:.1f})"


def _curve(key: str, rows: Sequence[Mapping[str, Any]]) -> Curve:
    curve = Curve(FIGURES[key], "masked (%)", "%")
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        points = [100 * row["rate"] for row in own]
        curve.series.append(Series(name, points, [100 * row[key]["share"] for row in own]))
    return curve
