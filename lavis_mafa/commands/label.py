"""Label judged pairs by hand, and measure a discriminator by the labels (MAFA Appendix B).

`label page` writes an HTML page that shows random pairs one by one, without their probability;
two keys label them, and the page saves labels.csv. `label quality` prints precision and recall by
threshold, by these labels or by the ground truth of the data, and advises a threshold.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lavis_mafa.commands.arguments import add_trust_argument, existing, number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="page | quality")
    text = "draw pairs, equally many from every tenth of the probability, and write the page"
    page = parts.add_parser("page", help=text, description=text)
    text = "print precision and recall by threshold, and advise a threshold"
    quality = parts.add_parser("quality", help=text, description=text)
    text = "judged.npz, or its folder"
    for one in (page, quality):
        one.add_argument("judged", type=existing, metavar="JUDGED", help=text)
    text = "file to write (default: labels.html)"
    page.add_argument("--output", type=Path, default=Path("labels.html"), help=text)
    page.add_argument("--count", type=number(1), default=200, help="number of pairs (default: 200)")
    page.add_argument("--name", help="name of the discriminator (default: the first in the file)")
    text = "draw only pairs with a higher probability, 0.1, 0.2, ... or 0.9 (default: all)"
    page.add_argument("--above", type=float, default=0.0, metavar="P", help=text)
    page.add_argument("--seed", type=number(0), default=0, help="seed of the draw (default: 0)")
    add_trust_argument(page)
    text = "labels.csv of the page (default: the ground truth of the data)"
    quality.add_argument("--labels", type=existing, metavar="FILE", help=text)
    text = "advise the smallest threshold with at least this precision (default: 0.8)"
    quality.add_argument("--precision", type=float, default=0.8, metavar="P", help=text)


def run(args: argparse.Namespace) -> None:
    """Write the page of pairs, or print the table of quality."""
    if args.part == "quality":
        from lavis_mafa.tools.label_quality import report_quality

        report_quality(args)
    else:
        from lavis_mafa.tools.label_page import label_page

        label_page(args)
