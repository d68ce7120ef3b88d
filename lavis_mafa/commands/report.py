"""Write an HTML page about a training run, or about the pairs that were counted or mined; score
saved COCO retrieval.

FOLDER is the output folder of a training run (with its log.jsonl; the run may still be in
progress), or the --output of `lavis-mafa count` or `lavis-mafa mine` (with its judged.npz). The
page is a single file without references to other files or servers.

    lavis-mafa report output/albef_toy/20260101120000

Of scores_<split>.npz, which an evaluation on COCO's test split with `run.save_scores: True` writes,
the metrics with the positives of COCO, CxC and ECCV Caption are printed, and written next to the
file as a table (.md) and as JSON.

    lavis-mafa report output/eval/retrieval_coco/.../result/scores_test.npz
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lavis_mafa.commands.arguments import add_trust_argument, existing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "source",
        type=existing,
        metavar="FOLDER|SCORES",
        help="folder of a run, the --output of count or mine, or scores_<split>.npz",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="file to write (default: report.html for a run, otherwise judged.html, in FOLDER)",
    )
    parser.add_argument(
        "--connections",
        type=int,
        default=60,
        metavar="N",
        help="maximum number of pairs to show with their images (default: 60)",
    )
    parser.add_argument(
        "--no-images", action="store_true", help="show captions without their images"
    )
    add_trust_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Write the page, or the metrics of saved scores."""
    from lavis_mafa.mining.judged_pairs import FILE
    from lavis_mafa.mining.run_report import write_page

    source = args.source.parent if args.source.name == FILE else args.source
    if source.suffix == ".npz":
        _score(source)
        return
    path = write_page(source, args.output, args.connections, not args.no_images)
    print(f"wrote {path}")


def _score(path: Path) -> None:
    from lavis_mafa.io.files import write_json, write_text
    from lavis_mafa.metrics.eccv import COLUMNS, QUERIES, ROWS, coco_ids, eccv_scores
    from lavis_mafa.metrics.score_files import read_scores
    from lavis_mafa.pages.charts import Table
    from lavis_mafa.pages.tables import markdown_table

    saved = read_scores(path)
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
    stem = path.with_suffix("")
    write_text(stem.with_name(f"{stem.name}_eccv.md"), text)
    rounded = {name: round(value, 4) for name, value in figures.items()}
    write_json(stem.with_name(f"{stem.name}_eccv.json"), rounded)
    print(text, end="")
