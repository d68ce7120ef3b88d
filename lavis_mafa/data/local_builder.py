"""The base of the builders of local files: default values and splits."""

from __future__ import annotations

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
