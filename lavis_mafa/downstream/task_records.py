"""Evaluate in mini-batches, gather the records of all ranks, and write them to one file."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from lavis.common.registry import registry
from lavis.datasets.data_utils import prepare_sample
from lavis.datasets.datasets.base_dataset import BaseDataset
from torch.utils.data.dataloader import default_collate

from lavis_mafa.downstream.row_values import as_id
from lavis_mafa.io.files import lost_writes, write_text
from lavis_mafa.io.processes import gather_objects, progress

# Distinguishes LAVIS's data sets from those that collate themselves.
_LAVIS_COLLATER = BaseDataset.collater
_PROBES = 16  # samples checked for whether an annotation file is of the data set

Record = dict[str, Any]


class InBatches:
    """Mixin: evaluates by the task's ``valid_step``, one mini-batch after the other.

    Attributes:
        doing: what the progress bar shows.
    """

    doing: str
    valid_step: Callable[[Any, Any], list[Record]]

    def build_datasets(self, cfg: Any) -> Any:
        """Build the data sets, which may have answers or boxes that are missing or ragged."""
        task: Any = super()
        datasets = task.build_datasets(cfg)
        for splits in datasets.values():
            for split, dataset in splits.items():
                if split != "train" and getattr(type(dataset), "collater", None) is _LAVIS_COLLATER:
                    dataset.collater = _collate_ragged
        return datasets

    @torch.no_grad()
    def evaluation(
        self, model: Any, data_loader: Any, cuda_enabled: bool = True, **kwargs: Any
    ) -> list[Record] | None:
        """Run ``valid_step`` on every mini-batch of a loader.

        Returns:
            The records of all ranks in the order of the data set on the main process, None
            elsewhere. A sampler that pads the ranks' shares causes duplicates: see `write_result`.
        """
        records: list[Record] = []
        for samples in progress(data_loader, desc=self.doing, leave=False):
            records += self.valid_step(model, prepare_sample(samples, cuda_enabled=cuda_enabled))
        return _gather_records(records)


def _gather_records(records: list[Record]) -> list[Record] | None:
    """Gather the records of all ranks on the main process; ranks may have unequal numbers.

    Returns:
        Interleaved, as a distributed sampler deals out samples: rank 0's first, rank 1's first,
        ..., rank 0's second. None on other ranks.
    """
    parts = gather_objects(records)
    if parts is None:
        return None
    return [record for turn in zip_longest(*parts) for record in turn if record is not None]


def write_result(
    records: list[Record], key: str, name: str, row: Callable[[Record], Record]
) -> tuple[list[Record], Path]:
    """Write ``<result_dir>/<name>.json`` atomically; only the main process may call it.

    A failure to write does not lose the figures: see `lost_writes`.

    Args:
        key: of several records with the same value of it, only the first is kept.
        row: returns what is written of a record.

    Returns:
        The kept records, in order, and the file.
    """
    first: dict[Any, Record] = {}
    for record in records:
        first.setdefault(record[key], record)
    path = Path(registry.get_path("result_dir")) / f"{name}.json"
    with lost_writes.allow(path):
        write_text(path, json.dumps([row(record) for record in first.values()], ensure_ascii=False))
        logging.info("%d results are in %s", len(first), path)
    return list(first.values()), path


def _column(samples: Mapping[str, Any], *names: str) -> list[Any] | None:
    """Return a mini-batch's values, one a sample, of the first of these keys that it has."""
    for name in names:
        values = samples.get(name)
        if values is not None:
            return values.tolist() if isinstance(values, torch.Tensor) else list(values)
    return None


def optional_column(samples: Mapping[str, Any], size: int, *names: str) -> list[Any]:
    """Return the same as `_column`; a None for each of ``size`` samples if none has the keys."""
    return _column(samples, *names) or [None for _ in range(size)]


def required_column(samples: Mapping[str, Any], *names: str) -> list[Any]:
    """Return the same as `_column`.

    Raises:
        ValueError: if the mini-batch has none of the keys.
    """
    values = _column(samples, *names)
    if values is None:
        have = ", ".join(sorted(samples))
        raise ValueError(f"evaluation needs {' or '.join(names)} in a sample; it has {have}")
    return values


def check_known(dataset: Any, names: Sequence[str], known: Container[Any], what: str) -> None:
    """Refuse annotations of another data set before anything is generated.

    Args:
        dataset: of which `_PROBES` samples, evenly spread, are checked.
        names: keys of a sample; the first one that it has is its id.
        known: ids that are annotated.
        what: the annotations, for the message.

    Raises:
        ValueError: if none of these samples is annotated.
    """
    size = len(dataset)
    places = sorted({i * size // _PROBES for i in range(_PROBES)}) if size else []
    found = [
        next((s[n] for n in names if s.get(n) is not None), None)
        for s in map(dataset.__getitem__, places)
    ]
    ids = [as_id(one.item() if isinstance(one, torch.Tensor) else one) for one in found]
    if ids and not any(one in known for one in ids):
        shown = ", ".join(repr(one) for one in ids[:3])
        raise ValueError(
            f"{what} has none of {len(ids)} samples checked, such as {shown}: give the file of the "
            f"split that is evaluated, with the same {names[0]}"
        )


def require_argument(model: Any, method: str, argument: str, key: str) -> None:
    """Raise ValueError if the model's method lacks the argument that ``run.<key>`` sets.

    ``**kwargs`` does not count.
    """
    if argument not in inspect.signature(getattr(model, method)).parameters:
        raise ValueError(
            f"run.{key} is set, but {type(model).__name__}.{method}() does not take {argument}; "
            f"remove run.{key}"
        )


def _collate_ragged(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate as torch does, but keep lists, mappings and None: a list of one a sample."""
    batch: dict[str, Any] = {}
    for key in dict.fromkeys(key for sample in samples for key in sample):
        values = [sample.get(key) for sample in samples]
        ragged = any(value is None or isinstance(value, list | dict) for value in values)
        batch[key] = values if ragged else default_collate(values)
    return batch
