"""Arguments that several commands share."""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add LAVIS's ``--cfg-path`` and ``--options``."""
    parser.add_argument(
        "--cfg-path",
        required=required,
        help="config: a YAML file, or the name of a shipped one, such as albef_toy",
    )
    parser.add_argument(
        "--options",
        nargs="+",
        default=[],
        metavar="key=value",
        help="settings that override the config's, such as run.max_epoch=5",
    )
