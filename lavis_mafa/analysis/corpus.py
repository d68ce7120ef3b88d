"""A config's model and pairs as an analysis reads them: no augmentation, no training."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import is_main_process
from omegaconf import OmegaConf
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from lavis_mafa.config import load_config
from lavis_mafa.config.check import is_url
from lavis_mafa.datasets.split_as_pairs import SplitAsPairs
from lavis_mafa.datasets.training_set import TrainingSet
from lavis_mafa.models.con_d.build import view_of
from lavis_mafa.models.mafa_model import checkpoint_of
from lavis_mafa.runners.launch import amp_dtype_of
from lavis_mafa.runners.loaders import evaluation_sets, training_set
from lavis_mafa.runners.session import begin, build_data, build_model

Processor = Callable[[Any], Any]


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """``--cfg-path``, ``--options``, ``--split`` and ``--checkpoint``."""
    add_data_arguments(parser)
    parser.add_argument(
        "--checkpoint", help="weights of the model; otherwise those that the config names"
    )


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """``--cfg-path``, ``--options`` and ``--split``."""
    parser.add_argument("--cfg-path", required=True, help="config of a training run, a YAML file")
    parser.add_argument(
        "--options", nargs="+", default=[], metavar="key=value", help="settings that go before it"
    )
    parser.add_argument(
        "--split",
        default="train",
        help="what to read (train); of an evaluation split, every caption with its image",
    )


@dataclass
class Opened:
    """What a config describes.

    Attributes:
        cfg: the checked config.
        model: in evaluation mode, on ``device``, without Con-D.
        data: the pairs of a split.
        device: where to compute.
    """

    cfg: Any
    model: Any
    data: Corpus
    device: torch.device

    def autocast(self) -> torch.autocast:
        """Mixed precision as ``run.amp`` and ``run.amp_dtype`` say."""
        dtype = amp_dtype_of(self.cfg.run_cfg)
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)


CPU = torch.device("cpu")
NO_SPLITS = ["run.valid_splits=[]", "run.test_splits=[]"]  # nothing is evaluated


def require_range(args: argparse.Namespace, **bounds: tuple[float, ...]) -> None:
    """Check numbers of the command line before anything is built; None is left alone.

    Args:
        bounds: by argument, the least value and perhaps what it must stay below.

    Raises:
        ValueError: naming all that are out of range.
    """
    wrong = []
    for name, (low, *high) in bounds.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not low <= value < (high[0] if high else math.inf):
                upper = f" and below {high[0]:g}" if high else ""
                option = f"--{name.replace('_', '-')}"
                wrong.append(f"{option} {value}: expected at least {low:g}{upper}")
    if wrong:
        raise ValueError("; ".join(wrong))


def options_of(args: argparse.Namespace) -> list[str]:
    """``--options`` and what ``--checkpoint`` stands for."""
    if not args.checkpoint:
        return [*args.options, *NO_SPLITS]
    if not is_url(args.checkpoint) and not os.path.isfile(args.checkpoint):
        raise FileNotFoundError(f"--checkpoint: no such file: {args.checkpoint}")
    given = ["model.load_finetuned=True", f"model.finetuned={args.checkpoint}"]
    return [*args.options, *NO_SPLITS, *given]


def about(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What others need to find the data again."""
    options = [str(option) for option in args.options]
    return {"cfg_path": str(args.cfg_path), "options": options, "split": args.split, **more}


def open_config(args: argparse.Namespace) -> Opened:
    """Build the model and the pairs of a config; joins a launcher's processes.

    Raises:
        ConfigError: with all that is wrong in the config.
        ValueError: if the data have no such split.
    """
    cfg = begin(args.cfg_path, options_of(args))
    task, train = _pairs_of(cfg, args.split)
    # Discriminators are built by who needs them.
    mafa = cfg.model_cfg.get("mafa")
    con_d = mafa.get("con_d") if mafa else None
    if mafa:
        mafa.con_d = None
    model = build_model(cfg, task)
    if mafa:
        mafa.con_d = con_d
    if checkpoint_of(cfg.model_cfg) is None:
        logging.warning(
            "the weights of %s are random, and so is what they find similar: name --checkpoint",
            cfg.model_cfg.arch,
        )
    run = cfg.run_cfg
    device = torch.device("cuda", int(run.get("gpu", 0))) if run.device == "cuda" else CPU
    view = view_of(cfg.model_cfg.arch, cfg.model_cfg.get("model_type"), model)
    data = Corpus(train, view, int(run.num_workers))
    return Opened(cfg, model.to(device).eval(), data, device)


def open_data(cfg_path: str, options: Sequence[str] = (), split: str = "train") -> TrainingSet:
    """The pairs of a config's split alone, to look at.

    Raises:
        ConfigError, ValueError: as `open_config`.
    """
    # The machine that looks need not be the one that computed: it may have no GPU.
    cfg = load_config(cfg_path, [*options, *NO_SPLITS], machine=False)
    return _pairs_of(cfg, split)[1]


def recorded_data(config: Mapping[str, Any] | None) -> TrainingSet:
    """The training pairs of a whole config as a run records it, to look at.

    Raises:
        ValueError: if there is none, or it names no training data; what else builders raise.
    """
    if config is None:
        raise ValueError("the run has recorded no config")
    parts = {f"{name}_cfg": OmegaConf.create(config[name]) for name in ("run", "model", "datasets")}
    recorded = SimpleNamespace(**parts, args=SimpleNamespace(cfg_path="the recorded config"))
    return _pairs_of(recorded, "train")[1]


def _pairs_of(cfg: Any, split: str) -> tuple[Any, TrainingSet]:
    """The task, and the pairs of a split.

    Raises:
        ValueError: if the data have no such split.
    """
    task, datasets = build_data(cfg)
    seed = int(cfg.run_cfg.seed)
    pairs = None
    if split == "train":
        pairs = training_set(datasets, seed)
    elif split in (others := evaluation_sets(datasets)):
        pairs = TrainingSet(SplitAsPairs(others[split]), seed)
    if pairs is None:
        there = sorted({name for own in datasets.values() for name in own})
        raise ValueError(
            f"{cfg.args.cfg_path}: no data of the split {split!r}; there are {', '.join(there)}"
        )
    return task, pairs


class Corpus:
    """The samples of a training set by number, their images as an evaluation sees them.

    Args:
        pairs: the training set; its image processors are replaced.
        processor: makes a picture into what the model sees; data that make their images without a
            processor (``toy_scenes``) keep them.
        workers: processes that read.
    """

    def __init__(self, pairs: TrainingSet, processor: Processor | None, workers: int = 0) -> None:
        self.pairs = pairs
        self.processor = processor
        self.workers = workers
        self._sources: str | None = None

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def image_ids(self) -> np.ndarray:
        """``(N,)`` int64, equal where samples show one image."""
        return self.pairs.image_ids

    @property
    def truth(self) -> Callable[[np.ndarray, np.ndarray], np.ndarray] | None:
        """Whether image and text of samples match, where the data know it."""
        return self.pairs.truth

    def show(self, number: int) -> tuple[Image.Image, str]:
        """Picture and caption of a sample, for people to look at."""
        return self.pairs.show(number)

    def caption(self, number: int) -> str:
        """The caption of a sample as it is in the data."""
        return self.pairs.source(number)[1]

    def fingerprint(self, processor: Processor | None = None) -> str:
        """A name for the data and how they are read: all image ids, image files and captions, and
        some processed samples, which tell of image size, view and text processor.

        Args:
            processor: as of `batches`.
        """
        if self._sources is None:
            found = hashlib.sha256(np.ascontiguousarray(self.image_ids).tobytes())
            for number in range(len(self)):
                found.update(json.dumps(self.pairs.source(number), default=str).encode())
            self._sources = found.hexdigest()
        found = hashlib.sha256(self._sources.encode())
        some = np.arange(0, len(self), max(1, len(self) // 16))
        for batch in self.batches([some], processor):
            found.update(np.ascontiguousarray(batch["image"].numpy()).tobytes())
            found.update(json.dumps(list(batch["text_input"])).encode())
        return found.hexdigest()[:16]

    def batches(
        self, batches: Sequence[np.ndarray], processor: Processor | None = None
    ) -> Iterator[dict[str, Any]]:
        """Mini-batches of the given sample numbers.

        Args:
            batches: numbers of each mini-batch.
            processor: another one than the model's.

        Yields:
            ``image`` ``(B, 3, H, W)``, ``text_input``, ``index``, ``load_error`` (a list, ""
            where all is well: another sample stands for what cannot be read) and what else the
            data have.
        """
        chosen = processor or self.processor
        for part in self.pairs.parts:
            if getattr(part, "vis_processor", None) is not None and chosen is not None:
                part.vis_processor = chosen
        loader: Any = DataLoader(
            _Numbered(self.pairs),
            batch_sampler=[[int(i) for i in batch] for batch in batches],
            num_workers=self.workers if len(batches) > 1 else 0,
            collate_fn=self.pairs.collater,
            generator=torch.Generator(),
        )
        yield from loader


class _Numbered(Dataset):
    def __init__(self, pairs: TrainingSet) -> None:
        self.pairs = pairs

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.pairs[number, 0]


def tell(text: str, *values: Any) -> None:
    """Log on the main process."""
    if is_main_process():
        logging.info(text, *values)
