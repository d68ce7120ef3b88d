"""The program ``python -m research COMMAND``, run from a checkout."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import warnings
from collections.abc import Sequence

# By name: the module of a command and its help. A module has ``add_arguments(parser)`` and
# ``run(args)``, which returns the exit status or None for 0; ``--help`` prints its docstring. It
# must import neither LAVIS nor torch before ``run``.
COMMANDS = {
    "study": ("research.study", "run the systems of a study file and compare them"),
    "compare": ("research.compare", "run the study of methods in all worlds"),
    "demo": ("research.demo", "compare systems with and without MAFA on a toy world"),
    "profile": ("research.profile", "how soft labels are distributed in a mini-batch"),
    "vision": ("research.vision", "accuracy of MLM with and without the image"),
    "image-start": (
        "research.image_start",
        "train a start for a small model's image encoder from labels of images",
    ),
    "bench": ("research.benchmarks.run", "ratios of speed and memory to LAVIS and others"),
    "figures": ("research.figures.draw", "draw the figures of the docs from recorded results"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m research", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module_name, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if given[:1] == [name]:  # the other modules need not be imported
            module = importlib.import_module(module_name)
            command.description = module.__doc__
            command.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(command)
            command.set_defaults(run_command=module.run, error=command.error)
    args = parser.parse_args(given)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # LAVIS's dependencies warn about each other at every start.
    warnings.filterwarnings("ignore", category=FutureWarning)
    from lavis_mafa.commands.arguments import take_run
    from lavis_mafa.runners.session import exit_status

    def action() -> int | None:
        take_run(args)
        status: int | None = args.run_command(args)
        return status

    return exit_status(action)


if __name__ == "__main__":
    sys.exit(main())
