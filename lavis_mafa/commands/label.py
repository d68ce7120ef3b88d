"""Let annotators label pairs that a discriminator judged, and measure its quality by them (MAFA
Appendix B).

`label page` draws pairs at random and writes an HTML page that shows them one by one, without
probability or ground truth; the page saves the answers as labels.json. `label quality` computes
precision and recall of discriminators by threshold, and the share of matches that annotators
confirm (0.83 in the paper), by which `lavis-mafa count --labels` multiplies. The ground truth comes
from the data set where it is known, or from annotators. `label judgements` writes the answers with
the names of images and captions, as a file that can be the truth of training data
(build_info.truth).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lavis_mafa.commands.arguments import add_recorded_data_arguments, existing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="page | quality | judgements")
    text = "draw pairs and write the page"
    page = parts.add_parser("page", help=text, description=text)
    page.add_argument("judged", type=existing, metavar="JUDGED", help="judged.npz, or its folder")
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
    text = "precision and recall by threshold, and the share of matches that annotators confirm"
    _add_quality(parts.add_parser("quality", help=text, description=text))
    text = "write the answers as judgements that name image files and captions"
    judgements = parts.add_parser("judgements", help=text, description=text)
    judgements.add_argument(
        "labels", nargs="+", type=existing, metavar="LABELS", help="labels.json of the annotators"
    )
    judgements.add_argument(
        "--judged",
        type=existing,
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


def _add_quality(quality: argparse.ArgumentParser) -> None:
    quality.add_argument(
        "judged", nargs="+", type=existing, metavar="JUDGED", help="judged.npz, or its folder"
    )
    quality.add_argument(
        "--labels",
        nargs="+",
        type=existing,
        default=[],
        help="labels.json of one or several annotators, about pairs of one of the files",
    )
    quality.add_argument(
        "--precision",
        type=float,
        metavar="P",
        help="find the smallest threshold with at least this precision (0.8: 80 %%), and write it "
        "to calibration.json in --output, for model.mafa.connections.calibration of a config",
    )
    quality.add_argument(
        "--low-precision",
        type=float,
        metavar="P",
        help="the same for connections.low; at most --precision (default: low is not calibrated)",
    )
    quality.add_argument(
        "--output", type=Path, help="folder for the results (default: only print them)"
    )


def run(args: argparse.Namespace) -> None:
    """Write the page of pairs, the page of quality, or the judgements."""
    if args.part == "quality":
        from lavis_mafa.mining.quality.quality_page import report_quality

        report_quality(args)
    elif args.part == "judgements":
        from lavis_mafa.mining.quality.label_judgements import write_judgements

        write_judgements(args.labels, args.judged, args.output, args.cfg_path, args.options)
    else:
        from lavis_mafa.mining.quality.label_page import label_page

        label_page(args)
