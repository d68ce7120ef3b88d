"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path


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


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--cfg-path``, ``--options`` and ``--split``."""
    add_options(parser)
    parser.add_argument(
        "--split",
        default="train",
        help="split to read (default: train); of an evaluation split, every caption with its image",
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--cfg-path``, ``--options``, ``--split`` and ``--checkpoint``."""
    add_data_arguments(parser)
    parser.add_argument(
        "--checkpoint", help="weights of the model (default: the weights that the config names)"
    )


def add_recorded_data_arguments(parser: argparse.ArgumentParser, when: str = "") -> None:
    """Add ``--cfg-path`` and ``--options`` of a command that reads judged pairs."""
    parser.add_argument(
        "--cfg-path", help=f"{when}config of the data (default: the config recorded in JUDGED)"
    )
    parser.add_argument(
        "--options",
        nargs="+",
        metavar="key=value",
        help=f"{when}override config keys (default: recorded)",
    )


def add_judgements_argument(parser: argparse.ArgumentParser, use: str) -> None:
    """Add ``--judgements``; ``use`` says what the command does with them."""
    parser.add_argument(
        "--judgements",
        type=Path,
        metavar="FILE",
        help="ratings or votes of people on pairs (docs/analysis.md), for data that do not know "
        f"which pairs match: {use}",
    )


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


def add_column_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the annotation files, ``--image-key`` and ``--caption-key``."""
    parser.add_argument("files", nargs="+", metavar="FILES", help=".json, .jsonl, .csv or .tsv")
    parser.add_argument("--image-key", help="column of the image path; default: detected")
    parser.add_argument("--caption-key", help="column of the caption(s); default: detected")
