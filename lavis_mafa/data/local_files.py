"""Builders of local files: default values, splits, and LAVIS's builders reading files in place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lavis.datasets.builders.base_dataset_builder import BaseDatasetBuilder, load_dataset_config
from omegaconf import OmegaConf

SPLITS = ("train", "val", "test")


class LocalBuilder(BaseDatasetBuilder):  # type: ignore[misc]
    """A LAVIS builder that downloads nothing and takes missing keys from its default config."""

    def __init__(self, cfg: Any = None) -> None:
        default = load_dataset_config(self.default_config_path())
        if isinstance(cfg, str):
            cfg = load_dataset_config(cfg)
        if OmegaConf.is_config(cfg):
            # Resolved first: merging detaches the node from the tree that its references point to.
            cfg = OmegaConf.to_container(cfg, resolve=True)
        super().__init__(OmegaConf.merge(default, cfg or {}))


def named_splits(builder: str, annotations: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the splits of ``build_info.annotations`` that have files.

    Raises:
        ValueError: if none has, or a name is not in `SPLITS`.
    """
    named = {split: files for split, files in (annotations or {}).items() if files}
    unknown = [split for split in named if split not in SPLITS]
    if unknown or not named:
        found = f"unknown {', '.join(map(str, unknown))}" if unknown else "none"
        raise ValueError(
            f"{builder}: build_info.annotations: expected {', '.join(SPLITS)}, each with 'storage' "
            f"(a file or a list of them), got {found}"
        )
    return named


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
