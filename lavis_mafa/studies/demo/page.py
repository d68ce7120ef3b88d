"""The demonstration's table, summary and page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lavis_mafa.analysis.gallery import connections_of
from lavis_mafa.analysis.run_records import read_connections
from lavis_mafa.io.files import write_json
from lavis_mafa.pages.report import Curve, Mined, Series, Table, write_report
from lavis_mafa.runners.run_log import read_log
from lavis_mafa.studies.demo.branches import Branch

GROUPS = {
    "Hard negatives of the last epoch (percent)": {
        "false_negative_rate": "false negatives",
        "false_negative_rate_in_itm": "false ones in ITM",
        "con_d_precision": "Con-D precision",
        "con_d_recall": "Con-D recall",
    },
    "Retrieval against the original pairs (percent)": {
        "txt_r1": "TR@1",
        "txt_r5": "TR@5",
        "txt_r10": "TR@10",
        "img_r1": "IR@1",
        "img_r5": "IR@5",
        "img_r10": "IR@10",
    },
    "Retrieval against the full truth (percent; AUC 0 to 1)": {
        "valid_txt_r1": "any TR@1",
        "valid_txt_r5": "any TR@5",
        "valid_txt_r10": "any TR@10",
        "valid_img_r1": "any IR@1",
        "valid_img_r5": "any IR@5",
        "valid_img_r10": "any IR@10",
        "txt_map_r": "TR mAP@R",
        "img_map_r": "IR mAP@R",
        "itm_auc": "ITM AUC",
    },
}
SHARES = GROUPS["Hard negatives of the last epoch (percent)"]
INTRO = """Four systems were trained from one warm-up for the same number of steps on a rendered \
world in which it is known which captions are valid for which images. {grit}, S-ITC and MAFA \
group similar pairs into mini-batches (GRIT), {base} draws mini-batches and negatives at \
random. MAFA asks Con-D, a discriminator trained on the same data and fine-tuned for retrieval, \
which hard negatives match after all, and makes them positives.

R@k against the original pairs (TR: texts for an image, IR: images for a text) counts a valid \
caption of another image as an error, so it punishes a model for accepting what is true: read it \
together with R@k against any valid pair, mAP@R over all valid pairs, and the AUC of ITM on one \
shortlist shared by all systems."""
NOTES = [
    "One seed and a few epochs of a tiny model: differences of a few points are within the noise.",
    "False negatives: share of valid pairs among the hard negatives picked in the last epoch. "
    "False ones in ITM: the same among the pairs that ITM then learned as no match, after Con-D "
    "converted some and replaced the ambiguous.",
]


def tables_of(figures: dict[str, dict[str, Any]], titles: dict[str, str]) -> list[Table]:
    """One row per system; shares in percent like everything else but the AUC."""
    tables = []
    for title, columns in GROUPS.items():
        rows: list[list[Any]] = []
        for name, values in figures.items():
            told = [values.get(key) for key in columns]
            if columns is SHARES:
                told = [None if value is None else 100 * value for value in told]
            rows.append([titles[name], *told])
        best = {} if columns is SHARES else {column: "max" for column in columns.values()}
        tables.append(Table(title, ["system", *columns.values()], rows, highlight_best=best))
    return tables


def print_tables(tables: list[Table]) -> None:
    """The tables turned on their side, as one, for a terminal."""
    width = max(len(column) for table in tables for column in table.columns) + 2
    print(" " * width + "".join(f"{row[0]!s:>15}" for row in tables[0].rows))
    for table in tables:
        print(table.title)
        for place, column in enumerate(table.columns[1:], 1):
            digits = 3 if column.endswith("AUC") else 1
            cells = (row[place] for row in table.rows)
            shown = ("–" if cell is None else f"{cell:.{digits}f}" for cell in cells)
            print(f"{'  ' + column:<{width}}" + "".join(f"{text:>15}" for text in shown))


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Write ``summary.json``."""
    write_json(path, content)


def write_page(
    path: Path,
    tables: list[Table],
    branches: dict[str, Branch],
    train_set: Any,
    settings: dict[str, Any],
) -> Path:
    """Write ``report.html``: the tables, the curves and MAFA's mined connections."""
    family = branches["mafa"].family
    curves = [
        _curve(branches, "step", "loss", "loss", "step"),
        _curve(branches, "step", "loss_itm", "ITM loss", "step"),
        _curve(branches, "epoch", "false_negative_rate_i2t", "False hard negatives", "epoch"),
    ]
    return write_report(
        path,
        title="MAFA on the toy world",
        intro=INTRO.format(grit=family.grit, base=family.base),
        tables=tables,
        curves=curves,
        connections=mined_by(branches["mafa"].folder, train_set, "mafa"),
        notes=NOTES,
        settings=settings,
    )


def mined_by(folder: Path, train_set: Any, run: str, limit: int = 400) -> Iterator[Mined]:
    """The last ``limit`` connections that ``run`` logged in its folder, with their pictures."""
    return connections_of(read_connections(folder)[-limit:], train_set.show, run)


def _curve(branches: dict[str, Branch], kind: str, key: str, title: str, x: str) -> Curve:
    series = []
    for branch in branches.values():
        at = "global_step" if kind == "step" else "epoch"
        told = read_log(branch.folder, kind, once=at)
        records = [record for record in told if record.get(key) is not None]
        series.append(
            Series(branch.title, [r[at] for r in records], [float(r[key]) for r in records])
        )
    return Curve(title, x, title, [s for s in series if s.x])
