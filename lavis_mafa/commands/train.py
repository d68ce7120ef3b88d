"""Train a model as a config says, or with ``evaluate`` only evaluate it.

Under torch.distributed.run every rank runs this command.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add LAVIS's arguments and ``--dry-run``."""
    parser.add_argument(
        "--cfg-path", required=True, help="config: a YAML file, or the name of a shipped one"
    )
    parser.add_argument(
        "--options",
        nargs="+",
        default=[],
        metavar="key=value",
        help="settings that override the config's, such as run.max_epoch=5",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build and check everything, take one mini-batch forward, print what would run",
    )


def run(args: argparse.Namespace) -> None:
    """Train or evaluate."""
    from lavis_mafa.runners import session

    action = session.check_only if args.dry_run else session.run
    action(args.cfg_path, args.options, args.command == "evaluate")
