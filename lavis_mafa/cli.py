"""The program ``lavis-mafa COMMAND``, also ``python -m lavis_mafa COMMAND``.

Only the chosen command's module is imported, and LAVIS only when the command runs: arguments are
parsed, and ``--help`` is printed, without it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from lavis_mafa._version import __version__
from lavis_mafa.compat.versions import UnsupportedVersionError
from lavis_mafa.io.launcher import end_with_launcher
from lavis_mafa.io.terminal import PrintableFormatter, printable_output

# By name: the module of a command and its help. A module has ``add_arguments(parser)`` and
# ``run(args)``, which returns the exit status or None for 0; ``--help`` prints its docstring. It
# must import neither LAVIS nor torch before ``run``.
COMMANDS = {
    "train": ("lavis_mafa.commands.train", "train a model"),
    "evaluate": ("lavis_mafa.commands.train", "evaluate a model"),
    "demo": ("lavis_mafa.commands.demo", "compare systems with and without MAFA on a toy world"),
    "count": ("lavis_mafa.commands.count", "count false negatives in mini-batches of your data"),
    "mine": ("lavis_mafa.commands.mine", "write the pairs that Con-D finds as new training data"),
    "label": (
        "lavis_mafa.commands.label",
        "label pairs by hand; precision and recall of a Con-D by threshold",
    ),
    "report": ("lavis_mafa.commands.report", "write a page about a run, counts or mined pairs"),
    "check-data": ("lavis_mafa.commands.check_data", "check your own image-text pairs"),
    "features": ("lavis_mafa.commands.features", "encode pictures once, to train on features"),
    "export": ("lavis_mafa.commands.export", "write a checkpoint in the format of another program"),
}


def main(
    argv: Sequence[str] | None = None,
    table: Mapping[str, tuple[str, str]] = COMMANDS,
    program: str = "lavis-mafa",
    description: str = "Pre-train vision-language models whose false negatives are detected.",
) -> int:
    """Run a command of a table such as `COMMANDS` and return its exit status."""
    # Before torch is imported: by default, waiting threads spin, and next to other processes, or in
    # a container with a quota, they take the time of the threads that they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # GNU's and LLVM's library of OpenMP
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # Intel's
    end_with_launcher()
    with printable_output():
        try:
            given = list(sys.argv[1:] if argv is None else argv)
            action = _prepare(given, table, program, description)
            from lavis_mafa.training.exit_status import exit_status
        except UnsupportedVersionError as error:
            print(f"lavis-mafa: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:  # during the imports; `exit_status` handles it later
            print("interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
        return exit_status(action)


@contextmanager
def _ended_by_closed_output() -> Iterator[None]:
    """End without a traceback when nobody reads the output any more, as after ``| head``."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):  # another pipe broke
            raise
        # What is left in the buffer must go somewhere when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: the usage of all arguments above it would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a question that names the known word most similar to a given one; "" if none is."""
    alike = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {alike[0]}?" if alike else ""


def _prepare(
    given: Sequence[str], table: Mapping[str, tuple[str, str]], program: str, description: str
) -> Callable[[], int | None]:
    """Parse the arguments and import the command; return what runs it."""
    parser = _Parser(prog=program, description=description)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = run = None
    for name, (module_name, text) in table.items():
        command = commands.add_parser(name, help=text, description=text)
        if given[:1] == [name]:  # the other modules need not be imported
            module = importlib.import_module(module_name)
            command.description = module.__doc__
            command.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(command)
            command.add_argument(
                "--plugin",
                action="append",
                default=[],
                metavar="FILE",
                help="Python file or module with code of your own to import first; repeatable",
            )
            chosen, run = command, module.run
    if given and not given[0].startswith("-") and given[0] not in table:
        hint = _did_you_mean(given[0], table) or f"; expected one of {', '.join(table)}"
        parser.error(f"no command is called {given[0]}{hint}")
    args, unknown = parser.parse_known_args(given)
    assert chosen and run  # argparse exits unless the first argument is a command
    if unknown:
        name = unknown[0].partition("=")[0]
        hint = _did_you_mean(name, chosen._option_string_actions)
        chosen.error(f"unrecognized argument {name}{hint}")
    args.error = chosen.error  # for arguments that only `run` can check
    output = logging.StreamHandler()
    output.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[output])
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # "generated new fontManager"
    # LAVIS's dependencies warn about each other at every start.
    warnings.filterwarnings("ignore", category=FutureWarning)
    from lavis_mafa.io.plugins import load_plugins
    from lavis_mafa.settings.config_of_run import trusting

    def action() -> int | None:
        with trusting(getattr(args, "trust", ())), _ended_by_closed_output():
            _take_run(args)
            load_plugins(args.plugin)
            try:
                status: int | None = run(args)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "lavis":
                    raise
                args.error("it needs LAVIS, which is not installed: see Install in README.md")
        return status

    return action


def _take_run(args: argparse.Namespace) -> None:
    """Replace ``--run`` by the config of the run, and by its checkpoint if the command has
    ``--checkpoint``; ``--options`` override both.

    Raises:
        FileNotFoundError: if the folder has no checkpoint.
    """
    folder: Path | None = getattr(args, "run", None)
    if folder is None:
        return
    from lavis_mafa.training.checkpoint import BEST, LAST

    args.cfg_path = str(folder)
    named = any(option.startswith("model.finetuned=") for option in args.options)
    if named or not hasattr(args, "checkpoint"):
        return
    given, checkpoints = args.checkpoint, {"best": BEST, "last": LAST}
    if not given or given in checkpoints:
        names = [checkpoints[given]] if given else [BEST, LAST]
        found = [folder / name for name in names if (folder / name).is_file()]
        if not found:
            missing = " nor ".join(names)
            raise FileNotFoundError(f"--run: {folder} has no {missing}: name --checkpoint")
        given = str(found[0])
        logging.info("--run: config and %s of %s", found[0].name, folder)
    args.options = ["model.load_finetuned=True", f"model.finetuned={given}", *args.options]
    args.checkpoint = None
