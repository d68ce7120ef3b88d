"""Check what LAVIS's data sets have loaded from annotation files, and read their samples.

LAVIS takes whatever a row holds: a caption that is a string where a list is expected becomes a list
of its letters. Here such values are refused while the splits are built, when there is no model yet.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lavis.common.registry import registry
from lavis.common.utils import get_cache_path
from lavis.datasets.datasets.aok_vqa_datasets import AOKVQADataset, AOKVQAEvalDataset
from lavis.datasets.datasets.caption_datasets import CaptionDataset
from lavis.datasets.datasets.coco_caption_datasets import COCOCapEvalDataset
from lavis.datasets.datasets.coco_vqa_datasets import COCOVQADataset, COCOVQAEvalDataset
from lavis.datasets.datasets.gqa_datasets import GQADataset
from lavis.datasets.datasets.image_text_pair_datasets import ImageTextPairDataset
from lavis.datasets.datasets.nlvr_datasets import NLVRDataset
from lavis.datasets.datasets.retrieval_datasets import RetrievalDataset, RetrievalEvalDataset
from lavis.datasets.datasets.vg_vqa_datasets import VGVQADataset
from lavis.datasets.datasets.vqa_datasets import VQAEvalDataset

from lavis_mafa.data.annotation_rows import Problem, Refusals, short
from lavis_mafa.data.image_reading import read_rgb
from lavis_mafa.data.local_files import reads_as_lavis
from lavis_mafa.data.picture_identity import PictureFolder
from lavis_mafa.io.files import read_json

logger = logging.getLogger(__name__)

_Check = tuple[Callable[[Any], bool], str]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _are_answers(value: Any) -> bool:
    """Return whether a value has answers of annotators, some of whom may have left theirs blank."""
    texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
    return texts and any(map(_is_text, value))


_ID: _Check = lambda value: isinstance(value, str | int), "a whole number or a text"
_TEXT: _Check = _is_text, "a text"
_TEXTS: _Check = _are_texts, "a list of texts, of one where there is only one"
_ANSWERS: _Check = _are_answers, "a list of answers, of one where there is only one"
_PAIR = {"image": _TEXT, "caption": _TEXT}
_QUESTION = {"image": _TEXT, "question": _TEXT}
# What the rows of a data set must have, by its class. Other keys are not checked.
_FORMS: dict[type, Mapping[str, _Check]] = {
    RetrievalDataset: {**_PAIR, "image_id": _ID},
    RetrievalEvalDataset: {"image": _TEXT, "caption": _TEXTS},
    CaptionDataset: {**_PAIR, "image_id": _ID},
    ImageTextPairDataset: _PAIR,
    COCOCapEvalDataset: {"image": _TEXT},
    COCOVQADataset: {**_QUESTION, "answer": _ANSWERS},
    VGVQADataset: {**_QUESTION, "answer": _TEXT},
    GQADataset: {**_QUESTION, "answer": _TEXT},
    AOKVQADataset: {**_QUESTION, "direct_answers": _ANSWERS},
    AOKVQAEvalDataset: {**_QUESTION, "question_id": _ID, "choices": _TEXTS},
    VQAEvalDataset: {**_QUESTION, "question_id": _ID},
    NLVRDataset: {"images": _TEXTS, "sentence": _TEXT},
}
# Unusable rows of these count as samples that cannot be read: coco_retrieval, flickr30k;
# coco_caption; vg_caption, sbu_caption, conceptual_caption_*.
_PAIRS = (RetrievalDataset, CaptionDataset, ImageTextPairDataset)


def build_checked(
    build: Callable[[], Mapping[str, Mapping[str, Any]]],
    configs: Mapping[str, Any],
    allowed: float = 0.0,
) -> Mapping[str, Mapping[str, Any]]:
    """Build data sets and check what LAVIS's classes have loaded.

    Args:
        build: returns the data sets by name and split.
        configs: the configs of the data sets by name.
        allowed: share of the rows of a training set of captions that may be unusable.

    Raises:
        ValueError: listing the rows that cannot be used.
    """
    splits = list(_splits_of_lavis(configs))
    for _, split, cls, files in splits:
        if issubclass(cls, COCOVQAEvalDataset | AOKVQAEvalDataset) and len(files) not in (2, 4):
            raise ValueError(
                f"the split {split} has {len(files)} file(s), {', '.join(files)}, expected 2 or 4: "
                "questions with their images, then the list of candidate answers, then VQA's "
                "questions and annotations. Join several files of questions into one"
            )
    try:
        datasets = build()
    except (AttributeError, KeyError, TypeError, ValueError):
        for _, _, cls, files in splits:
            with suppress(OSError):
                _require_usable(cls, None, files)
        raise
    for name, split, cls, files in splits:
        dataset = datasets[name].get(split)
        if dataset is None:
            continue
        share = allowed if split == "train" and issubclass(cls, _PAIRS) else 0.0
        _require_usable(cls, dataset.annotation, files, share)
        _use_names_on_disk(dataset)
        answers = getattr(dataset, "answer_list", None)
        if answers is not None and not _are_answers(answers):
            raise ValueError(
                f"{files[1]}: expected a list of candidate answers, got {short(answers)}"
            )
    return datasets


def _use_names_on_disk(dataset: Any) -> None:
    """Give pictures the Unicode form that their names have on disk: macOS decomposes them."""
    folder = PictureFolder(dataset.vis_root)
    for row in dataset.annotation:
        name = row.get("image") if isinstance(row, dict) else None
        if isinstance(name, str) and not name.isascii() and "\0" not in name:
            path = folder.path(name)
            if path != os.path.join(folder.root or "", name):
                row["image"] = os.path.relpath(path, folder.root)


def _splits_of_lavis(
    configs: Mapping[str, Any],
) -> Iterator[tuple[str, str, type, list[str]]]:
    """Yield data set, split, class and files where LAVIS reads the rows.

    The class of a user may read its rows by other keys.
    """
    for name, config in configs.items():
        builder: Any = registry.get_builder_class(name)
        annotations = config.build_info.get("annotations") if reads_as_lavis(builder) else None
        for split, info in (annotations or {}).items():
            cls = builder.train_dataset_cls if split == "train" else builder.eval_dataset_cls
            if not info or not info.get("storage") or cls is None or _form_of(cls) is None:
                continue
            if cls.__getitem__.__module__.startswith(("lavis.", "lavis_mafa.")):
                storage = info.get("storage")
                files = [storage] if isinstance(storage, str) else list(storage)
                # LAVIS keeps downloads in its cache.
                paths = [one if os.path.isfile(one) else get_cache_path(one) for one in files]
                yield name, split, cls, paths


def _form_of(cls: type) -> Mapping[str, _Check] | None:
    return next((_FORMS[base] for base in cls.__mro__ if base in _FORMS), None)


def _require_usable(
    cls: type, rows: Sequence[Any] | None, files: Sequence[str], allowed: float = 0.0
) -> None:
    """Refuse rows if more than a share of them cannot be used.

    Args:
        rows: None: those that LAVIS would read.

    Raises:
        ValueError: listing them, by file and number in it, from 0.
    """
    if issubclass(cls, VQAEvalDataset):
        files = files[:1]  # the others have answers
    names = ", ".join(files)
    if rows is None:
        rows = [row for file in files for row in _rows_of(file)]
    if not rows:
        raise ValueError(f"{names} has no rows; expected at least one")
    owners: dict[str, str] = {}
    found = {}
    for number, row in enumerate(rows):
        problem = _problem_of(cls, row) or _twice(cls, f"row {number}", row, owners)
        if problem is not None:
            found[number] = problem
    if not found:
        return
    places = [(file, f"row {number}") for file in files for number in range(len(_rows_of(file)))]
    refused = Refusals()
    for number, problem in found.items():
        file, where = places[number]
        refused.add(file, problem._replace(where=where))
    if refused.count > allowed * len(rows):
        refused.end(names)
    logger.warning(
        "%d of %d rows of %s cannot be used; they count as unreadable samples, the first is %s",
        refused.count,
        len(rows),
        names,
        refused.lines()[0],
    )


def _problem_of(cls: type, row: Any) -> Problem | None:
    if not isinstance(row, dict):
        return Problem("", "expected an object", short(row))
    question = f" (question {row['question_id']!r})" if "question_id" in row else ""
    for key, (is_right, expected) in (_form_of(cls) or {}).items():
        if row.get(key) is None:
            return Problem("", f"{key!r} is missing or null", f"{', '.join(row)}{question}")
        if not is_right(row[key]):
            return Problem("", f"{key!r}: expected {expected}", f"{short(row[key])}{question}")
    return None


def _twice(cls: type, where: str, row: Mapping[str, Any], owners: dict[str, str]) -> Problem | None:
    """Return why a row of an evaluation set has the id of another one.

    LAVIS would rank an image against itself, and keep only one of two answers or captions.

    Args:
        owners: of the ids of earlier rows.
    """
    if issubclass(cls, RetrievalEvalDataset):
        key, owner = PictureFolder(None).identity(row["image"]), where
    elif issubclass(cls, VQAEvalDataset):
        key, owner = str(row["question_id"]), where
    elif issubclass(cls, COCOCapEvalDataset):  # LAVIS takes the id from the file's name
        key, owner = row["image"].split("/")[-1].strip(".jpg").split("_")[-1], row["image"]
    else:
        return None
    first = owners.setdefault(key, owner)
    if first == owner:
        return None
    expected = "expected an id of its own for each row, and a single row for an image"
    return Problem("", expected, f"{key!r}, the id of {first} as well")


def _rows_of(file: str) -> list[Any]:
    """Read a file as LAVIS does.

    Raises:
        ValueError: if it is not a JSON list.
    """
    rows = read_json(file)
    if not isinstance(rows, list):
        raise ValueError(f"{file}: expected a list of rows, got {short(rows)}")
    return rows


def read_here(dataset: Any) -> bool:
    """Return whether `read_sample` reads a data set's images itself."""
    return type(dataset).__getitem__ in [cls.__getitem__ for cls in _PAIRS]


def read_sample(dataset: Any, index: int) -> dict[str, Any]:
    """Return ``dataset[index]``; in LAVIS's image-caption sets the image is read by `read_rgb`.

    LAVIS reads by ``Image.open(path).convert("RGB")``, which waits forever for a pipe, clips 16-bit
    grey to white, shows transparent parts in arbitrary colours, ignores the EXIF orientation and
    decodes decompression bombs of up to 178,956,970 pixels.

    Raises:
        ValueError: if the row of such a set cannot be used.
        OSError: see `read_rgb`.
        Others: those of ``dataset[index]`` for any other data set.
    """
    if not read_here(dataset):
        return dataset[index]
    row = dataset.annotation[index]
    for key in ("image", "caption"):
        if not isinstance(row.get(key), str):
            raise ValueError(f"row {index}: expected text as {key!r}, got {row.get(key)!r:.60}")
    sample = {
        "image": dataset.vis_processor(read_rgb(os.path.join(dataset.vis_root, row["image"]))),
        "text_input": dataset.text_processor(row["caption"]),
    }
    if hasattr(dataset, "img_ids"):
        sample["image_id"] = dataset.img_ids[row["image_id"]]
    if type(dataset).__getitem__ is RetrievalDataset.__getitem__:
        sample["instance_id"] = row["instance_id"]
    return sample
