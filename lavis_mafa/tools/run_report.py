"""Write the page of a training run or of judged pairs; see `lavis_mafa.commands.report`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lavis_mafa.algorithm.binary import TENTHS
from lavis_mafa.algorithm.mining import DIRECTIONS
from lavis_mafa.checkpoints.downloads import go_offline
from lavis_mafa.io.files import read_json_lines
from lavis_mafa.tools.charts import Bars, Cell, Table, as_number, one_line
from lavis_mafa.tools.gallery import (
    SHOWN,
    SampleViewer,
    bars_of,
    connections_of,
    data_of,
    evenly,
    report_of_judged,
)
from lavis_mafa.tools.judge_check import self_check_tables
from lavis_mafa.tools.judged_pairs import FILE, Judged
from lavis_mafa.tools.model_and_data import recorded_data
from lavis_mafa.tools.report_page import write_report
from lavis_mafa.training.con_d_check import RECORD
from lavis_mafa.training.figures import ON_PLATEAU, PLATEAU_ADVICE
from lavis_mafa.training.run_log import CONNECTIONS, LOG, mean_of, read_log

# Not the same name: `count` and `mine` write a report.html themselves.
_RUN_PAGE, _JUDGED_PAGE = "report.html", "judged.html"


def report(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a run or of judged pairs, and return its path. Nothing is fetched.

    Args:
        folder: contains ``log.jsonl`` or ``judged.npz``.
        output: the file; None: ``report.html`` or ``judged.html`` in the folder.

    Raises:
        FileNotFoundError: if the folder contains neither; names subfolders that do.
        ValueError: if one of the files has another form.
    """
    go_offline()
    if (folder / FILE).is_file():
        judged = Judged.load(folder)
        show = SampleViewer(data_of(judged, folder / FILE))
        title = f"Judged pairs: {folder.resolve().name}"
        return report_of_judged(judged, show, output or folder / _JUDGED_PAGE, title)
    if not (folder / LOG).is_file():
        below = [str(p.parent) for name in (LOG, FILE) for p in folder.glob(f"*/{name}")]
        others = f"; did you mean {', '.join(sorted(below))}?" if below else ""
        raise FileNotFoundError(
            f"{folder} contains neither a run (log.jsonl) nor judged pairs ({FILE}){others}"
        )
    try:
        return _report_of_run(folder, output or folder / _RUN_PAGE)
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{folder} has a record that no run writes: {error!r}") from error


def _report_of_run(folder: Path, path: Path) -> Path:
    """Write the page of a training run, which may be in progress, and return its path."""
    logged: dict[str, list[dict[str, Any]]] = {}
    steps = 0
    for record in read_json_lines(folder / LOG):
        if record.get("kind") == "step":
            steps = int(record["global_step"])
        else:
            logged.setdefault(str(record.get("kind")), []).append(record)
    config = _section(logged.get("config", [{}])[-1], "config")
    epochs, evaluations = logged.get("epoch", []), logged.get("eval", [])
    records = list(read_json_lines(folder / CONNECTIONS))
    chosen, pairs, notes = evenly(records, SHOWN), [], []
    chosen.sort(key=lambda record: -record["probability"])
    if chosen:
        try:
            show = SampleViewer(recorded_data(folder))
            pairs = list(connections_of(chosen, show, config))
        # Missing files or libraries, or another working directory, must not prevent the page.
        except Exception as error:
            why = f"{type(error).__name__}: {one_line(str(error))}"
            logging.warning("the page shows no pairs: %s", why)
            notes.append(f"No pairs are shown, because the data of the run cannot be loaded: {why}")
        else:
            notes.append(
                f"{len(pairs):,} of the {len(records):,} connections that the run logged are "
                "shown: positive and ambiguous ones, up to 64 in an epoch."
            )
            notes += show.notes()
    if is_on_plateau(folder):
        notes.append(f"{PLATEAU_ADVICE}.")
    headline = _outcome(epochs, evaluations, steps)
    if not chosen:
        headline += "\n" + _nothing_found(config)
    rows = [*_about(folder, config, len(epochs), steps), *_last_figures(evaluations)]
    checks = {str(one["name"]): one for one in logged.get(RECORD, [])}
    return write_report(
        path,
        title=f"Training run: {folder.resolve().name}",
        headline=headline,
        pairs=pairs,
        bars=list(_bars(logged.get("con_d_histogram", []))),
        tables=[Table("", ["run", folder.resolve().name], rows), *self_check_tables(checks)],
        notes=notes,
    )


def is_on_plateau(folder: Path) -> bool:
    """Return whether ITM was on its plateau in the last epoch of a run."""
    last = [read_log(folder, kind)[-1:] for kind in ("epoch", ON_PLATEAU)]
    epoch, stuck = ([record.get("epoch") for record in records] for records in last)
    return bool(stuck) and epoch == stuck


def _section(config: Any, *names: str) -> dict[str, Any]:
    """Return a section of a config, which may be someone else's; {} if it has none."""
    for name in names:
        config = config.get(name) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def _outcome(epochs: list[dict[str, Any]], evaluations: list[dict[str, Any]], steps: int) -> str:
    """Return in words what the last epoch and the last evaluation of a run came to."""
    if not epochs:
        return f"No epoch is complete; {steps:,} steps are done."
    first, last, sentences = epochs[0], epochs[-1], []
    if "loss" in last:
        before = first.get("loss") if len(epochs) > 1 else None
        change = "" if before is None else f" ({before:.3g} in epoch {first['epoch']})"
        sentences.append(f"The loss of epoch {last['epoch']} is {last['loss']:.3g}{change}.")
    names = ("false_negative_rate", "false_negative_rate_in_itm", "false_negative_rate_by_con_d")
    false, left, found = (mean_of(last, [f"{name}_{d}" for d in DIRECTIONS]) for name in names)
    if false is not None:
        learned = f", and {left:.1%} of those that ITM learned as no match" if left else ""
        sentences.append(f"{false:.1%} of its hard negatives are known to match{learned}.")
    if found is not None:
        sentences.append(f"Con-D calls {found:.1%} of its hard negatives a match.")
    sentences = [sentence.replace("%", " %") for sentence in sentences]
    for record in evaluations[-1:]:
        if (score := record.get("agg_metrics")) is not None:
            where = f"{record['split']}, epoch {record['epoch']}"
            sentences.append(f"The last evaluation ({where}) scored {score:.3g}.")
    return " ".join(sentences) or f"{len(epochs)} epochs are complete."


def _nothing_found(config: Mapping[str, Any]) -> str:
    """Return why a run has no pairs to show, and what to do."""
    if not _section(config, "model", "mafa", "con_d").get("arch"):
        return (
            "There are no pairs to show, because the run has no Con-D: set model.mafa.con_d, or "
            "judge its hard negatives by lavis-mafa count --run FOLDER --con-d "
            "captions.arch=captions."
        )
    return (
        "There are no pairs to show: the run has logged no connection so far. Con-D finds more "
        "with grouped mini-batches (run.grit) and lower thresholds (model.mafa.connections)."
    )


def _about(folder: Path, config: Mapping[str, Any], epochs: int, steps: int) -> list[list[Cell]]:
    model, board = _section(config, "model"), folder / "tensorboard"
    return [
        ["model", f"{model.get('arch')}, {model.get('model_type')}"],
        ["Con-D", str(_section(model, "mafa", "con_d").get("arch") or "none")],
        ["data", ", ".join(_section(config, "datasets"))],
        ["complete epochs", f"{epochs} of {_section(config, 'run').get('max_epoch')}"],
        ["steps", f"{steps:,}"],
        ["curves", f"tensorboard --logdir {board}" if board.is_dir() else "set run.loggers"],
    ]


def _last_figures(evaluations: list[dict[str, Any]]) -> Iterator[list[Cell]]:
    """Yield the figures of the last evaluation of each split."""
    for split, record in {one["split"]: one for one in evaluations}.items():
        for name, value in record.items():
            if name not in ("time", "epoch", "global_step") and as_number(value) is not None:
                yield [f"{split}, epoch {record['epoch']}: {name}", value]


def _bars(histograms: list[dict[str, Any]]) -> Iterator[Bars]:
    for record in histograms[-1:]:
        rows = [row for d in DIRECTIONS for row in (record.get(d) or {}).values()]
        counts = np.sum(rows, axis=0)
        tenth = (np.arange(len(counts)) + 0.5) / len(counts) * TENTHS
        tenths = np.bincount(tenth.astype(int), counts, TENTHS)
        yield bars_of(f"Judged pairs of epoch {record['epoch']} by Con-D's probability", tenths)
