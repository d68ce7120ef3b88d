"""Write a checkpoint of BLIP or BLIP-2 as a folder that Hugging Face transformers loads.

A BLIP becomes BlipForImageTextRetrieval, a BLIP-2 of stage 1 Blip2ForImageTextRetrieval.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lavis_mafa.commands.arguments import existing_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lavis-mafa export``."""
    parser.add_argument(
        "checkpoint", type=existing_files, help="file, URL, or folder of transformers"
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--to", default="hf", choices=["hf"])
    parser.add_argument("--arch", help="LAVIS model; default: the one in the checkpoint's config")
    parser.add_argument(
        "--model-type", help="its type; default: the one in the checkpoint's config"
    )
    parser.add_argument(
        "--options",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the model, such as image_size=364 or tokenizer=FILE",
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])


def run(args: argparse.Namespace) -> int:
    """Export and return the exit status: 1 if it failed, after printing why."""
    try:
        from lavis_mafa.checkpoints.hugging_face import export_hugging_face

        message = export_hugging_face(
            args.checkpoint,
            args.out,
            arch=args.arch,
            model_type=args.model_type,
            options=args.options,
            dtype=args.dtype,
        )
    except (OSError, ValueError, ImportError) as error:
        print(f"export failed: {error}", file=sys.stderr)
        return 1
    print(message)
    return 0
