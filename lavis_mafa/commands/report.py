"""Write an HTML page about a training run, or about the pairs that were counted or mined.

FOLDER is the output folder of a training run (with its log.jsonl; the run may still be in
progress), or the --output of `lavis-mafa count` or `lavis-mafa mine` (with its judged.npz). The
page is a single file without references to other files or servers.

    lavis-mafa report output/albef_toy/20260101120000
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="of a run, or the --output of count or mine"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="file to write (default: report.html for a run, otherwise judged.html, in FOLDER)",
    )
    parser.add_argument(
        "--connections",
        type=int,
        default=400,
        metavar="N",
        help="maximum number of connections in the gallery (default: 400)",
    )
    parser.add_argument(
        "--no-images", action="store_true", help="show captions without their images"
    )


def run(args: argparse.Namespace) -> None:
    """Write the page."""
    from lavis_mafa.analysis.run_report import write_page

    path = write_page(args.folder, args.output, args.connections, not args.no_images)
    print(f"wrote {path}")
