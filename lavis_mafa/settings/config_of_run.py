"""The config that a run has recorded in its folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from lavis_mafa.io.files import read_json_lines

LOG = "log.jsonl"
# Keys of `run` that say where and how this one run was started.
OF_ONE_START = (
    "rank",
    "world_size",
    "gpu",
    "distributed",
    "dist_url",
    "resume_ckpt_path",
    "job_id",
    "max_steps",
)


_trusted: ContextVar[tuple[Path, ...]] = ContextVar("folders of --trust", default=())


@contextmanager
def trusting(folders: Sequence[str | Path]) -> Iterator[None]:
    """Use what files in these folders name as if the user gave it; see `settings.foreign`.

    Raises:
        ValueError: if one is not a folder.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise ValueError(
                f"--trust {folder}: no such folder; expected the folder of a run or of judged pairs"
            )
    before = _trusted.set(tuple(Path(folder).resolve() for folder in folders))
    try:
        yield
    finally:
        _trusted.reset(before)


def is_trusted(file: str | Path) -> bool:
    """Return whether a file is in a folder that the user trusts, see `trusting`."""
    return any(Path(file).resolve().is_relative_to(folder) for folder in _trusted.get())


def is_run(folder: str | Path) -> bool:
    """Return whether a folder is that of a run: it has a log."""
    return (Path(folder) / LOG).is_file()


def recorded_config(folder: str | Path) -> dict[str, Any]:
    """Return the last config in a run's log as plain data, without keys of one start.

    Raises:
        ValueError: if the log has no config.
    """
    path, found = Path(folder) / LOG, None
    for record in read_json_lines(path):
        if record.get("kind") == "config":
            found = record.get("config")
    if not isinstance(found, dict) or not isinstance(found.get("run"), dict):
        raise ValueError(f"{path} records no config: give --cfg-path")
    config = {name: found[name] for name in ("run", "model", "datasets") if name in found}
    config["run"] = {k: v for k, v in found["run"].items() if k not in OF_ONE_START}
    return config
