"""python -m lavis_mafa.export: write a checkpoint in the form that another program reads.

--to hf       a folder for Hugging Face transformers: Blip2ForImageTextRetrieval from a BLIP-2
              checkpoint of stage 1, Blip2ForConditionalGeneration from one of stage 2
--to albef_*  a checkpoint for LAVIS's ALBEF model of that name
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lavis_mafa.export.lavis_forms import FORMS, export_lavis

HUGGING_FACE = "hf"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m lavis_mafa.export",
        usage="%(prog)s CHECKPOINT OUT --to FORM [settings of the form]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("checkpoint", help="file or URL")
    result.add_argument("out", type=Path, help="folder (hf) or file (albef_*) to write")
    result.add_argument("--to", required=True, choices=[HUGGING_FACE, *FORMS])
    albef = result.add_argument_group("albef_*")
    albef.add_argument("--fusion-layer", type=int, help="first fusion layer of BERT; default: 6")
    hf = result.add_argument_group("hf")
    hf.add_argument("--arch", help="LAVIS model; default: what the checkpoint's config says")
    hf.add_argument("--model-type", help="its type; default: likewise")
    hf.add_argument(
        "--options",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the model, such as image_size=364 or opt_model=FOLDER",
    )
    hf.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    hf.add_argument(
        "--no-check",
        action="store_true",
        help="do not load the folder again and compare its outputs with LAVIS's",
    )
    return result


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 if the export was written, 1 if it failed and said why.
    """
    commands = parser()
    args = commands.parse_args(argv)
    given = args.arch or args.model_type or args.options or args.no_check
    if args.to != HUGGING_FACE and (given or args.dtype != "float32"):
        commands.error(f"--to {args.to} has one setting, --fusion-layer; the others are of hf")
    if args.to == HUGGING_FACE and args.fusion_layer is not None:
        commands.error("--fusion-layer is a setting of albef_*")
    try:
        if args.to != HUGGING_FACE:
            count = export_lavis(args.checkpoint, args.out, args.to, args.fusion_layer or 6)
            print(f"wrote {args.out}: {count} tensors for {args.to}")
            return 0
        from lavis_mafa.export.hugging_face import export_hugging_face

        told = export_hugging_face(
            args.checkpoint,
            args.out,
            arch=args.arch,
            model_type=args.model_type,
            options=args.options,
            dtype=args.dtype,
            check=not args.no_check,
        )
    except (OSError, ValueError, ImportError) as error:
        print(f"export failed: {error}", file=sys.stderr)
        return 1
    print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
