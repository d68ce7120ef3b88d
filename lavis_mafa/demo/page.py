"""The demonstration's table, summary and page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lavis_mafa.analysis.report import Curve, Mined, Series, Table, write_report
from lavis_mafa.demo.branches import Branch, read_log

COLUMNS = {
    "false_negative_rate": "false hard negatives",
    "left_false": "left as negatives",
    "con_d_precision": "Con-D precision",
    "con_d_recall": "Con-D recall",
    "txt_r1": "TR@1",
    "txt_r5": "TR@5",
    "txt_r10": "TR@10",
    "img_r1": "IR@1",
    "img_r5": "IR@5",
    "img_r10": "IR@10",
    "valid_txt_r1": "any-valid TR@1",
    "valid_txt_r5": "any-valid TR@5",
    "valid_txt_r10": "any-valid TR@10",
    "valid_img_r1": "any-valid IR@1",
    "valid_img_r5": "any-valid IR@5",
    "valid_img_r10": "any-valid IR@10",
    "txt_map_r": "mAP@R TR",
    "img_map_r": "mAP@R IR",
    "itm_auc": "ITM AUC",
}
SHARES = ("false_negative_rate", "left_false", "con_d_precision", "con_d_recall")
INTRO = """Four systems were trained from one warm-up for the same number of steps on a rendered \
world in which it is known which captions are valid for which images. GRIT-VLP, S-ITC and MAFA \
group similar pairs into mini-batches (GRIT), ALBEF-base draws them at random. MAFA asks Con-D, \
a discriminator trained on the same data and fine-tuned for retrieval, which hard negatives match \
after all, and makes them positives.

R@k against the original pairs (TR: texts for an image, IR: images for a text) counts a valid \
caption of another image as an error, so it punishes a model for accepting what is true: read it \
together with R@k against any valid pair, mAP@R over all valid pairs, and the AUC of ITM on one \
shortlist shared by all systems."""
NOTES = [
    "One seed and a few epochs of a tiny model: differences of a few points are within the noise.",
    "This world does not favour grouping at this budget: random mini-batches (ALBEF-base) are "
    "usually ahead of all grouped systems here, unlike in the papers' tables.",
    "A temperature fixed at 0.07 gives about the same as S-ITC here; with twice the epochs, or "
    "mini-batches of half the size, MAFA's lead over ECM without S-ITC is gone.",
]


def table_of(figures: dict[str, dict[str, Any]], titles: dict[str, str]) -> Table:
    """One row per system; shares in percent like everything else but the AUC."""
    rows: list[list[Any]] = []
    for name, values in figures.items():
        row: list[Any] = [titles[name]]
        for key in COLUMNS:
            value = values.get(key)
            row.append(100 * value if key in SHARES and value is not None else value)
        rows.append(row)
    measured = [title for key, title in COLUMNS.items() if key not in SHARES]
    return Table(
        "What each system learned (percent; AUC 0 to 1)",
        ["system", *COLUMNS.values()],
        rows,
        highlight_best={title: "max" for title in measured},
    )


def print_table(table: Table) -> None:
    """The table turned on its side, for a terminal."""
    width = max(map(len, table.columns)) + 2
    names = [str(row[0]) for row in table.rows]
    print(" " * width + "".join(f"{name:>14}" for name in names))
    for place, column in enumerate(table.columns[1:], 1):
        cells = [row[place] for row in table.rows]
        digits = 3 if column == "ITM AUC" else 1
        shown = ("–" if cell is None else f"{cell:.{digits}f}" for cell in cells)
        print(f"{column:<{width}}" + "".join(f"{text:>14}" for text in shown))


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Write ``summary.json``."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_page(
    path: Path, table: Table, branches: dict[str, Branch], train_set: Any, settings: dict[str, Any]
) -> Path:
    """Write ``report.html``: the table, the curves and MAFA's mined connections."""
    curves = [
        _curve(branches, "step", "loss", "loss", "step"),
        _curve(branches, "step", "loss_itm", "ITM loss", "step"),
        _curve(branches, "epoch", "false_negative_rate_i2t", "False hard negatives", "epoch"),
    ]
    return write_report(
        path,
        title="MAFA on the toy world",
        intro=INTRO,
        tables=[table],
        curves=curves,
        connections=connections_of(branches["mafa"], train_set),
        notes=NOTES,
        settings=settings,
    )


def connections_of(branch: Branch, train_set: Any, limit: int = 400) -> Iterator[Mined]:
    """The last ``limit`` connections that a branch logged, with their pictures."""
    path = branch.folder / "connections.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for record in map(json.loads, lines[-limit:]):
        anchor_image, anchor_caption = train_set.show(record["anchor_index"])
        mined_image, mined_caption = train_set.show(record["mined_index"])
        yield Mined(
            direction=record["direction"],
            anchor_image=anchor_image,
            anchor_caption=anchor_caption,
            mined_image=mined_image,
            mined_caption=mined_caption,
            probability=record["probability"],
            truth=record["truth"],
            epoch=record["epoch"],
            state=record["state"],
            anchor_index=record["anchor_index"],
            mined_index=record["mined_index"],
            run=branch.name,
        )


def _curve(branches: dict[str, Branch], kind: str, key: str, title: str, x: str) -> Curve:
    series = []
    for branch in branches.values():
        records = [r for r in read_log(branch.folder, kind) if r.get(key) is not None]
        at = "global_step" if kind == "step" else "epoch"
        series.append(
            Series(branch.title, [r[at] for r in records], [float(r[key]) for r in records])
        )
    return Curve(title, x, title, [s for s in series if s.x])
