"""Evaluate saved retrieval scores with the positives of COCO, CxC and ECCV Caption.

The scores are those of COCO's test split; an evaluation with `run.save_scores: True` writes them.
A table (.md) and the metrics (.json) are written next to the file.

    lavis-mafa eccv output/eval/retrieval_coco/.../result/scores_test.npz
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("scores", type=Path, help="scores_<split>.npz of an evaluation")


def run(args: argparse.Namespace) -> None:
    """Write and print the metrics."""
    from lavis_mafa.io.files import write_json, write_text
    from lavis_mafa.metrics.eccv import COLUMNS, QUERIES, ROWS, coco_ids, eccv_scores
    from lavis_mafa.metrics.score_files import read_scores
    from lavis_mafa.pages.charts import Table
    from lavis_mafa.pages.tables import markdown_table

    saved = read_scores(args.scores)
    try:
        ids = coco_ids(saved.images, saved.captions_per_image())
        figures = eccv_scores(saved.scores_i2t, saved.scores_t2i, *ids)
    except ImportError as error:  # says how to install the package
        raise ValueError(str(error)) from error
    table = Table("", ["", *COLUMNS])
    for way, query in QUERIES.items():
        for measure, ending in ROWS.items():
            values = [figures.get(f"{name}_{way}_{ending}") for name in COLUMNS.values()]
            cells = ["" if value is None else f"{value:.2f}" for value in values]
            table.rows.append([f"{query}, {measure}", *cells])
    text = markdown_table(table) + "\n"
    stem = args.scores.with_suffix("")
    write_text(stem.with_name(f"{stem.name}_eccv.md"), text)
    rounded = {name: round(value, 4) for name, value in figures.items()}
    write_json(stem.with_name(f"{stem.name}_eccv.json"), rounded)
    print(text, end="")
