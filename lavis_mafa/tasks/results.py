"""What tasks that generate text share: batches, results of all ranks, one file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from lavis.common.dist_utils import is_main_process
from lavis.common.registry import registry
from lavis.datasets.data_utils import prepare_sample
from lavis.datasets.datasets.base_dataset import BaseDataset
from torch.utils.data.dataloader import default_collate
from tqdm import tqdm

from lavis_mafa.io.files import write_text
from lavis_mafa.io.processes import gather_objects
from lavis_mafa.metrics.captions import as_id

# How many samples tell whether truth belongs to a data set.
PROBES = 16

Record = dict[str, Any]


@torch.no_grad()
def evaluate_in_batches(
    task: Any, model: Any, data_loader: Any, cuda_enabled: bool, name: str
) -> list[Record] | None:
    """``task.valid_step`` on every mini-batch.

    Returns:
        The records of all ranks in the order of the data set on the main process, None elsewhere.
        A sampler that pads the shares of the ranks makes duplicates: see `without_duplicates`.
    """
    records: list[Record] = []
    hidden = not is_main_process()
    for samples in tqdm(data_loader, desc=name, disable=hidden, leave=False, mininterval=1.0):
        records += task.valid_step(model, prepare_sample(samples, cuda_enabled=cuda_enabled))
    return gather_records(records)


def gather_records(records: list[Record]) -> list[Record] | None:
    """Records of all ranks on the main process, None elsewhere; ranks may have unequal numbers.

    They come in turns, as a distributed sampler deals samples out: rank 0's first, rank 1's first,
    ..., rank 0's second.
    """
    parts = gather_objects(records)
    if parts is None:
        return None
    return [record for turn in zip_longest(*parts) for record in turn if record is not None]


def without_duplicates(records: list[Record], key: str) -> list[Record]:
    """The first record of every value of ``key``, in order."""
    first: dict[Any, Record] = {}
    for record in records:
        first.setdefault(record[key], record)
    return list(first.values())


def write_result(records: list[Record], name: str) -> Path:
    """Write ``<result_dir>/<name>.json``, whole or not at all. For the main process alone."""
    path = Path(registry.get_path("result_dir")) / f"{name}.json"
    write_text(path, json.dumps(records, ensure_ascii=False))
    return path


def column(samples: Mapping[str, Any], *names: str) -> list[Any] | None:
    """Plain values of the first of these keys that the mini-batch has, one a sample."""
    for name in names:
        values = samples.get(name)
        if values is not None:
            return values.tolist() if isinstance(values, torch.Tensor) else list(values)
    return None


def required_column(samples: Mapping[str, Any], *names: str) -> list[Any]:
    """As `column`.

    Raises:
        ValueError: if the mini-batch has none of the keys.
    """
    values = column(samples, *names)
    if values is None:
        have = ", ".join(sorted(samples))
        raise ValueError(f"evaluation needs {' or '.join(names)} in a sample; it has {have}")
    return values


def check_known(dataset: Any, names: Sequence[str], known: Container[Any], what: str) -> None:
    """Refuse truth of another data set before anything is generated.

    Args:
        dataset: some of its samples are looked at, from all over it.
        names: keys of a sample, the first of which that it has is its id.
        known: ids that have a truth.
        what: the truth, for the message.

    Raises:
        ValueError: if none of these samples has a truth.
    """
    size = len(dataset)
    places = sorted({i * size // PROBES for i in range(PROBES)}) if size else []
    found = [
        next((s[n] for n in names if s.get(n) is not None), None)
        for s in map(dataset.__getitem__, places)
    ]
    ids = [as_id(one.item() if isinstance(one, torch.Tensor) else one) for one in found]
    if ids and not any(one in known for one in ids):
        told = ", ".join(repr(one) for one in ids[:3])
        raise ValueError(
            f"{what} knows none of {len(ids)} samples looked at, such as {told}: it must be of the "
            f"split that is evaluated, with the same {names[0]}"
        )


def check_length(texts: list[str], expected: int, what: str) -> None:
    """Raises ValueError unless there is one text for each sample."""
    if len(texts) != expected:
        raise ValueError(
            f"{what} gave {len(texts)} texts for {expected} samples; expected one each"
        )


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` has a parameter of that name; ``**kwargs`` would swallow it unread."""
    return name in inspect.signature(function).parameters


def require_argument(model: Any, method: str, argument: str, key: str) -> None:
    """Raises ValueError if the model's method has no such argument for the key ``run.<key>``."""
    if not takes(getattr(model, method), argument):
        raise ValueError(
            f"run.{key} is set, but {type(model).__name__}.{method}() does not take {argument}; "
            f"leave run.{key} out"
        )


def allow_ragged_columns(datasets: Mapping[str, Mapping[str, Any]]) -> None:
    """Let LAVIS's evaluation sets collate answers that are missing or of unequal number."""
    for splits in datasets.values():
        for split, dataset in splits.items():
            if split != "train" and getattr(type(dataset), "collater", None) is _PLAIN:
                dataset.collater = collate_ragged


def collate_ragged(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Torch's default, but lists, mappings and None stay as they are: one a sample, in a list."""
    ragged = {
        key
        for sample in samples
        for key, value in sample.items()
        if value is None or isinstance(value, (list, dict))
    }
    even = [{k: v for k, v in sample.items() if k not in ragged} for sample in samples]
    return {
        **default_collate(even),
        **{key: [sample.get(key) for sample in samples] for key in ragged},
    }


_PLAIN = BaseDataset.collater
