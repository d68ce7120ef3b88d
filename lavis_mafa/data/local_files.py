"""Let LAVIS's builders read local annotation files where they are."""

from __future__ import annotations

import os
from typing import Any

from lavis.datasets.builders.base_dataset_builder import BaseDatasetBuilder


class UseLocalFiles:
    """Mixin before a builder of LAVIS, which copies annotation files into its cache.

    A copy is made once and ignores later edits. Relative paths are those of the working directory.
    """

    def build_datasets(self) -> Any:
        builder: Any = self
        info = builder.config.build_info
        read_in_place(info.annotations)
        if os.path.isdir(info.images.storage):
            info.images.storage = os.path.abspath(info.images.storage)
        return super().build_datasets()  # type: ignore[misc]


def reads_as_lavis(builder: type[BaseDatasetBuilder]) -> bool:
    """Return whether a builder gets its annotation files as LAVIS's builders do."""
    as_lavis = (BaseDatasetBuilder.build_datasets, UseLocalFiles.build_datasets)
    return builder.build_datasets in as_lavis


def read_in_place(annotations: Any) -> None:
    """Let LAVIS read local annotation files where they are.

    LAVIS requires a ``url`` even if ``storage`` exists, and copies a local file once, so that later
    edits of it have no effect.
    """
    for info in (annotations or {}).values():
        if info is None:
            continue
        stored = info.get("storage")
        for one in (info.get("url") or stored, stored):
            files = [one] if isinstance(one, str) else list(one or [])
            if files and all(map(os.path.isfile, files)):
                found = list(map(os.path.abspath, files))
                info.url = info.storage = found[0] if isinstance(one, str) else found
                break
        else:
            info.url = info.get("url") or stored
