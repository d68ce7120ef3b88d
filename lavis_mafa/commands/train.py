"""Train a model by a config; the command evaluate only evaluates it.

Under torch.distributed.run every rank runs this command.
"""

from __future__ import annotations

import argparse

from lavis_mafa.commands.arguments import RUN_HELP, add_checkpoint_argument, add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add LAVIS's arguments, ``--dry-run`` and ``--prefetch``."""
    if parser.prog.endswith("evaluate"):
        add_options(parser, run=f"{RUN_HELP}. Results go to FOLDER/evaluate")
        add_checkpoint_argument(parser)
    else:
        add_options(parser)
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--prefetch",
        action="store_true",
        help="download all weights, tokenizers and annotations that the config needs, list them "
        "with their sizes and paths, and do nothing else",
    )
    only.add_argument(
        "--dry-run",
        action="store_true",
        help="build and check everything, take one mini-batch forward, print what would run",
    )


def run(args: argparse.Namespace) -> None:
    """Train or evaluate."""
    from lavis_mafa.runners import session

    action = session.check_only if args.dry_run else session.run
    action = session.fetch_only if args.prefetch else action
    options = args.options
    if getattr(args, "checkpoint", None):
        options = [*options, "model.load_finetuned=True", f"model.finetuned={args.checkpoint}"]
    if getattr(args, "run", None):
        options = [f"run.output_dir={args.run / 'evaluate'}", *options]
    action(args.cfg_path, options, args.command == "evaluate")
