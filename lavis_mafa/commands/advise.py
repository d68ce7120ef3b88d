"""Advise whether to group mini-batches (GRIT) and to mine (Con-D, ECM) on your data.

Counts false negatives as `lavis-mafa count` does, in random and grouped mini-batches, and compares
the figures with bounds. Every recommendation comes with its figures, and is clear or uncertain; it
says so if the evidence is insufficient. The bounds come from the comparisons in docs/results.md:
treat the advice as a hypothesis about other data. Features and verdicts in --output are reused.
"""

from __future__ import annotations

import argparse

from lavis_mafa.commands import count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    count.add_arguments(
        parser,
        batch_sizes="the config's, which is always counted, and those already counted in --output",
        search_spaces="those already counted, else M of the config and an eighth, half and all of "
        "the data up to 10,000 pairs or 4 M; if half of the data is more, M/4 and 4 M too",
        sample="that of the counts in --output, else the largest search space",
    )


def run(args: argparse.Namespace) -> None:
    """Write ``advice.json`` and ``advice.html``, and print the advice."""
    from lavis_mafa.mining.advice import advise

    advise(args)
