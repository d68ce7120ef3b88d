"""Write a checkpoint in the format of another program.

--to hf             a folder for Hugging Face transformers: BlipForImageTextRetrieval from a BLIP
                    checkpoint, Blip2ForImageTextRetrieval from a BLIP-2 checkpoint of stage 1,
                    Blip2ForConditionalGeneration from one of stage 2
--to hf_captioning  the same for BLIP's decoder of captions: BlipForConditionalGeneration
--to safetensors    the weights of any checkpoint as they are, without pickle; this package loads it
--to albef_*        a checkpoint for LAVIS's ALBEF model of that name: albef_vqa, albef_nlvr, ...
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lavis_mafa.commands.arguments import add_trust_argument, existing_files

SAFETENSORS = "safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lavis-mafa export``."""
    parser.usage = "%(prog)s CHECKPOINT OUT --to FORMAT [options of the format]"
    parser.add_argument(
        "checkpoint", type=existing_files, help="file, URL, or folder of transformers"
    )
    parser.add_argument("out", type=Path, help="folder (hf*) or file to write")
    parser.add_argument(
        "--to", required=True, metavar="FORMAT", help="hf, hf_captioning, safetensors or albef_*"
    )
    albef = parser.add_argument_group("albef_*")
    albef.add_argument("--fusion-layer", type=int, help="first fusion layer of BERT; default: 6")
    hf = parser.add_argument_group("hf*")
    hf.add_argument("--arch", help="LAVIS model; default: the one in the checkpoint's config")
    hf.add_argument("--model-type", help="its type; default: the one in the checkpoint's config")
    hf.add_argument(
        "--options",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the model, such as image_size=364 or opt_model=FOLDER",
    )
    hf.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    hf.add_argument("--license", help="for the model card, such as bsd-3-clause; default: unknown")
    hf.add_argument("--push", metavar="USER/NAME", help="upload the folder to this repository")
    hf.add_argument("--private", action="store_true", help="make a new repository private")
    add_trust_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Export and return the exit status: 1 if it failed, after printing why."""
    if args.private and not args.push:
        args.error("--private is an option of --push")
    try:
        if args.push:  # before anything that takes long
            from lavis_mafa.export.push import require_hub

            require_hub(args.push)
        message = _export(args)
    except (OSError, ValueError, ImportError) as error:
        print(f"export failed: {error}", file=sys.stderr)
        return 1
    print(message)
    return _push(args) if args.push else 0


def _export(args: argparse.Namespace) -> str:
    """Export; return what was written."""
    from lavis_mafa.export.hugging_face import TARGETS, export_hugging_face
    from lavis_mafa.export.lavis_forms import FORMS, export_lavis
    from lavis_mafa.export.weights_file import export_safetensors

    known = (*TARGETS, SAFETENSORS, *FORMS)
    if args.to not in known:
        args.error(f"--to {args.to}: expected one of {', '.join(known)}")
    given = (args.arch, args.model_type, args.options, args.license, args.push)
    if args.to not in TARGETS and (any(given) or args.dtype != "float32"):
        takes = "no option" if args.to == SAFETENSORS else "one option, --fusion-layer"
        args.error(f"--to {args.to} takes {takes}; the others are for hf*")
    if args.to not in FORMS and args.fusion_layer is not None:
        args.error("--fusion-layer is an option of albef_*")
    if args.to == SAFETENSORS:
        return f"wrote {args.out}: {export_safetensors(args.checkpoint, args.out)} tensors"
    if args.to in FORMS:
        count = export_lavis(args.checkpoint, args.out, args.to, args.fusion_layer or 6)
        return f"wrote {args.out}: {count} tensors for {args.to}"
    return export_hugging_face(
        args.checkpoint,
        args.out,
        to=args.to,
        arch=args.arch,
        model_type=args.model_type,
        options=args.options,
        dtype=args.dtype,
        licence=args.license,
    )


def _push(args: argparse.Namespace) -> int:
    from lavis_mafa.export.push import PushError, push_folder

    try:
        print(f"pushed to {push_folder(args.out, args.push, args.private)}")
    except PushError as error:
        print(
            f"push failed, {args.out} is complete: {error}; retry with "
            f"`hf upload {args.push} {args.out}`",
            file=sys.stderr,
        )
        return 1
    return 0
