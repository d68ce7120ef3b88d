"""Write the page of a training run or of judged pairs; see `lavis_mafa.commands.report`."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lavis_mafa.algorithm.mining import DIRECTIONS
from lavis_mafa.algorithm.scores import CON_D
from lavis_mafa.io.downloads import go_offline
from lavis_mafa.metrics.binary import TENTHS
from lavis_mafa.mining.gallery import bars_of, connections_of, evenly, view_data
from lavis_mafa.mining.judge_check import self_check_tables
from lavis_mafa.mining.judged_pairs import FILE, Judged
from lavis_mafa.mining.judged_report import SHOWN, report_of_judged
from lavis_mafa.mining.model_and_data import data_of_judged, recorded_data
from lavis_mafa.pages.charts import Bars, Cell, Table, as_number
from lavis_mafa.pages.report_page import write_report
from lavis_mafa.runners.con_d_check import RECORD
from lavis_mafa.runners.run_log import CONNECTIONS, LOG, mean_of, read_json_lines

# Not the same name: `count` and `mine` write a report.html themselves.
RUN_PAGE, JUDGED_PAGE = "report.html", "judged.html"


@dataclass
class RunRecords:
    """What a run's ``log.jsonl`` and ``connections.jsonl`` say last.

    If a run was resumed from an earlier checkpoint and repeated steps or epochs, only the last
    repetition is kept.

    Attributes:
        folder: the folder of the run.
        config: the last recorded config.
        steps: number of steps done.
        epochs: figures by epoch.
        tenths: numbers of judged pairs by tenth of Con-D's probability ``(10,)``, by epoch.
        evaluations: figures by split and epoch (a number, or a string such as "best").
        connections: the logged records.
        self_check: figures of Con-D's self-check by its name; {} if there was none.
        first, last: seconds since 1970 of the first and the last record.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    epochs: dict[int, dict[str, Any]] = field(default_factory=dict)
    tenths: dict[int, Any] = field(default_factory=dict)
    evaluations: dict[tuple[str, Any], dict[str, Any]] = field(default_factory=dict)
    connections: list[dict[str, Any]] = field(default_factory=list)
    self_check: dict[str, dict[str, Any]] = field(default_factory=dict)
    first: float | None = None
    last: float | None = None

    @property
    def score(self) -> str:
        """The score that judged hard negatives in Con-D's place; empty: Con-D."""
        score = _section(self.config, "model", "mafa", "connections").get("score") or CON_D
        return "" if score == CON_D else str(score)


def _section(config: Any, *names: str) -> dict[str, Any]:
    """Return a section of a config, which may be someone else's; {} if it has none."""
    for name in names:
        config = config.get(name) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def read_run(folder: Path) -> RunRecords:
    """Read the logs in the folder of a run, which may have been resumed or be in progress.

    Raises:
        FileNotFoundError: if it contains no ``log.jsonl``.
        ValueError: if it has records that no run writes.
    """
    path = folder / LOG
    if not path.is_file():
        raise FileNotFoundError(f"no run in {folder}: log.jsonl does not exist")
    run = RunRecords(folder)
    try:
        for record in read_json_lines(path):
            _add(run, record)
        path = folder / CONNECTIONS
        run.connections = _read_connections(path)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} has a record that no run writes: {error!r}") from error
    return run


def _add(run: RunRecords, record: dict[str, Any]) -> None:
    kind, epoch = record.get("kind"), record.get("epoch", -1)
    run.last = record.get("time", run.last)
    run.first = run.last if run.first is None else run.first
    if kind == "config":
        run.config = _section(record, "config")
    elif kind == "step":
        now, epoch = int(record["global_step"]), int(record["epoch"])
        if now <= run.steps:  # the run was resumed from an earlier step: drop what it repeats
            run.epochs = {e: one for e, one in run.epochs.items() if e < epoch}
            run.tenths = {e: one for e, one in run.tenths.items() if e < epoch}
            run.evaluations = {
                at: one
                for at, one in run.evaluations.items()
                if isinstance(at[1], int) and at[1] < epoch
            }
        run.steps = now
    elif kind == "epoch":
        run.epochs[int(epoch)] = _numbers(record)
    elif kind == RECORD:
        run.self_check = {str(record.get("name")): record}
    elif kind == "con_d_histogram":
        rows = [row for d in DIRECTIONS for row in (record.get(d) or {}).values()]
        counts = np.sum(rows, axis=0)  # raises for rows of different lengths
        tenth = (np.arange(len(counts)) + 0.5) / len(counts) * TENTHS
        run.tenths[int(epoch)] = np.bincount(tenth.astype(int), counts, TENTHS)
    elif kind == "eval":
        # Removed first, so that a repeated evaluation also moves to the end of the order.
        run.evaluations.pop((record["split"], epoch), None)
        run.evaluations[record["split"], epoch] = _numbers(record)


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a record that are numbers."""
    others = ("kind", "time", "split", "epoch", "global_step")
    return {
        name: value
        for name, value in record.items()
        if name not in others and as_number(value) is not None
    }


def _read_connections(path: Path) -> list[dict[str, Any]]:
    """Read ``connections.jsonl``; of repeated steps only the last repetition is kept."""
    kept: list[dict[str, Any]] = []
    for record in read_json_lines(path):
        at = (record["epoch"], record["step"])
        while kept and (kept[-1]["epoch"], kept[-1]["step"]) > at:
            kept.pop()
        kept.append(record)
    names = ("epoch", "step", "direction", "anchor_index", "mined_index")
    return list({tuple(record[n] for n in names): record for record in kept}.values())


def write_page(
    folder: Path, output: Path | None = None, connections: int = SHOWN, images: bool = True
) -> Path:
    """Write the page of a run or of judged pairs, and return its path. Nothing is fetched.

    Args:
        folder: contains ``log.jsonl`` or ``judged.npz``.
        output: the file; None: `RUN_PAGE` or `JUDGED_PAGE` in the folder.
        connections: maximum number of pairs with images.
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
        title = f"Judged pairs: {folder.resolve().name}"
        path = output or folder / JUDGED_PAGE
        return report_of_judged(judged, show, path, title, notes=notes, limit=connections)
    if not (folder / LOG).is_file():
        below = [str(p.parent) for name in (LOG, FILE) for p in folder.glob(f"*/{name}")]
        others = f"; did you mean {', '.join(sorted(below))}?" if below else ""
        raise FileNotFoundError(
            f"{folder} contains neither a run (log.jsonl) nor judged pairs ({FILE}){others}"
        )
    return report_of_run(read_run(folder), output or folder / RUN_PAGE, connections, images)


def report_of_run(
    run: RunRecords, path: Path, connections: int = SHOWN, images: bool = True
) -> Path:
    """Write the page of a training run and return its path; see `write_page`."""
    notes: list[str] = []
    chosen, pairs = evenly(run.connections, connections), []
    if chosen:
        show = view_data(lambda: recorded_data(run.folder), images, notes)
        pairs = list(connections_of(chosen, show, run.score))
        notes.append(
            f"{len(chosen):,} of the {len(run.connections):,} connections that the run logged are "
            "shown: positive and ambiguous ones, up to run.log_connections in an epoch."
        )
        notes += show.notes()
    return write_report(
        path,
        title=f"Training run: {run.folder.resolve().name}",
        headline=_outcome(run),
        pairs=pairs,
        bars=list(_bars(run)),
        tables=[_about(run), *_figures(run), *self_check_tables(run.self_check)],
        notes=notes,
    )


def _outcome(run: RunRecords) -> str:
    """Return in words what the last epoch and the last evaluation of a run came to."""
    if not run.epochs:
        return f"No epoch is complete; {run.steps:,} steps are done."
    first, last = min(run.epochs), max(run.epochs)
    figures, sentences = run.epochs[last], []
    if "loss" in figures:
        before = run.epochs[first].get("loss")
        change = f" ({before:.3g} in epoch {first})" if first < last and before is not None else ""
        sentences.append(f"The loss of epoch {last} is {figures['loss']:.3g}{change}.")
    names = (
        "false_negative_rate",
        "false_negative_rate_in_itm",
        "false_negative_rate_by_con_d",
    )
    false, left, found = (mean_of(figures, [f"{name}_{d}" for d in DIRECTIONS]) for name in names)
    if false is not None:
        learned = f", and {left:.1%} of those that ITM learned as no match" if left else ""
        sentences.append(f"{false:.1%} of its hard negatives are false{learned}.")
    if found is not None:
        sentences.append(f"Con-D calls {found:.1%} of its hard negatives a match.")
    sentences = [sentence.replace("%", " %") for sentence in sentences]
    for (split, epoch), scores in list(run.evaluations.items())[-1:]:
        if (score := scores.get("agg_metrics")) is not None:
            sentences.append(f"The last evaluation ({split}, epoch {epoch}) scored {score:.3g}.")
    return " ".join(sentences) or f"{len(run.epochs)} epochs are complete."


def _about(run: RunRecords) -> Table:
    model, epochs = _section(run.config, "model"), len(run.epochs)
    wanted = _section(run.config, "run").get("max_epoch")
    state = "finished" if epochs == wanted else "incomplete: stopped, or still in progress"
    board = run.folder / "tensorboard"
    curves = f"tensorboard --logdir {board}" if board.is_dir() else "none: set run.loggers"
    rows: list[list[Cell]] = [
        ["model", f"{model.get('arch')}, {model.get('model_type')}"],
        ["Con-D", str(_section(model, "mafa", "con_d").get("arch") or "none")],
        ["data", ", ".join(_section(run.config, "datasets"))],
        ["epochs", f"{epochs} of {wanted}, {state}"],
        ["steps", f"{run.steps:,}"],
        ["first and last record", f"{_when(run.first)} to {_when(run.last)}"],
        ["curves", curves],
    ]
    return Table("", ["run", run.folder.resolve().name], rows)


def _when(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def _bars(run: RunRecords) -> Iterator[Bars]:
    if run.tenths:
        epoch = max(run.tenths)
        yield bars_of(f"Judged pairs of epoch {epoch} by Con-D's probability", run.tenths[epoch])


def _figures(run: RunRecords) -> Iterable[Table]:
    """Yield the figures of the last epoch, and of each split's best and last evaluation.

    The best is by ``agg_metrics``, the figure that selects the best checkpoint of a run.
    """
    if run.epochs:
        last = max(run.epochs)
        rows: list[list[Cell]] = [[name, value] for name, value in run.epochs[last].items()]
        yield Table(f"Epoch {last}", ["figure", "value"], rows)
    for split in dict.fromkeys(split for split, _ in run.evaluations):
        figures = {epoch: one for (own, epoch), one in run.evaluations.items() if own == split}
        scored = [epoch for epoch, one in figures.items() if "agg_metrics" in one]
        best = max(scored, key=lambda epoch: figures[epoch]["agg_metrics"], default=None)
        shown = [best] if best is not None else []
        shown += [epoch for epoch in list(figures)[-1:] if epoch != best]
        names = dict.fromkeys(name for epoch in shown for name in figures[epoch])
        rows = [[name, *(figures[epoch].get(name) for epoch in shown)] for name in names]
        heads = [f"epoch {e}" + (", best" if e == best else "") for e in shown]
        yield Table(f"Evaluation of {split}", ["figure", *heads], rows)
