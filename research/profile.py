"""Measure how the soft labels of ITC are distributed over a mini-batch and a queue (MAFA Table 2,
Appendix D).

The labels of every anchor are sorted and averaged over anchors. The means are summed over the first
few ranks, the rest of the mini-batch, and the queue. If nearly all of the label goes to the first
few ranks, none is left for the false negatives of a grouped mini-batch.

Samples are encoded once by a checkpoint and arranged in random or grouped mini-batches; nothing is
trained. The momentum encoders are copies of the encoders unless the config trains momentum encoders
(model.mafa.soft_labels.type=momentum) and the checkpoint contains them. The queue holds the samples
of the previous mini-batches. Sizes and the weight of each kind of label are the config's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lavis_mafa.algorithm.backbone import Backbone, backbone_of
from lavis_mafa.algorithm.grit import grouped_plan
from lavis_mafa.algorithm.mining import MiningRule, find_connections
from lavis_mafa.algorithm.pickers import hardest
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.commands.arguments import add_config_arguments, add_sampling_arguments, number
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.io.processes import progress
from lavis_mafa.mining.features import make_features
from lavis_mafa.mining.hard_negatives import Sampling, grouping_of, order_of
from lavis_mafa.mining.model_and_data import (
    ModelAndData,
    data_source,
    load_model_and_data,
    log_on_main,
)
from lavis_mafa.pages.charts import Table
from lavis_mafa.pages.tables import markdown_table
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
TOP = 5  # ranks in the first group, as in the paper


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_arguments(parser)
    add_sampling_arguments(parser)
    parser.add_argument(
        "--mini-batches", type=number(1), default=50, help="number to measure (default: 50)"
    )
    parser.add_argument(
        "--queue-size", type=number(0), help="of momentum (default: model.queue_size)"
    )
    parser.add_argument("--output", required=True, type=Path, help="folder for the results")


def run(args: argparse.Namespace) -> None:
    """Measure, print and write ``profile.json`` and ``profile.md``.

    Raises:
        ValueError: for arguments that are out of range or do not fit together, or a model without
            ITC and ITM.
    """
    loaded = load_model_and_data(args)
    batch = int(loaded.cfg.run_cfg.batch_size_train)
    if batch <= TOP:
        raise ValueError(f"run.batch_size_train {batch}: expected more than {TOP}")
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
    """Measure the profiles of all kinds of labels in the chosen samplings."""
    try:
        backbone = backbone_of(loaded.model)
    except TypeError as error:
        raise ValueError(f"soft labels of ITC need ALBEF, BLIP or BLIP-2: {error}") from error
    settings = getattr(loaded.model, "settings", StepSettings())
    alphas = {
        "one_hot": None,
        "smoothed": settings.soft_labels.alpha,
        "consistency": settings.soft_labels.weight,
        "momentum": float(loaded.cfg.model_cfg.get("alpha", 0.4)),
    }
    rows = []
    for sampling, stream in _streams(loaded, args, batch).items():
        own = []
        for kind, alpha in alphas.items():
            queue = stream.queue_size if kind == "momentum" else 0
            profile = LabelProfile(batch + queue, (TOP, batch))
            own.append(Row(kind, alpha, sampling, queue, profile))
        first = -(-stream.queue_size // batch)
        steps = range(first, min(len(stream.order) // batch, first + args.mini_batches))
        for step in progress(steps, f"labels, {sampling}", unit=" mini-batches"):
            for row in own:
                _add(row, step, stream, backbone, settings, loaded.device)
        rows += own
    return rows


def _add(
    row: Row,
    step: int,
    stream: Stream,
    backbone: Backbone,
    settings: StepSettings,
    device: torch.device,
) -> None:
    """Add a mini-batch to a profile."""
    momentum = row.kind == "momentum"
    compared, positives = stream.compare(step, backbone, settings.same_image, momentum, device)
    own = torch.arange(len(positives), device=device)
    sims = compared.i2t[:, : len(own)], compared.t2i[:, : len(own)]
    pickers = [hardest, hardest]  # without a judge nothing is made of what they pick
    i2t, t2i, _ = find_connections(*sims, positives, own, pickers, MiningRule(), None)
    row.profile.add(labels_of(row.kind, row.alpha or 0.0, compared, i2t, t2i, settings))


def _streams(loaded: ModelAndData, args: argparse.Namespace, batch: int) -> dict[str, Stream]:
    """Return a stream for each sampling; all use the same features."""
    grit, data = loaded.cfg.run_cfg.grit, loaded.data
    space = int(grit.search_space)
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
            grouping_of(loaded.cfg.run_cfg),
        )
        if kind == "grit":
            # As in training: the order of grouped mini-batches is shuffled, not their content.
            none, rng = np.empty(0, np.int64), np.random.default_rng((args.seed, 2))
            order = grouped_plan([order], none, batch, rng).order
        streams[kind] = Stream(order, batch, queue, features, momentum_features, ids)
    return streams


def _write(args: argparse.Namespace, batch: int, rows: list[Row]) -> None:
    settings = data_source(args, checkpoint=args.checkpoint, seed=args.seed)
    columns = [f"top 1–{TOP}", f"{TOP + 1}–B", "queue"]
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
