"""What builders of local files share: defaults filled in, and the splits that a config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis.datasets.builders.base_dataset_builder import BaseDatasetBuilder, load_dataset_config
from omegaconf import OmegaConf

SPLITS = ("train", "val", "test")


class LocalBuilder(BaseDatasetBuilder):  # type: ignore[misc]
    """A LAVIS builder that downloads nothing; what a config leaves out is the default one's."""

    def __init__(self, cfg: Any = None) -> None:
        default = load_dataset_config(self.default_config_path())
        if isinstance(cfg, str):
            cfg = load_dataset_config(cfg)
        if OmegaConf.is_config(cfg):
            # Merging takes the node out of its tree, so references into the tree come first.
            cfg = OmegaConf.to_container(cfg, resolve=True)
        super().__init__(OmegaConf.merge(default, cfg or {}))


def named_splits(builder: str, annotations: Mapping[str, Any] | None) -> dict[str, Any]:
    """The splits of ``build_info.annotations`` that have files.

    Raises:
        ValueError: if there are none, or one is none of `SPLITS`.
    """
    named = {split: files for split, files in (annotations or {}).items() if files}
    unknown = [split for split in named if split not in SPLITS]
    if unknown or not named:
        found = f"unknown {', '.join(map(str, unknown))}" if unknown else "none"
        raise ValueError(
            f"{builder}: build_info.annotations: expected {', '.join(SPLITS)}, each with 'storage' "
            f"(an annotation file or a list of them), got {found}"
        )
    return named
