"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lavis_mafa.io.launcher import usable_cores
from lavis_mafa.io.project_files import config_named
from lavis_mafa.settings.config_of_run import LOG, is_run
from lavis_mafa.tools import ALL

PAIR_FILES = (
    ".json, .jsonl, .csv, .tsv, .parquet, .arrow, .tar, or a folder of shards or parquet files, of "
    "save_to_disk of Hugging Face's datasets, or of pictures, each with a .txt of the same name"
)


# Argument types refuse missing files at once, not after seconds of imports.
def existing(text: str) -> Path:
    """Parse the path of an existing file or folder."""
    path = Path(text).expanduser()
    if not path.exists():
        where = "" if path.is_absolute() else f" in {os.getcwd()}"
        raise argparse.ArgumentTypeError(f"{text} does not exist{where}")
    return path


def existing_files(text: str) -> str:
    """Parse an existing file or folder, or a glob, brace list or URL."""
    if "://" not in text and not set(text) & set("*?[{"):
        existing(text)
    return text


def folder_of_images(given: Path | None, files: Sequence[str]) -> Path | None:
    """Return the value of ``--images``, or else the folder that contains all given folders, or that
    of the files; None if they are in several: a path could be relative to any of these."""
    paths = [Path(one).expanduser().absolute() for one in files]
    if given is None and all(path.is_dir() for path in paths):
        return Path(os.path.commonpath(paths))
    own = {next(one for one in (path, *path.parents) if one.is_dir()) for path in paths}
    return given or (own.pop() if len(own) == 1 else None)


def _config(text: str) -> str:
    try:
        config_named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _run_folder(text: str) -> Path:
    folder = existing(text)
    if not is_run(folder):
        raise argparse.ArgumentTypeError(f"{text} is not the folder of a run: it has no {LOG}")
    return folder


def add_options(parser: argparse.ArgumentParser, run: str | None = None) -> Any:
    """Add LAVIS's ``--cfg-path`` and ``--options``, and ``--run`` with the help text ``run``.

    Returns:
        The group of mutually exclusive arguments, to which others can be added.
    """
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument(
        "--cfg-path",
        type=_config,
        help="config: a YAML file, or the name of a shipped one, such as albef_toy",
    )
    if run is not None:
        sources.add_argument("--run", type=_run_folder, metavar="FOLDER", help=run)
    parser.add_argument(
        "--options",
        nargs="+",
        default=[],
        metavar="key=value",
        help="settings that override the config's, such as run.max_epoch=5",
    )
    add_trust_argument(parser)
    return sources


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust``, which `lavis_mafa.cli` reads."""
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="FOLDER",
        help="use the plugins, URLs, names on the Hugging Face hub and places to write that files "
        "in this folder name, such as the log of a run: only of people you trust; repeatable",
    )


RUN_HELP = (
    "folder of a run, instead of --cfg-path: its config, with its best checkpoint, else its last "
    "one; --checkpoint best or last chooses"
)


def add_analysed_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for pairs, model and judges of an analysis, from a config or from files."""
    sources = add_options(parser, run=RUN_HELP)
    sources.add_argument(
        "--data",
        nargs="+",
        type=existing_files,
        metavar="FILES",
        help="your own pairs, instead of --cfg-path, with --encoder and without LAVIS: "
        f"{PAIR_FILES}",
    )
    add_checkpoint_argument(parser)
    _add_con_d_argument(parser)
    files = parser.add_argument_group("with --data")
    files.add_argument(
        "--encoder",
        nargs="+",
        metavar="MODEL",
        help="what encodes both sides: a folder or a name on the Hugging Face hub of a CLIP or a "
        "SigLIP in transformers, or of a SentenceTransformer; open_clip:NAME, "
        "open_clip:NAME/PRETRAINED or a folder of open_clip; or two .npy files of features, of "
        "images and of captions, with a row for each pair",
    )
    files.add_argument(
        "--judge",
        metavar="MODEL",
        help="what judges pairs: captions (compares captions; captions:characters for scripts "
        "without spaces, captions:MODEL by a SentenceTransformer); a folder or a name on the hub "
        "of BLIP-2 with a matching head, of a SigLIP, or of a CrossEncoder (default: only the "
        "similarity of the encoder)",
    )
    files.add_argument(
        "--text-keys",
        nargs=2,
        metavar=("ANCHOR", "POSITIVE"),
        help="columns of pairs of two texts, which a SentenceTransformer encodes",
    )
    add_columns(files)


@contextmanager
def analysing(args: argparse.Namespace) -> Iterator[None]:
    """Check the arguments of `add_analysed_arguments`; if ``--data`` lacks a package, say what to
    install.

    It ends with an error for arguments of files with a config, and the reverse.

    Raises:
        ValueError: instead of the ImportError.
    """
    of_files = ("encoder", "judge", "text_keys", *COLUMNS)
    wrong = ("options", "checkpoint", "con_d") if args.data else of_files
    for name in wrong:
        if getattr(args, name):
            option, other = name.replace("_", "-"), "--cfg-path" if args.data else "--data"
            args.error(f"--{option} needs {other}")
    if args.data and not args.encoder:
        args.error("--data needs --encoder: what encodes the pairs, see --help")
    if args.text_keys and (args.image_key or args.caption_key):
        args.error("--text-keys names both columns: leave out --image-key and --caption-key")
    if args.data:
        args.images = folder_of_images(args.images, args.data)
    try:
        yield
    except ImportError as error:
        if not args.data:
            raise
        raise ValueError(
            f"--data needs the package {error.name or ''}, which is not installed "
            f'({str(error).strip().splitlines()[0]}): pip install "lavis-mafa[audit]"'
        ) from error


def add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--checkpoint``."""
    parser.add_argument(
        "--checkpoint",
        help="weights of the model: a file, or with --run best or last (default: the weights that "
        "the config names; with --run the best)",
    )


def _add_con_d_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--con-d`` and ``--self-check``."""
    parser.add_argument(
        "--con-d",
        nargs="+",
        default=[],
        metavar="NAME.key=value",
        help="discriminators by name, with the keys of model.mafa.con_d, such as "
        "blip.arch=blip_retrieval blip.model_type=coco mine.arch=albef_mafa mine.checkpoint=PATH "
        "(default: model.mafa.con_d of the config)",
    )
    parser.add_argument(
        "--self-check",
        choices=["warn", "refuse", "skip"],
        help="judge own and random pairs first, in seconds: warn of a discriminator that cannot "
        "separate them, refuse it, or skip the check (default: its self_check, which is warn)",
    )


def number(least: int, other: str = "") -> Callable[[str], int]:
    """Return a parser of integers that are at least ``least``; ``other`` ends its message."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"{text}: expected a number of at least {least}{other}"
            )
        return int(text)

    return parse


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 to 1")
    return value


def search_space(text: str) -> int | str:
    """Parse a search space: a number of pairs, or `ALL`."""
    return text if text == ALL else number(1, f", or {ALL}")(text)


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--output``, a folder that need not exist."""

    def folder(text: str) -> Path:
        path = Path(text)
        if path.is_file():
            raise argparse.ArgumentTypeError(f"{text} is a file, expected a folder")
        return path

    text = "folder for the results"
    parser.add_argument("--output", type=folder, required=True, help=text)


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the annotation files, the columns of pairs, ``--images``, and ``--workers``."""
    parser.add_argument(
        "files",
        nargs="+",
        type=existing_files,
        metavar="FILES",
        help=PAIR_FILES,
    )
    add_columns(parser)
    parser.add_argument(
        "--workers",
        type=int,
        default=min(8, usable_cores()),
        metavar="N",
        help="how many images are read at the same time (default: %(default)s)",
    )


_KEYS = ("image_key", "caption_key", "image_id_key")
COLUMNS = ("images", *_KEYS)  # arguments of `add_columns`


def columns_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the names of the columns that `add_columns` parsed, as of `PairColumns`."""
    return {name: getattr(args, name) for name in _KEYS}


def add_columns(parser: Any) -> None:
    """Add the names of the columns of pairs, and ``--images``."""
    parser.add_argument("--image-key", help="column of the image path; default: detected")
    parser.add_argument("--caption-key", help="column of the caption(s); default: detected")
    parser.add_argument("--image-id-key", help="column of image ids; default: image_id")
    parser.add_argument(
        "--images",
        type=existing,
        metavar="DIR",
        help="folder that the paths of images are relative to (default: the given folder, the "
        "one that contains all given folders, or the folder of the files)",
    )
