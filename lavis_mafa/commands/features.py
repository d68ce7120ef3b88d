"""Encode pictures once by a frozen image encoder, for training on their features.

    lavis-mafa features train.json val.json test.json --images images/ --output features/ \\
        --encoder blip2_mafa
    lavis-mafa train ... model.image_encoder=features \\
        datasets.image_text_json.build_info.features.storage=features/

Give the files of all splits. Rerun the command to resume it. With --part 0/4 to --part 3/4, four
processes share the work. For an encoder of your own see examples/own_features.py.
Exit status: 0 no problems, 1 pictures that cannot be read, 2 unusable arguments or files.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from lavis_mafa.commands.arguments import add_pair_arguments, columns_of, folder_of_images, number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lavis-mafa features``."""
    add_pair_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--encoder",
        required=True,
        help="a model of timm; or blip2_mafa or blip2_mafa:TYPE for BLIP-2's frozen image encoder",
    )
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="checkpoint of the model (default: BLIP-2's published one)",
    )
    parser.add_argument(
        "--image-size", type=number(1), help="side of the images in pixels (default: the model's)"
    )
    parser.add_argument(
        "--views",
        nargs="+",
        choices=["plain", "flip"],
        default=["plain", "flip"],
        help="views to compute; training draws one of them at random (default: both)",
    )
    parser.add_argument(
        "--part",
        type=_part,
        default=(0, 1),
        metavar="K/N",
        help="make one of N parts, to use N processes",
    )
    parser.add_argument(
        "--batch-size", type=number(1), default=64, help="images per mini-batch (default: 64)"
    )
    parser.add_argument("--device", default="cpu", help="device, such as cuda (default: cpu)")


def _part(text: str) -> tuple[int, int]:
    """Parse ``K/N``, part number K (from 0 on) of N parts."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(
            f"{text}: expected K/N with K from 0 to N - 1, such as 0/4"
        )
    return int(found[1]), int(found[2])


def run(args: argparse.Namespace) -> int:
    """Compute the features and return the exit status."""
    from lavis_mafa.tools.feature_making import load_encoder, make_features, pictures_of

    try:
        encoder = load_encoder(args.encoder, args.weights, args.image_size, args.device)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        lines = str(error).split("\n")  # PyTorch says in the second one which weights do not fit
        args.error(" ".join(" ".join(lines[:2]).split()))
    try:
        pairs = pictures_of(
            args.files,
            folder_of_images(args.images, args.files),
            **columns_of(args),
        )
        unreadable = make_features(
            pairs, args.output, encoder, args.views, args.part, args.batch_size, args.workers
        )
    except (OSError, ValueError) as error:
        args.error(str(error))
    return 1 if unreadable else 0
