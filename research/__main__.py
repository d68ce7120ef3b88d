"""The program ``python -m research COMMAND``, run from a checkout."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lavis_mafa import cli

# Described as in `lavis_mafa.cli`.
COMMANDS = {
    "study": ("research.study", "run the systems of a study file and compare them"),
    "image-start": (
        "research.image_start",
        "pre-train a small model's image encoder on labels of images",
    ),
    "bench": ("research.benchmarks.run", "ratios of speed and memory to LAVIS and others"),
    "coverage": (
        "research.coverage",
        "how often intervals of studies contain the true difference",
    ),
    "figures": ("research.figures", "draw the figures of the docs from recorded results"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    return cli.main(argv, COMMANDS, "python -m research", __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
