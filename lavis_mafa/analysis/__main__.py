"""python -m lavis_mafa.analysis COMMAND: count, mine and look at false negatives."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import warnings
from collections.abc import Sequence

from lavis_mafa.runners.session import exit_status

# By command a module of this package, with `add_arguments(parser)` and `run(args)`, and its help.
COMMANDS = {
    "count": "false negatives under random and grouped mini-batches",
    "mine": "write the connections that Con-D finds as new training pairs",
    "profile": "how soft labels of ITC are spread over a mini-batch",
    "vision": "accuracy of MLM with and without the image",
    "report": "a page that shows a run, or what was counted or mined",
    "threshold": "precision and recall of Con-D, agreement of several",
    "label": "a page to label pairs by hand, and the correction that follows",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lavis_mafa.analysis", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = list(sys.argv[1:] if argv is None else argv)
    for name, text in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=text)
        if given[:1] == [name]:  # the others need not be imported
            module = importlib.import_module(f"lavis_mafa.analysis.commands.{name}")
            one.description = module.__doc__
            one.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(one)
    args = parser.parse_args(given)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # LAVIS's dependencies warn about each other at every start.
    warnings.filterwarnings("ignore", category=FutureWarning)
    return exit_status(lambda: module.run(args))


if __name__ == "__main__":
    sys.exit(main())
