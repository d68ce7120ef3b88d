"""Train a model by a config; the command evaluate only evaluates it.

    lavis-mafa train --data pairs.json --images pictures/
    lavis-mafa train --cfg-path albef_toy --options run.max_epoch=3
    lavis-mafa train --cfg-path albef_toy --print-config
    lavis-mafa train --list

Under torch.distributed.run every rank runs this command.
"""

from __future__ import annotations

import argparse
import sys

from lavis_mafa.commands.arguments import (
    COLUMNS,
    PAIR_FILES,
    RUN_HELP,
    add_checkpoint_argument,
    add_columns,
    add_options,
    columns_of,
    existing_files,
)
from lavis_mafa.io.launcher import rank_in_environment
from lavis_mafa.io.project_files import shipped_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add LAVIS's arguments, and arguments for other things than training."""
    if parser.prog.endswith("evaluate"):
        add_options(parser, run=f"{RUN_HELP}. Results go to FOLDER/evaluate")
        add_checkpoint_argument(parser)
    else:
        sources = add_options(parser)
        sources.add_argument(
            "--data",
            nargs="+",
            type=existing_files,
            metavar="FILES",
            help=f"your own pairs, instead of --cfg-path: {PAIR_FILES}. Model, sizes and a "
            "validation split are chosen to suit them and written into a config",
        )
        add_columns(parser.add_argument_group("with --data"))
        sources.add_argument(
            "--list", action="store_true", help="print the names of the shipped configs"
        )
        parser.add_argument(
            "--toy",
            action="store_true",
            help="try the config of --cfg-path in about a minute: a tiny model, toy data, two "
            "epochs, this machine's device; no downloads",
        )
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--dry-run",
        action="store_true",
        help="build and check everything, take one mini-batch forward, print what would run",
    )
    only.add_argument(
        "--print-config", action="store_true", help="print the config with all its defaults"
    )


def run(args: argparse.Namespace) -> None:
    """Train or evaluate, or print what was asked for."""
    if getattr(args, "list", False):
        print("\n".join(shipped_names()))
        return None
    for name in COLUMNS if args.command == "train" and not args.data else ():
        if getattr(args, name):
            args.error(f"--{name.replace('_', '-')} needs --data")
    if getattr(args, "toy", False):
        if args.data:
            args.error("--toy has data of its own; leave out --data, or give --cfg-path")
        from lavis_mafa.settings.toy_run import write_toy_config

        try:
            args.cfg_path = str(write_toy_config(args.cfg_path))
        except ValueError as error:
            args.error(str(error))
    elif getattr(args, "data", None):
        _take_data(args)
    options = args.options
    if getattr(args, "checkpoint", None):
        options = ["model.load_finetuned=True", f"model.finetuned={args.checkpoint}", *options]
    if getattr(args, "run", None):
        options = [f"run.output_dir={args.run / 'evaluate'}", *options]
    if args.print_config:
        from lavis_mafa.settings import format_config, load_config

        # Does not check that the machine has the files and GPUs, unlike --dry-run.
        sys.stdout.write(format_config(load_config(args.cfg_path, options, machine=False)))
        return None
    from lavis_mafa.training import session

    action = session.check_only if args.dry_run else session.run
    if args.command == "evaluate":
        options = [*options, "run.evaluate=True"]
    action(args.cfg_path, options)
    return None


def _take_data(args: argparse.Namespace) -> None:
    """Write a config for ``--data`` and use it."""
    from lavis_mafa.commands.own_data import write_config

    try:
        file, chosen = write_config(args.data, args.images, **columns_of(args))
    except (OSError, ValueError) as error:
        args.error(str(error))
    if rank_in_environment() == 0:
        print(chosen, flush=True)
    args.cfg_path = str(file)
