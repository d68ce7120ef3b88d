"""What builders of local files share: defaults filled in, splits, and converting on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis.datasets.builders.base_dataset_builder import BaseDatasetBuilder, load_dataset_config
from omegaconf import OmegaConf
from torch.utils.data import Dataset

from lavis_mafa.io.processes import on_main_process

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


class ConvertingBuilder(LocalBuilder):
    """Builds the splits that `build_info.annotations` names, from files that are converted once.

    Datasets are made from `vis_processor`, `text_processor`, `ann_paths` (the split's files) and
    what `dataset_options` gives.
    """

    name = ""  # registered

    def dataset_options(self, info: Any) -> dict[str, Any]:
        """What all splits' datasets are made with, from `build_info`."""
        raise NotImplementedError

    def build_datasets(self) -> dict[str, Dataset]:
        """{split: dataset}. Under torch.distributed rank 0 converts while the others wait.

        Raises:
            FileNotFoundError, ValueError: see the datasets. On ranks other than 0 a failure of
                rank 0 is a RuntimeError with its message, so that no rank waits for ever.
        """
        datasets = on_main_process(self.build)
        return self.build() if datasets is None else datasets

    def build(self) -> dict[str, Dataset]:
        """Build the splits in this process."""
        info = self.config.build_info
        annotations = named_splits(self.name, info.annotations)
        options = self.dataset_options(info)
        self.build_processors()
        datasets: dict[str, Dataset] = {}
        for split, files in annotations.items():
            storage = files.get("storage")
            if not storage:
                raise ValueError(
                    f"{self.name}: build_info.annotations.{split}.storage: expected a file or a "
                    "list of them, got nothing"
                )
            kind = "train" if split == "train" else "eval"
            dataset_cls = self.train_dataset_cls if split == "train" else self.eval_dataset_cls
            datasets[split] = dataset_cls(
                vis_processor=self.vis_processors[kind],
                text_processor=self.text_processors[kind],
                ann_paths=[storage] if isinstance(storage, str) else list(storage),
                **options,
            )
        return datasets


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
            f"(a file or a list of them), got {found}"
        )
    return named
