"""A page that shows a training run, or what was counted or mined.

FOLDER is what `train.py` wrote into (with its log.jsonl), also while it is still training, or the
--output of `count` or `mine` (with its judged.npz). The page is one file that asks for nothing
outside itself.

    python -m lavis_mafa.analysis report output/albef_toy/20260101120000
"""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lavis_mafa.analysis.corpus import open_data, recorded_data
from lavis_mafa.analysis.gallery import connections_of, evenly, shown_data
from lavis_mafa.analysis.judged import FILE, Judged
from lavis_mafa.analysis.judged_report import report_of_judged
from lavis_mafa.analysis.run_records import RunRecords, read_run
from lavis_mafa.pages.report import Cell, Curve, Judgements, Series, Table, write_report
from lavis_mafa.runners.run_log import LOG

# `count` and `mine` write a report.html of their own.
RUN_PAGE, JUDGED_PAGE = "report.html", "judged.html"
SHARE = (0.0, 1.0)
POINTS = 300  # of a curve over steps: each is the mean of as many steps as it takes
SHARES = 60  # of a share over steps: a mini-batch has few hard negatives
EPOCHS = 40  # that the histogram offers one by one
DIRECTIONS = {"i2t": "image → text", "t2i": "text → image"}
RATES = {
    "False negatives among the hard negatives": {
        "false_negative_rate": "by truth",
        "false_negative_rate_by_con_d": "by Con-D",
    },
    "False negatives that ITM learns as no match": {"false_negative_rate_in_itm": "by truth"},
    "Con-D's precision and recall": {
        "con_d_precision": "precision",
        "con_d_recall": "recall",
    },
    "Ambiguous hard negatives": {"ambiguous_rate": "ambiguous"},
    "Con-D's mean probability": {"con_d_probability": "mean"},
}
SCORES = {
    "retrieval": re.compile(r"(txt|img)_r\d+$"),
    "retrieval against the full truth": re.compile(r"valid_|.*_map_r$|.*_auc$"),
    "other figures": re.compile(""),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="of a run, or the --output of count or mine")
    parser.add_argument(
        "--output", type=Path, help=f"file to write; else {RUN_PAGE} or {JUDGED_PAGE} in FOLDER"
    )
    parser.add_argument(
        "--connections", type=int, default=400, metavar="N", help="in the gallery, at most (400)"
    )
    parser.add_argument("--no-images", action="store_true", help="captions without pictures")


def run(args: argparse.Namespace) -> None:
    path = write_page(args.folder, args.output, args.connections, not args.no_images)
    print(f"wrote {path}")


def write_page(
    folder: Path, output: Path | None = None, connections: int = 400, images: bool = True
) -> Path:
    """Write the page of a run or of judged pairs, and return its path.

    Args:
        folder: holds ``log.jsonl`` or ``judged.npz``.
        output: the file; None: `RUN_PAGE` or `JUDGED_PAGE` in the folder.
        connections: how many the gallery holds at most.
        images: whether pictures are embedded.

    Raises:
        FileNotFoundError: if the folder holds neither, naming folders below it that do.
        ValueError: for a ``judged.npz`` of another form.
    """
    if (folder / FILE).is_file():
        judged = Judged.load(folder)
        notes: list[str] = []
        about = judged.about
        show = shown_data(
            lambda: open_data(about["cfg_path"], about["options"], about.get("split", "train")),
            images,
            notes,
        )
        return report_of_judged(
            judged,
            show,
            output or folder / JUDGED_PAGE,
            f"Judged pairs: {folder.resolve().name}",
            notes=notes,
            limit=connections,
        )
    if not (folder / LOG).is_file():
        below = [str(p.parent) for name in (LOG, FILE) for p in folder.glob(f"*/{name}")]
        others = f"; there are {', '.join(sorted(below))}" if below else ""
        raise FileNotFoundError(
            f"{folder} holds neither a run (log.jsonl) nor judged pairs ({FILE}){others}"
        )
    return report_of_run(read_run(folder), output or folder / RUN_PAGE, connections, images)


def report_of_run(
    records: RunRecords, path: Path, connections: int = 400, images: bool = True
) -> Path:
    """Write the page of a training run, and return its path; see `write_page`."""
    config = records.config or {}
    rule = ((config.get("model") or {}).get("mafa") or {}).get("connections") or {}
    notes = [
        f"Curves over steps have up to {POINTS} points, those of shares up to {SHARES}: where "
        "there are more steps, each is the mean of neighbouring ones."
    ]
    chosen = evenly(records.connections, connections)
    cards = []
    if chosen:
        show = shown_data(lambda: recorded_data(records.config), images, notes)
        cards = list(connections_of(chosen, show))
        notes.append(
            f"The gallery holds {len(chosen):,} of the {len(records.connections):,} connections "
            "that the run wrote down: positives and ambiguous ones, up to run.log_connections of "
            "them an epoch. The histogram holds every probability."
        )
        if show.missing:
            notes.append(f"{show.missing} pictures could not be read; first: {show.problem}")
    return write_report(
        path,
        title=f"Training run: {records.folder.resolve().name}",
        tables=[_about(records), *_evaluations(records)],
        curves=[*_over_steps(records), *_over_epochs(records), *_scores(records)],
        connections=cards,
        judged=_judgements(records.histograms),
        thresholds=(float(rule.get("low", 0.5)), float(rule.get("high", 0.8))),
        notes=notes,
        settings=config,
    )


def _about(records: RunRecords) -> Table:
    config = records.config or {}
    model, run = config.get("model") or {}, config.get("run") or {}
    con_d = (model.get("mafa") or {}).get("con_d") or {}
    epochs, wanted = len(records.epochs), run.get("max_epoch")
    state = "finished" if epochs == wanted else "not at its end: stopped, or still going"
    rows: list[list[Cell]] = [
        ["model", f"{model.get('arch')}, {model.get('model_type')}"],
        ["Con-D", str(con_d.get("arch") or "none")],
        ["data", ", ".join(config.get("datasets") or {})],
        ["epochs", f"{epochs} of {wanted}, {state}"],
        ["steps", f"{records.steps:,}"],
        ["first and last record", f"{_when(records.first)} to {_when(records.last)}"],
    ]
    return Table("", ["run", records.folder.resolve().name], rows)


def _when(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%d %H:%M UTC")


# Curves


def _over_steps(records: RunRecords) -> Iterable[Curve]:
    columns = records.columns
    losses = [name for name in columns if name.startswith("loss")]
    parts: dict[str, dict[str, str]] = {
        "Loss": {name: name.removeprefix("loss_") for name in losses},
        "Learning rate": {"lr": "learning rate"},
        "Temperature": {"temperature": "temperature"},
    }
    for title, names in parts.items():
        series = [_mean(columns, name, text) for name, text in names.items() if name in columns]
        yield from _drawn(Curve(title, "step", title.lower(), series))
    shares = {("false", "picked"): "by truth", ("found", "judged"): "by Con-D"}
    series = [
        _share(columns, f"{part}_{d}", f"{whole}_{d}", f"{text}, {arrow}")
        for (part, whole), text in shares.items()
        for d, arrow in DIRECTIONS.items()
        if f"{part}_{d}" in columns and np.nansum(columns[f"{whole}_{d}"])
    ]
    yield from _drawn(Curve("False negatives over steps", "step", "share", series, bounds=SHARE))


def _drawn(curve: Curve) -> Iterable[Curve]:
    """The curve without series that have no value, if any is left."""
    curve.series = [s for s in curve.series if any(y is not None for y in s.y)]
    return [curve] if curve.series else []


def _windows(columns: Mapping[str, np.ndarray], count: int) -> tuple[np.ndarray, list[float]]:
    """Where up to ``count`` windows of steps begin, and the last step of each."""
    steps = columns["global_step"]
    begins = np.arange(0, len(steps), -(-len(steps) // count) or 1)
    ends = np.append(begins[1:], len(steps)) - 1
    return begins, steps[ends].astype(int).tolist()


def _mean(columns: Mapping[str, np.ndarray], name: str, text: str) -> Series:
    begins, x = _windows(columns, POINTS)
    if not x:
        return Series(text)
    there = ~np.isnan(columns[name])
    total = np.add.reduceat(np.where(there, columns[name], 0.0), begins)
    count = np.add.reduceat(there.astype(float), begins)
    return Series(text, list(x), _divided(total, count))


def _share(columns: Mapping[str, np.ndarray], part: str, whole: str, text: str) -> Series:
    begins, x = _windows(columns, SHARES)
    sums = (np.add.reduceat(np.nan_to_num(columns[name]), begins) for name in (part, whole))
    return Series(text, list(x), _divided(*sums))


def _divided(parts: np.ndarray, wholes: np.ndarray) -> list[float | None]:
    pairs = zip(parts.tolist(), wholes.tolist(), strict=True)
    return [part / whole if whole else None for part, whole in pairs]


def _over_epochs(records: RunRecords) -> Iterable[Curve]:
    for title, names in RATES.items():
        series = [
            _by_epoch(records.epochs, f"{name}_{d}", f"{text}, {arrow}")
            for name, text in names.items()
            for d, arrow in DIRECTIONS.items()
        ]
        yield from _drawn(Curve(title, "epoch", "share", series, bounds=SHARE))


def _by_epoch(epochs: Mapping[int, Mapping[str, Any]], name: str, text: str) -> Series:
    at = sorted(epochs)
    return Series(text, list(map(float, at)), [_number(epochs[epoch].get(name)) for epoch in at])


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# Evaluations


def _scores(records: RunRecords) -> Iterable[Curve]:
    for split in dict.fromkeys(split for split, _ in records.evaluations):
        by_epoch = {
            epoch: figures
            for (own, epoch), figures in records.evaluations.items()
            if own == split and isinstance(epoch, int)
        }
        left = _names(by_epoch.values())
        for title, pattern in SCORES.items():
            names = [name for name in left if pattern.match(name)]
            left = [name for name in left if name not in names]
            series = [_by_epoch(by_epoch, name, name) for name in names]
            yield from _drawn(Curve(f"Evaluation of {split}: {title}", "epoch", "", series))


def _names(figures: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of all figures that are numbers."""
    named = (name for one in figures for name, value in one.items() if _number(value) is not None)
    return list(dict.fromkeys(named))


def _evaluations(records: RunRecords) -> Iterable[Table]:
    """A table by split: figures down, across its last evaluations and before them the best one by
    ``agg_metrics``, by which runs keep a checkpoint."""
    for split in dict.fromkeys(split for split, _ in records.evaluations):
        told = {e: f for (own, e), f in records.evaluations.items() if own == split}
        epochs = list(told)[-6:]
        ranked = {e: _number(f.get("agg_metrics")) for e, f in told.items()}
        scores = {e: score for e, score in ranked.items() if score is not None}
        best = max(scores, key=lambda epoch: scores[epoch]) if len(scores) > 1 else None
        if best is not None and best not in epochs:
            epochs = [best, *epochs]
        rows: list[list[Cell]] = [
            [name, *(_number(told[epoch].get(name)) for epoch in epochs)]
            for name in _names(told.values())
        ]
        head = [f"epoch {epoch}" if isinstance(epoch, int) else str(epoch) for epoch in epochs]
        head = [f"{h}, best" if e == best else h for h, e in zip(head, epochs, strict=True)]
        yield Table(f"Evaluation of {split}", ["figure", *head], rows)


# Con-D's probabilities


def _judgements(histograms: Mapping[int, Mapping[str, Any]]) -> list[Judgements]:
    """All epochs together, by direction, and the epochs one by one."""
    if not histograms:
        return []
    bins = int(histograms[max(histograms)]["bins"])
    there = {e: histograms[e] for e in sorted(histograms) if histograms[e]["bins"] == bins}

    def counts(epochs: Iterable[int], directions: Iterable[str]) -> np.ndarray:
        total = np.zeros((3, bins), np.int64)
        for epoch in epochs:
            for direction in directions:
                told = there[epoch].get(direction) or {}
                for row, truth in enumerate(("true", "false", "unknown")):
                    total[row] += np.asarray(told.get(truth, 0), np.int64)
        return total

    parts = [Judgements("all epochs, both directions", counts=counts(there, DIRECTIONS))]
    for direction, arrow in DIRECTIONS.items():
        parts.append(Judgements(f"all epochs, {arrow}", counts=counts(there, [direction])))
    for epoch in list(there)[-EPOCHS:]:
        parts.append(Judgements(f"epoch {epoch}", counts=counts([epoch], DIRECTIONS)))
    return parts
