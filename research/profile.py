"""Measure how the soft labels of ITC are distributed over a mini-batch and a queue (MAFA Table 2,
Appendix D).

The labels of every anchor are sorted and averaged over anchors. The means are summed over the first
few ranks, the rest of the mini-batch, and the queue. If nearly all of the label goes to the first
few ranks, none is left for the false negatives of a grouped mini-batch.

Samples are encoded once by a checkpoint and arranged in random or grouped mini-batches; nothing is
trained. The momentum encoders are copies of the encoders unless the config trains momentum encoders
(model.mafa.soft_labels.type=momentum) and the checkpoint contains them. The queue holds the samples
of the previous mini-batches.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lavis_mafa.algorithm.backbone import Backbone
from lavis_mafa.algorithm.grit import grouped_plan
from lavis_mafa.algorithm.mining import Judge, find_connections
from lavis_mafa.algorithm.pickers import PICKERS, hardest
from lavis_mafa.algorithm.scores import CON_D
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.commands.arguments import add_config_arguments, add_sampling_arguments
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.io.processes import progress
from lavis_mafa.mining.features import make_features
from lavis_mafa.mining.hard_negatives import Sampling, hardness_of, order_of
from lavis_mafa.mining.model_and_data import (
    ModelAndData,
    data_source,
    load_model_and_data,
    log_on_main,
)
from lavis_mafa.models.con_d.build import build_discriminator
from lavis_mafa.models.con_d.discriminators import Oracle
from lavis_mafa.models.families import backbone_of
from lavis_mafa.pages.charts import Table
from lavis_mafa.pages.tables import markdown_table
from lavis_mafa.runners.loaders import to_device
from research.label_profile import LabelProfile, Stream, labels_of

NAMES = {
    "one_hot": "one-hot",
    "smoothed": "S-ITC",
    "consistency": "consistency loss",
    "momentum": "momentum distillation",
}
# MAFA Table 2: B = 96, Q = 48,000, last epoch, grouped mini-batches.
PAPER: list[list[Any]] = [
    ["S-ITC", "0.5260", "0.4740", None],
    ["consistency loss", "0.9822", "0.0178", None],
    ["momentum distillation", "0.6746", "0.0009", "0.3245"],
]
KINDS = ("one_hot", "smoothed", "consistency", "momentum")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_arguments(parser)
    parser.add_argument(
        "--labels", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of soft labels"
    )
    parser.add_argument(
        "--alpha",
        nargs="+",
        type=float,
        help="weight of the soft part of the labels (default: soft_labels.alpha, "
        "soft_labels.weight or model.alpha of the config)",
    )
    add_sampling_arguments(parser)
    parser.add_argument(
        "--mini-batches", type=int, default=50, help="number to measure (default: 50)"
    )
    parser.add_argument("--batch-size", type=int, help="(default: run.batch_size_train)")
    parser.add_argument("--queue-size", type=int, help="of momentum (default: model.queue_size)")
    parser.add_argument("--top", type=int, default=5, help="ranks in the first group (default: 5)")
    parser.add_argument(
        "--convert",
        action="store_true",
        help="let the config's Con-D convert false negatives, as in training",
    )
    parser.add_argument("--output", required=True, type=Path, help="folder for the results")


def run(args: argparse.Namespace) -> None:
    """Measure, print and write ``profile.json`` and ``profile.md``.

    Raises:
        ValueError: for arguments that are out of range or do not fit together, or a model without
            ITC and ITM.
    """
    if args.mini_batches < 1 or (args.queue_size or 0) < 0:
        raise ValueError(
            f"--mini-batches {args.mini_batches} --queue-size {args.queue_size}: expected at least "
            "1 and at least 0"
        )
    wrong = [a for a in args.alpha or [] if not 0.0 <= a <= 1.0]
    if wrong:
        raise ValueError(f"--alpha {wrong}: expected 0 to 1")
    loaded = load_model_and_data(args)
    batch = args.batch_size or int(loaded.cfg.run_cfg.batch_size_train)
    if not 1 <= args.top < batch:
        raise ValueError(
            f"--top {args.top}: expected at least 1 and below the mini-batch size of {batch}"
        )
    with torch.inference_mode():
        found = measure(loaded, args, batch)
    _write(args, batch, found)


@dataclass
class Row:
    """A row of the table: kind of labels, its alpha, sampling, Q and the profile."""

    kind: str
    alpha: float | None
    sampling: str
    queue_size: int
    profile: LabelProfile


def measure(loaded: ModelAndData, args: argparse.Namespace, batch: int) -> list[Row]:
    """Measure the requested profiles."""
    model, device = loaded.model, loaded.device
    try:
        backbone = backbone_of(model)
    except TypeError as error:
        raise ValueError(f"soft labels of ITC need ALBEF, BLIP or BLIP-2: {error}") from error
    settings = getattr(model, "settings", StepSettings())
    judge_of = _judges(loaded) if args.convert else None
    streams = _streams(loaded, args, batch)
    soft, model_cfg = settings.soft_labels, loaded.cfg.model_cfg
    own = {
        "smoothed": soft.alpha,
        "consistency": soft.weight,
        "momentum": float(model_cfg.get("alpha", 0.4)),
    }
    rows = []
    for sampling, stream in streams.items():
        own_rows = []
        for kind in dict.fromkeys(args.labels):
            queue = stream.queue_size if kind == "momentum" else 0
            alphas = [None] if kind == "one_hot" else dict.fromkeys(args.alpha or [own[kind]])
            for alpha in alphas:
                profile = LabelProfile(batch + queue, (args.top, batch))
                own_rows.append(Row(kind, alpha, sampling, queue, profile))
        first = -(-stream.queue_size // batch)
        steps = range(first, min(len(stream.order) // batch, first + args.mini_batches))
        judged = [stream.features.numbers[stream.mini_batch(s)] for s in steps]
        judges = iter(judge_of(judged)) if judge_of else None
        for step in progress(steps, f"labels, {sampling}", unit=" mini-batches"):
            judge = next(judges) if judges else None
            _add(own_rows, step, stream, backbone, settings, judge, device)
        rows += own_rows
    return rows


def _add(
    rows: list[Row],
    step: int,
    stream: Stream,
    backbone: Backbone,
    settings: StepSettings,
    judge: Judge | None,
    device: torch.device,
) -> None:
    """Add a mini-batch to the profiles of its sampling."""
    entry = PICKERS.entry(settings.negatives)
    # A class may hold state of a training, of which the features know nothing.
    picker = hardest if isinstance(entry.value, type) else settings.make(entry)
    for momentum in (False, True):
        selected = [row for row in rows if (row.kind == "momentum") == momentum]
        if not selected:
            continue
        compared, positives = stream.compare(step, backbone, settings.same_image, momentum, device)
        own = torch.arange(len(positives), device=device)
        torch.manual_seed(step)  # a random picker draws the same for all kinds of labels
        # A score of the model in training would differ from the one that made these features.
        by_thresholds = replace(settings.connections, score=CON_D, rule="thresholds")
        i2t, t2i, _ = find_connections(
            compared.i2t[:, : len(own)],
            compared.t2i[:, : len(own)],
            *(positives, own, [picker, picker], by_thresholds, judge),
        )
        for row in selected:
            row.profile.add(labels_of(row.kind, row.alpha or 0.0, compared, i2t, t2i, settings))


def _streams(loaded: ModelAndData, args: argparse.Namespace, batch: int) -> dict[str, Stream]:
    """Return a stream for each sampling; all use the same features."""
    grit, data = loaded.cfg.run_cfg.grit, loaded.data
    space = int(grit.search_space)
    queue = 0
    if "momentum" in args.labels:
        given = args.queue_size
        queue = int(loaded.cfg.model_cfg.get("queue_size", 57600) if given is None else given)
    # Samples that fill the queue before the first measured mini-batch, and the mini-batches.
    needed = -(-queue // batch) * batch + args.mini_batches * batch
    if "grit" in args.sampling:
        needed = -(-needed // space) * space  # whole search spaces
    chosen = np.random.default_rng((args.seed, 3)).permutation(len(data))[:needed]
    numbers = np.sort(chosen)
    folder = args.output / f"features_{len(numbers)}"
    features = momentum_features = make_features(loaded, numbers, folder)
    momentum: Any = getattr(loaded.model, "momentum_encoders", None)
    if queue and momentum is not None:
        with_momentum = replace(loaded, model=momentum.backbone.model)
        momentum_features = make_features(with_momentum, numbers, folder / "momentum")
    usable = len(features) // batch
    if usable < 1:
        raise ValueError(f"{len(features)} samples do not fill a mini-batch of {batch}")
    room = (usable - min(args.mini_batches, usable)) * batch
    if queue > room:
        log_on_main("the queue of %d is shortened to %d: the data are too few", queue, room)
        queue = room
    ids = data.image_ids[features.numbers]
    apart = ids if grit.same_image == "apart" else None
    streams = {}
    for kind in dict.fromkeys(args.sampling):
        sampling = Sampling(kind, batch, min(space, len(features)) if kind == "grit" else None)
        order = order_of(
            *(sampling, features.vectors, features.texts, args.seed, apart),
            int(grit.queue_size),
            *hardness_of(loaded.cfg.run_cfg),
        )
        if kind == "grit":
            # As in training: the order of grouped mini-batches is shuffled, not their content.
            none, rng = np.empty(0, np.int64), np.random.default_rng((args.seed, 2))
            order = grouped_plan([order], none, batch, rng).order
        streams[kind] = Stream(order, batch, queue, features, momentum_features, ids)
    return streams


def _judges(loaded: ModelAndData) -> Any:
    """Return a function from mini-batches (sample numbers) to an iterator of their judges."""
    mafa = loaded.cfg.model_cfg.get("mafa") or {}
    con_d: Any = build_discriminator(mafa.get("con_d"), loaded.cfg.model_cfg)
    if con_d is None:
        raise ValueError("--convert needs a Con-D: set model.mafa.con_d in the config")
    if isinstance(con_d, Oracle):
        con_d.truth = loaded.data.truth
    own_view = getattr(con_d, "wants_view", lambda model: False)(loaded.model)

    def judges_of(batches: list[NDArray[Any]]) -> Any:
        for batch in loaded.data.batches(batches, con_d.processor if own_view else None):
            samples = to_device(batch, loaded.device)
            yield lambda images, texts, samples=samples: con_d.judge(samples, images, texts)

    return judges_of


def _write(args: argparse.Namespace, batch: int, rows: list[Row]) -> None:
    top = args.top
    settings = {
        **data_source(args),
        "checkpoint": args.checkpoint,
        "convert": args.convert,
        "seed": args.seed,
    }
    columns = [f"top 1–{top}", f"{top + 1}–B", "queue"]
    table = Table(
        f"Sums of the mean sorted labels, B = {batch}",
        ["labels", "alpha", "mini-batches", "Q", "anchors", *columns],
        note="± standard deviation over anchors (images and texts).",
    )
    stored = []
    for row in rows:
        groups = row.profile.groups()
        cells: list[str | None] = [f"{mean:.4f} ± {sd:.4f}" for mean, sd in groups]
        cells += [None] * (3 - len(cells))
        name = NAMES[row.kind]
        table.rows.append(
            [name, row.alpha, row.sampling, row.queue_size or None, row.profile.anchors, *cells]
        )
        stored.append(
            {
                "labels": row.kind,
                "alpha": row.alpha,
                "sampling": row.sampling,
                "batch_size": batch,
                "queue_size": row.queue_size,
                "anchors": row.profile.anchors,
                "groups": [{"sum": mean, "deviation": sd} for mean, sd in groups],
                "mean_sorted": row.profile.mean[:batch].tolist(),
            }
        )
    paper = Table(
        "For comparison: MAFA Table 2 (B = 96, Q = 48,000, last epoch, grouped)",
        ["labels", "top 1–5", "6–B", "queue"],
        PAPER,
    )
    write_json(args.output / "profile.json", {**settings, "rows": stored})
    text = "\n\n".join(f"## {one.title}\n\n{markdown_table(one)}" for one in (table, paper))
    write_text(args.output / "profile.md", f"{text}\n\n{table.note}\n")
    print(text)
