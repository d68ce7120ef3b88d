"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from lavis_mafa.mining import ALL


def add_options(
    parser: argparse.ArgumentParser, required: bool = True, run: str | None = None
) -> None:
    """Add LAVIS's ``--cfg-path`` and ``--options``, and ``--run`` if ``run`` says its use."""
    parser.add_argument(
        "--cfg-path",
        required=required and run is None,
        help="config: a YAML file, or the name of a shipped one, such as albef_toy",
    )
    if run is not None:
        parser.add_argument("--run", type=Path, metavar="FOLDER", help=run)
    parser.add_argument(
        "--options",
        nargs="+",
        default=[],
        metavar="key=value",
        help="settings that override the config's, such as run.max_epoch=5",
    )
    add_trust_argument(parser)


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust``, which the program itself reads."""
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
RUN_CONFIG_HELP = "folder of a run, instead of --cfg-path: its config"


def take_run(args: argparse.Namespace) -> None:
    """Let ``--run`` stand for the config and the checkpoint of a run; ``--options`` still win.

    A parser's default ``run_gives`` says what a command takes: ``model``, the config with a
    checkpoint; ``config``, the config; ``data``, the config if one is given at all.

    Raises:
        FileNotFoundError: if the folder is not that of a run, or has no checkpoint.
    """
    folder: Path | None = getattr(args, "run", None)
    gives = getattr(args, "run_gives", "model")
    if folder is None:
        if hasattr(args, "run") and args.cfg_path is None and gives != "data":
            args.error("give --cfg-path, or --run with the folder of a run")
        return
    if args.cfg_path is not None:
        args.error("give either --cfg-path or --run")
    from lavis_mafa.config.config_of_run import LOG, is_run
    from lavis_mafa.runners.checkpoint import BEST, LAST

    if not folder.is_dir():
        what = "a file" if folder.exists() else "no folder of this name exists"
        raise FileNotFoundError(f"--run {folder}: {what}, expected the folder of a run")
    if not is_run(folder):
        raise FileNotFoundError(f"--run: {folder} is not the folder of a run: it has no {LOG}")
    args.cfg_path, args.run_is_source = str(folder), True
    if gives != "model":
        return
    given = getattr(args, "checkpoint", None)
    if isinstance(given, list) and given:
        return  # several to compare
    if any(option.startswith("model.finetuned=") for option in args.options):
        return
    checkpoints = {"best": BEST, "last": LAST}
    if not given or given in checkpoints:
        names = [checkpoints[given]] if given else [BEST, LAST]
        found = [folder / name for name in names if (folder / name).is_file()]
        if not found:
            missing = " nor ".join(names)
            raise FileNotFoundError(f"--run: {folder} has no {missing}: name --checkpoint")
        given = str(found[0])
        logging.info("--run: config and %s of %s", found[0].name, folder)
    args.options = ["model.load_finetuned=True", f"model.finetuned={given}", *args.options]
    args.checkpoint = [] if isinstance(getattr(args, "checkpoint", None), list) else None


def add_data_arguments(parser: argparse.ArgumentParser, run: str = RUN_HELP) -> None:
    """Add ``--cfg-path``, ``--run``, ``--options`` and ``--split``."""
    add_options(parser, run=run)
    parser.add_argument(
        "--split",
        default="train",
        help="split to read (default: train); of an evaluation split, every caption with its image",
    )


def add_config_arguments(parser: argparse.ArgumentParser, run: str = RUN_HELP) -> None:
    """Add ``--cfg-path``, ``--run``, ``--options``, ``--split`` and ``--checkpoint``."""
    add_data_arguments(parser, run)
    add_checkpoint_argument(parser)


def add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--checkpoint``."""
    parser.add_argument(
        "--checkpoint",
        help="weights of the model: a file, or with --run best or last (default: the weights that "
        "the config names; with --run the best)",
    )


def add_recorded_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--cfg-path``, ``--run`` and ``--options`` of a command that reads judged pairs."""
    parser.add_argument(
        "--cfg-path", help="config of the data (default: the config recorded in JUDGED)"
    )
    parser.add_argument("--run", type=Path, metavar="FOLDER", help=f"{RUN_CONFIG_HELP} of the data")
    parser.set_defaults(run_gives="data")
    parser.add_argument(
        "--options", nargs="+", metavar="key=value", help="override config keys (default: recorded)"
    )
    add_trust_argument(parser)


def add_con_d_argument(parser: argparse.ArgumentParser) -> None:
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


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--sampling``, of one kind or several, and ``--seed``."""
    parser.add_argument(
        "--sampling",
        nargs="+",
        choices=["random", "grit"],
        default=["random", "grit"],
        help="how mini-batches are formed (default: both)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the sample and the mini-batches (default: 0)"
    )


def search_space(text: str) -> int | str:
    """Parse a search space: a number of pairs, or `ALL`."""
    try:
        return text if text == ALL else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a number or {ALL}, got {text!r}") from error


def add_neighbours_argument(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--neighbours``, for `ALL` as a search space.

    Args:
        default: of ``--neighbours``, in words.
    """
    parser.add_argument(
        "--neighbours",
        type=int,
        metavar="K",
        help=f"with search space {ALL}: most similar candidates of an anchor to judge (default: "
        f"{default})",
    )


def add_column_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the annotation files, ``--image-key``, ``--caption-key`` and ``--image-id-key``."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILES",
        help=".json, .jsonl, .csv, .tsv, .parquet or .arrow, or a folder of parquet files or of "
        "Hugging Face's datasets",
    )
    parser.add_argument("--image-key", help="column of the image path; default: detected")
    parser.add_argument("--caption-key", help="column of the caption(s); default: detected")
    parser.add_argument("--image-id-key", help="column of image ids; default: image_id")
