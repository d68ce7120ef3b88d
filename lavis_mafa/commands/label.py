"""Let annotators label pairs that a discriminator classifies as a match (MAFA Appendix B).

`label page` draws pairs at random and writes an HTML page that shows them one by one, without
probability or ground truth; the page saves the answers as labels.json. `label correct` computes the
share of matches that annotators confirm (0.83 in the paper); `lavis-mafa count --correction`
multiplies by it. `label judgements` writes the answers with the names of images and captions, as a
file that can be the truth of training data (build_info.truth).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lavis_mafa.commands.arguments import add_recorded_data_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="page | correct | judgements")
    text = "draw pairs and write the page"
    page = parts.add_parser("page", help=text, description=text)
    page.add_argument("judged", type=Path, metavar="JUDGED", help="judged.npz, or its folder")
    page.add_argument(
        "--output",
        type=Path,
        default=Path("labels.html"),
        help="file to write (default: labels.html)",
    )
    page.add_argument("--count", type=int, default=200, help="number of pairs (default: 200)")
    page.add_argument("--name", help="name of the discriminator (default: the first in the file)")
    page.add_argument(
        "--above",
        type=float,
        help="draw pairs with a higher probability (default: the run's low threshold, else 0.5)",
    )
    page.add_argument(
        "--all",
        action="store_true",
        help="draw from all judged pairs, equally many from every tenth of the probability range, "
        "which gives precision and recall at every threshold",
    )
    page.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    page.add_argument(
        "--image-size",
        type=int,
        default=640,
        help="longest side of the images in pixels (default: 640)",
    )
    add_recorded_data_arguments(page)
    text = "compute the share of matches that annotators confirm"
    correct = parts.add_parser("correct", help=text, description=text)
    correct.add_argument(
        "labels", nargs="+", type=Path, metavar="LABELS", help="labels.json of the annotators"
    )
    correct.add_argument(
        "--judged", type=Path, help="judged.npz, for the confirmed share by probability"
    )
    correct.add_argument(
        "--output",
        type=Path,
        default=Path("correction.json"),
        help="file to write (default: correction.json)",
    )
    text = "write the answers as judgements that name image files and captions"
    judgements = parts.add_parser("judgements", help=text, description=text)
    judgements.add_argument(
        "labels", nargs="+", type=Path, metavar="LABELS", help="labels.json of the annotators"
    )
    judgements.add_argument(
        "--judged",
        type=Path,
        required=True,
        metavar="JUDGED",
        help="judged.npz that the page was drawn from, or its folder",
    )
    judgements.add_argument(
        "--output",
        type=Path,
        default=Path("judgements.json"),
        help="file to write (default: judgements.json)",
    )
    add_recorded_data_arguments(judgements)


def run(args: argparse.Namespace) -> None:
    """Write the page, the correction or the judgements."""
    if args.part == "correct":
        from lavis_mafa.analysis.quality.correction import write_correction

        write_correction(args.labels, args.judged, args.output)
    elif args.part == "judgements":
        from lavis_mafa.analysis.quality.label_judgements import write_judgements

        write_judgements(args.labels, args.judged, args.output, args.cfg_path, args.options)
    else:
        from lavis_mafa.analysis.quality.label_page import label_page

        label_page(args)
