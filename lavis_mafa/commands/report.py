"""Write an HTML page about a training run, or about the pairs that were counted or mined.

FOLDER is the output folder of a training run (with its log.jsonl; the run may still be in
progress), or the --output of `lavis-mafa count` or `lavis-mafa mine` (with its judged.npz). The
page is a single file without references to other files or servers.

    lavis-mafa report output/albef_toy/20260101120000
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
        metavar="FOLDER",
        help="folder of a run, or the --output of count or mine",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="file to write (default: report.html for a run, otherwise judged.html, in FOLDER)",
    )
    add_trust_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Write the page."""
    from lavis_mafa.tools.run_report import report

    source = args.source.parent if args.source.is_file() else args.source
    print(f"wrote {report(source, args.output)}")
