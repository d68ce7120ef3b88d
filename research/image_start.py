"""Train a start for a small model's image encoder from labels of images.

    python -m research image-start --cfg-path albef_small_own_data --labels labels.json \\
        --images images --output start.pth

labels.json is {"a.jpg": "beach", ...}, paths below the folder of --images. The checkpoint is the
model.pretrained of a training run. Exit status: 0, or 2 for unusable arguments or files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lavis_mafa.commands.arguments import RUN_CONFIG_HELP, add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m research image-start``."""
    add_options(parser, run=RUN_CONFIG_HELP)
    parser.set_defaults(run_gives="config")
    parser.add_argument("--labels", required=True, help="JSON file of image paths and labels")
    parser.add_argument("--images", required=True, help="folder that the paths are relative to")
    parser.add_argument("--output", type=Path, required=True, help="checkpoint to write")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the images (30)")
    parser.add_argument("--batch-size", type=int, default=64, help="images of a mini-batch (64)")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate (2e-3)")
    parser.add_argument("--seed", type=int, default=42, help="of weights, order, crops (42)")


def run(args: argparse.Namespace) -> None:
    """Train the encoder and write its checkpoint, and its accuracy next to it as JSON."""
    import torch

    from lavis_mafa.config import load_config
    from lavis_mafa.io.files import write_json
    from research.encoder_start import StartSettings, read_labels, start_from_labels

    if args.epochs < 1 or args.batch_size < 1 or args.lr <= 0:
        args.error("--epochs and --batch-size must be at least 1, --lr above 0")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    # Several threads wait for each other longer than they help a model of this size.
    torch.set_num_threads(1)
    settings = StartSettings(args.epochs, args.batch_size, args.lr, args.seed)
    try:
        labels = read_labels(args.labels)
        cfg = load_config(args.cfg_path, args.options, machine=False)
        right = start_from_labels(cfg, labels, args.images, settings, args.output)
    except (OSError, ValueError) as error:
        args.error(str(error))
    write_json(args.output.with_suffix(".json"), {"accuracy": right})
    print(f"predicts {100 * right:.0f} % of the labels; saved as {args.output}")
