"""Write the page of a training run or of judged pairs; see `lavis_mafa.commands.report`."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_mafa.algorithm.mining import DIRECTIONS
from lavis_mafa.io.downloads import go_offline
from lavis_mafa.mining.gallery import connections_of, evenly, view_data
from lavis_mafa.mining.judge_check import self_check_tables
from lavis_mafa.mining.judged_pairs import FILE, Judged
from lavis_mafa.mining.judged_report import report_of_judged
from lavis_mafa.mining.model_and_data import data_of_judged, recorded_data
from lavis_mafa.mining.run_records import RunRecords, read_run
from lavis_mafa.pages.charts import Cell, Curve, Series, Table, as_number
from lavis_mafa.pages.report_page import Judgements, write_report
from lavis_mafa.runners.run_log import LOG, mean_of

# Not the same name: `count` and `mine` write a report.html themselves.
RUN_PAGE, JUDGED_PAGE = "report.html", "judged.html"
_SHARE = (0.0, 1.0)
POINTS = 300  # of a curve over steps; each point is the mean of consecutive steps
_SHARE_POINTS = 60  # of a share over steps: fewer, since a mini-batch has few hard negatives
_EPOCHS = 40  # number of last epochs with a histogram of their own
_LIFT = "Con-D's lift: precision divided by the base rate"
_RATES = {
    "False negatives among the hard negatives": {
        "false_negative_rate": "by truth",
        "false_negative_rate_by_con_d": "by Con-D",
        "false_negative_rate_by_score": "by score",
    },
    "False negatives with the ITM label no match": {"false_negative_rate_in_itm": "by truth"},
    "Con-D's precision and recall": {
        "con_d_precision": "precision",
        "con_d_recall": "recall",
        "con_d_base_rate": "base rate",
    },
    _LIFT: {"con_d_lift": "lift"},
    "Precision and recall of the score": {
        "score_precision": "precision",
        "score_recall": "recall",
        "score_base_rate": "base rate",
    },
    "Ambiguous hard negatives": {"ambiguous_rate": "ambiguous"},
    "Con-D's mean probability": {"con_d_probability": "mean"},
    "Mean score": {"score": "mean"},
}
SCORES = {
    "retrieval": re.compile(r"(txt|img)_r\d+$"),
    "retrieval against the full truth": re.compile(r"valid_|.*_map_r$|.*_auc$"),
    "other figures": re.compile(""),
}


def write_page(
    folder: Path, output: Path | None = None, connections: int = 400, images: bool = True
) -> Path:
    """Write the page of a run or of judged pairs, and return its path. Nothing is fetched.

    Args:
        folder: contains ``log.jsonl`` or ``judged.npz``.
        output: the file; None: `RUN_PAGE` or `JUDGED_PAGE` in the folder.
        connections: maximum number in the gallery.
        images: whether to embed images.

    Raises:
        FileNotFoundError: if the folder contains neither; names subfolders that do.
        ValueError: if ``judged.npz`` has another form.
    """
    go_offline()
    if (folder / FILE).is_file():
        judged = Judged.load(folder)
        notes: list[str] = []
        show = view_data(lambda: data_of_judged(judged, folder / FILE), images, notes)
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
        others = f"; did you mean {', '.join(sorted(below))}?" if below else ""
        raise FileNotFoundError(
            f"{folder} contains neither a run (log.jsonl) nor judged pairs ({FILE}){others}"
        )
    return report_of_run(read_run(folder), output or folder / RUN_PAGE, connections, images)


def report_of_run(
    records: RunRecords, path: Path, connections: int = 400, images: bool = True
) -> Path:
    """Write the page of a training run and return its path; see `write_page`."""
    config = records.config or {}
    rule = ((config.get("model") or {}).get("mafa") or {}).get("connections") or {}
    notes = [
        f"Curves over steps have up to {POINTS} points, those of shares up to {_SHARE_POINTS}: "
        "with more steps, each point is the mean of consecutive steps."
    ]
    chosen = evenly(records.connections, connections)
    cards = []
    if chosen:
        show = view_data(lambda: recorded_data(records.folder), images, notes)
        cards = list(connections_of(chosen, show, score=records.score))
        notes.append(
            f"The gallery shows {len(chosen):,} of the {len(records.connections):,} connections "
            "that the run logged: positive and ambiguous ones, up to run.log_connections in an "
            + ("epoch." if records.score else "epoch. The histogram contains every probability.")
        )
        notes += show.notes()
    return write_report(
        path,
        title=f"Training run: {records.folder.resolve().name}",
        headline=outcome(records),
        tables=[
            _about(records),
            *self_check_tables(records.self_check),
            *_evaluations(records),
        ],
        curves=[*_over_steps(records), *_over_epochs(records), *_scores(records)],
        connections=cards,
        judged=_judgements(records.histograms),
        thresholds=(float(rule.get("low", 0.5)), float(rule.get("high", 0.8))),
        notes=notes,
        settings=config,
    )


def outcome(records: RunRecords) -> str:
    """Return in words what the last epoch and the last evaluation of a run came to."""
    if not records.epochs:
        return f"No epoch is complete; {records.steps:,} steps are done."
    numbers = sorted(records.epochs)
    first, last = (records.epochs[number] for number in (numbers[0], numbers[-1]))
    sentences = []
    if "loss" in last:
        change = f" ({first['loss']:.3g} in epoch {numbers[0]})" if len(numbers) > 1 else ""
        sentences.append(f"The loss of epoch {numbers[-1]} is {last['loss']:.3g}{change}.")
    false, left, found = (
        mean_of(last, [f"{name}_{d}" for d in DIRECTIONS])
        for name in (
            *("false_negative_rate", "false_negative_rate_in_itm"),
            "false_negative_rate_by_con_d",
        )
    )
    if false is not None:
        learned = f", and {left:.1%} of those that ITM learned as no match" if left else ""
        sentences.append(f"{false:.1%} of its hard negatives are false{learned}.")
    if found is not None:
        sentences.append(f"Con-D calls {found:.1%} of its hard negatives a match.")
    sentences = [sentence.replace("%", " %") for sentence in sentences]
    for (split, epoch), figures in list(records.evaluations.items())[-1:]:
        if (score := figures.get("agg_metrics")) is not None:
            sentences.append(f"The last evaluation ({split}, epoch {epoch}) scored {score:.3g}.")
    return " ".join(sentences) or f"{len(numbers)} epochs are complete."


def _about(records: RunRecords) -> Table:
    config = records.config or {}
    model, run = config.get("model") or {}, config.get("run") or {}
    con_d = (model.get("mafa") or {}).get("con_d") or {}
    epochs, wanted = len(records.epochs), run.get("max_epoch")
    state = "finished" if epochs == wanted else "incomplete: stopped, or still in progress"
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
        series = []
        for name, text in names.items():
            if name in columns:
                known = (~np.isnan(columns[name])).astype(float)
                series.append(_windowed(columns, np.nan_to_num(columns[name]), known, POINTS, text))
        yield from _drawn(Curve(title, "step", title.lower(), series))
    series = []
    for part, whole, text in (("false", "picked", "by truth"), ("found", "judged", "by Con-D")):
        for d, arrow in DIRECTIONS.items():
            if f"{part}_{d}" in columns and np.nansum(columns[f"{whole}_{d}"]):
                a, b = (np.nan_to_num(columns[f"{name}_{d}"]) for name in (part, whole))
                series.append(_windowed(columns, a, b, _SHARE_POINTS, f"{text}, {arrow}"))
    yield from _drawn(Curve("False negatives over steps", "step", "share", series, bounds=_SHARE))


def _windowed(
    columns: Mapping[str, NDArray[Any]],
    part: NDArray[Any],
    whole: NDArray[Any],
    count: int,
    text: str,
) -> Series:
    """Return sum of ``part`` / sum of ``whole`` in up to ``count`` windows of steps, at the last
    step of each."""
    steps = columns["global_step"]
    begins = np.arange(0, len(steps), -(-len(steps) // count) or 1)
    if not len(begins):
        return Series(text)
    x = steps[np.append(begins[1:], len(steps)) - 1].astype(int).tolist()
    sums = zip(*(np.add.reduceat(one, begins).tolist() for one in (part, whole)), strict=True)
    return Series(text, x, [a / b if b else None for a, b in sums])


def _drawn(curve: Curve) -> Iterable[Curve]:
    """Return the curve without empty series, or nothing if all are empty."""
    curve.series = [s for s in curve.series if any(y is not None for y in s.y)]
    return [curve] if curve.series else []


def _over_epochs(records: RunRecords) -> Iterable[Curve]:
    for title, names in _RATES.items():
        series = [
            _by_epoch(records.epochs, f"{name}_{d}", f"{text}, {arrow}")
            for name, text in names.items()
            for d, arrow in DIRECTIONS.items()
        ]
        of_share = title != _LIFT  # a lift of 1 is no better than chance
        label, bounds = ("share", _SHARE) if of_share else ("lift", None)
        yield from _drawn(Curve(title, "epoch", label, series, bounds=bounds))


def _by_epoch(epochs: Mapping[int, Mapping[str, Any]], name: str, text: str) -> Series:
    at = sorted(epochs)
    return Series(text, list(map(float, at)), [as_number(epochs[epoch].get(name)) for epoch in at])


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
    """Return the names of all figures with a numeric value."""
    named = (name for one in figures for name, value in one.items() if as_number(value) is not None)
    return list(dict.fromkeys(named))


def _evaluations(records: RunRecords) -> Iterable[Table]:
    """Yield a table for each split: figures by rows, its last evaluations by columns.

    The first column is the best evaluation by ``agg_metrics``, the figure that selects the best
    checkpoint of a run.
    """
    for split in dict.fromkeys(split for split, _ in records.evaluations):
        figures_of = {e: f for (own, e), f in records.evaluations.items() if own == split}
        # More columns do not fit the page; curves show all epochs.
        epochs = list(figures_of)[-6:]
        ranked = {e: as_number(f.get("agg_metrics")) for e, f in figures_of.items()}
        scores = {e: score for e, score in ranked.items() if score is not None}
        best = max(scores, key=lambda epoch: scores[epoch]) if len(scores) > 1 else None
        if best is not None and best not in epochs:
            epochs = [best, *epochs]
        rows: list[list[Cell]] = [
            [name, *(as_number(figures_of[epoch].get(name)) for epoch in epochs)]
            for name in _names(figures_of.values())
        ]
        head = [f"epoch {epoch}" if isinstance(epoch, int) else str(epoch) for epoch in epochs]
        head = [f"{h}, best" if e == best else h for h, e in zip(head, epochs, strict=True)]
        yield Table(f"Evaluation of {split}", ["figure", *head], rows)


# Con-D's probabilities


def _judgements(histograms: Mapping[int, Mapping[str, Any]]) -> list[Judgements]:
    """Return the histograms of all epochs, of both directions and each, and of single epochs."""
    if not histograms:
        return []
    known = {
        epoch: {direction: histograms[epoch].get(direction) or {} for direction in DIRECTIONS}
        for epoch in sorted(histograms)
    }
    # Counted: someone else's log may name any number of bins.
    bins = max(len(row) for one in known.values() for own in one.values() for row in own.values())

    def counts(epochs: Iterable[int], directions: Iterable[str]) -> NDArray[Any]:
        total = np.zeros((3, bins), np.int64)
        for epoch in epochs:
            for direction in directions:
                for row, truth in enumerate(("true", "false", "unknown")):
                    total[row] += np.asarray(known[epoch][direction].get(truth, 0), np.int64)
        return total

    parts = [Judgements("all epochs, both directions", counts(known, DIRECTIONS))]
    for direction, arrow in DIRECTIONS.items():
        parts.append(Judgements(f"all epochs, {arrow}", counts(known, [direction])))
    for epoch in list(known)[-_EPOCHS:]:
        parts.append(Judgements(f"epoch {epoch}", counts([epoch], DIRECTIONS)))
    return parts
