"""Print a config with all its defaults, or without --cfg-path a page of all keys.

lavis-mafa config --cfg-path albef_toy --options run.max_epoch=3
lavis-mafa config --cfg-path albef_toy --write completed.yaml
"""

from __future__ import annotations

import argparse
import sys

from lavis_mafa.commands.arguments import add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lavis-mafa config``."""
    add_options(parser, required=False)
    parser.add_argument("--write", metavar="FILE", help="write to a file instead of printing")


def run(args: argparse.Namespace) -> None:
    """Print or write the config, or the page of keys."""
    from lavis_mafa.config import format_config, load_config
    from lavis_mafa.config.page import page
    from lavis_mafa.io.files import write_text

    if args.cfg_path is None:
        text = page()
    else:
        # Whether the machine has the files and the GPUs is another question: see --dry-run.
        text = format_config(load_config(args.cfg_path, args.options, machine=False))
    if args.write is None:
        sys.stdout.write(text)
    else:
        write_text(args.write, text)
