"""What our variants of LAVIS's builders have in common: local files, and settings of data sets."""

from __future__ import annotations

import os
from dataclasses import fields
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


class SetsOptions:
    """Mixin before a builder of LAVIS that hands keys of ``build_info`` to its data sets.

    Each option of ``build_options`` is set on the data sets that have an attribute of this name.
    """

    build_options: Any

    def build(self) -> Any:
        builder: Any = self
        datasets = super().build()  # type: ignore[misc]
        for option in fields(self.build_options):
            default = getattr(self.build_options, option.name)
            value = type(default)(builder.config.build_info.get(option.name, default))
            for dataset in datasets.values():
                if hasattr(dataset, option.name):
                    setattr(dataset, option.name, value)
        return datasets
