"""Tables of measured rows, and their JSON file."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from lavis_mafa._version import __version__
from lavis_mafa.io.files import write_json
from research.benchmarks import harness
from research.benchmarks.harness import Row, Sizes

HEAD = ("what", "ours", "reference", "ratio", "range", "target", "met")
WIDTHS = (76, 12, 12, 6, 14, 8, 3)


def cells(row: Row) -> list[str]:
    """Return the cells of a row, without its note."""
    both = ["-" if x is None else f"{x:.3g} {row.unit}" for x in (row.ours, row.reference)]
    spread = f"{row.low:.2f} to {row.high:.2f}"
    met = {None: "", True: "yes", False: "no"}[row.met]
    return [row.what, *both, f"{row.ratio:.2f}", spread, row.target, met]


def line(values: Iterable[str]) -> str:
    """Return a line of the plain table, aligned."""
    return " | ".join(f"{text:<{width}}" for text, width in zip(values, WIDTHS, strict=True))


def markdown(rows: Iterable[Row]) -> str:
    """Return the table with its notes in Markdown."""
    lines = [(*HEAD, "note"), *[("---",) * (len(HEAD) + 1)]]
    lines += [(*cells(row), row.note) for row in rows]
    # A bar within a cell would end the cell.
    return "".join(
        "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |\n" for texts in lines
    )


def machine() -> dict[str, Any]:
    """Return the facts about the machine and software that a figure depends on."""
    name = platform.processor()
    try:
        match = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
        name = match[1] if match else name
    except OSError:
        pass
    return {
        "cpu": name,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": harness.clock.__name__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lavis_mafa": __version__,
    }


def save(path: str, sizes: Sizes, rows: Iterable[Row], failed: Mapping[str, str]) -> None:
    """Write rows, date, machine, sizes and failed parts as JSON."""
    content = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "sizes": asdict(sizes),
        "rows": [{**asdict(row), "met": row.met} for row in rows],
        "failed": dict(failed),
    }
    write_json(path, content)
