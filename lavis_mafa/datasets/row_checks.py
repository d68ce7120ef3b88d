"""Check the rows of annotation files that LAVIS's data sets read.

LAVIS takes whatever a row holds: a caption that is a string where a list is expected becomes a list
of its letters. Here a value that has one obvious meaning is read as that: a string in place of a
list of one, a number in place of its text. Everything else is refused while a split is built, when
there is no model yet. Only rows of training sets of captions and questions are kept, up to
``run.max_unreadable``, and count as samples that cannot be read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from lavis.datasets.datasets import (
    aok_vqa_datasets,
    base_dataset,
    coco_vqa_datasets,
    gqa_datasets,
)
from lavis.datasets.datasets.aok_vqa_datasets import AOKVQADataset, AOKVQAEvalDataset
from lavis.datasets.datasets.base_dataset import BaseDataset
from lavis.datasets.datasets.caption_datasets import CaptionDataset, CaptionEvalDataset
from lavis.datasets.datasets.coco_caption_datasets import COCOCapEvalDataset, NoCapsEvalDataset
from lavis.datasets.datasets.coco_vqa_datasets import COCOVQADataset, COCOVQAEvalDataset
from lavis.datasets.datasets.gqa_datasets import GQADataset, GQAEvalDataset
from lavis.datasets.datasets.image_text_pair_datasets import ImageTextPairDataset
from lavis.datasets.datasets.nlvr_datasets import NLVRDataset
from lavis.datasets.datasets.retrieval_datasets import (
    RetrievalDataset,
    RetrievalEvalDataset,
    VideoRetrievalDataset,
    VideoRetrievalEvalDataset,
)
from lavis.datasets.datasets.snli_ve_datasets import SNLIVisualEntialmentDataset
from lavis.datasets.datasets.vg_vqa_datasets import VGVQADataset
from lavis.datasets.datasets.video_caption_datasets import VideoCaptionDataset
from lavis.datasets.datasets.video_vqa_datasets import VideoQADataset
from lavis.datasets.datasets.vqa_datasets import VQADataset

from lavis_mafa.datasets.annotation_rows import Refusals, short
from lavis_mafa.io.files import is_number, names_of, read_json

logger = logging.getLogger(__name__)

Id = int | str
UNREADABLE_ROW = "unreadable_row"  # key of a training row that cannot be used; its value says why

# Values


def text_of(value: Any) -> str:
    """Return a text; a number is its digits.

    Raises:
        ValueError: if it is blank, holds half of a surrogate pair, or is anything else.
    """
    if isinstance(value, str) and value.strip():
        if not value.isascii():
            value.encode("utf-8")  # raises a ValueError for half of a surrogate pair
        return value
    if is_number(value):
        return str(int(value) if value == int(value) else value)
    raise ValueError(f"expected a text, got {short(value)}")


def texts_of(value: Any) -> list[str]:
    """Return a list of texts; a single text is a list of one.

    Raises:
        ValueError: if it is empty, or one of them is no text.
    """
    if value == [] or isinstance(value, Mapping):
        raise ValueError(f"expected a text or a list of texts, got {short(value)}")
    return [text_of(one) for one in _listed(value)]


def answers_of(value: Any) -> list[str]:
    """Return the answers of all annotators, or a single one: texts, or mappings with ``answer``.

    One of several annotators may have left his answer blank.

    Raises:
        ValueError: if all are blank, there is none, or one of them is no text.
    """
    return _some(one.get("answer") if isinstance(one, Mapping) else one for one in _listed(value))


def references_of(value: Any) -> list[str]:
    """Return the captions of an image that are neither null nor blank; may be empty.

    Raises:
        ValueError: if one of them is no text.
    """
    return [text_of(one) for one in _listed(value) if not _is_none(one)]


def id_of(value: Any) -> Id:
    """Return an id as it is.

    Raises:
        ValueError: if it is neither a whole number nor a text.
    """
    if is_number(value) and value == int(value):
        return int(value)
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError(f"expected a whole number or a text, got {short(value)}")


def as_id(value: Any) -> Id:
    """Return an id as in COCO's files: an int if it is a number, ignoring leading zeros."""
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
    return int(text) if text.isascii() and text.isdigit() else text


class Ids:
    """Ids as `as_id` reads them; finds different ids that are read as one."""

    def __init__(self) -> None:
        self._given: dict[Id, tuple[str, Any]] = {}

    def add(self, value: Any, owner: Any = None) -> str | None:
        """Add an id; return what is wrong with it, None if nothing is.

        Args:
            owner: what has the id; one owner may have it several times.
        """
        first, first_owner = self._given.setdefault(as_id(value), (str(value), owner))
        if first != str(value):
            why = f"{value!r} and {first!r}, which occurs before, are the same number"
            return f"{why}; give them ids that differ"
        if first_owner != owner:
            return (
                f"{value!r} is the id of {short(first_owner)} as well; give each an id of its own"
            )
        return None


def by_id(items: Iterable[tuple[Any, Any]]) -> dict[Id, Any]:
    """Return what belongs to every id, by `as_id`.

    Raises:
        ValueError: if different ids are the same number.
    """
    ids, found = Ids(), {}
    for one, value in items:
        if wrong := ids.add(one):
            raise ValueError(f"id {wrong}")
        found[as_id(one)] = value
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _some(values: Iterable[Any]) -> list[str]:
    """Return answers, some of which may be blank."""
    found = [one if _is_blank(one) else text_of(one) for one in values]
    if all(map(_is_blank, found)):
        raise ValueError(f"expected an answer or a list of answers, got {short(found)}")
    return found


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _is_none(value: Any) -> bool:
    return value is None or value != value or _is_blank(value)


def _alike(value: Any) -> Any:
    """Return answers as `answers_of`, but a single one that is not in a list as a text."""
    found = answers_of(value)
    return found if isinstance(value, list) else found[0]


def _one(value: Any) -> str:
    found = answers_of(value)
    if len(found) > 1:
        raise ValueError(f"expected one answer, got {short(value)}")
    return found[0]


def _two(value: Any) -> list[str]:
    found = texts_of(value)
    if len(found) != 2:
        raise ValueError(f"expected two images, got {short(value)}")
    return found


def _label(labels: Mapping[str, int], value: Any) -> str:
    """Return the label of a class; JSON's true is the label "True"."""
    text = str(value).strip().casefold() if isinstance(value, (str, bool)) else None
    found = next((label for label in labels if label.casefold() == text), None)
    if found is None:
        raise ValueError(f"expected one of {', '.join(labels)}, got {short(value)}")
    return found


# Rows

_Form = Mapping[str, Callable[[Any], Any] | None]  # None: a label of the data set's classes
_PAIR: _Form = {"image": text_of, "caption": texts_of}
_VIDEO: _Form = {"video": text_of, "caption": texts_of}
_QUESTION: _Form = {"image": text_of, "question": text_of}
_ASKED: _Form = {**_QUESTION, "question_id": id_of}
_TRUTH: _Form = {"answer": _alike, "answers": _alike, "answer_type": text_of}
_REFERENCES: _Form = {"caption": references_of, "domain": text_of}
_ID: _Form = {"image_id": id_of}
# What rows must have and may have, by the data set's class. Further keys are not read.
_FORMS: dict[type, tuple[_Form, _Form]] = {
    RetrievalDataset: (_PAIR, _ID),
    RetrievalEvalDataset: (_PAIR, {}),
    VideoRetrievalDataset: (_VIDEO, {}),
    VideoRetrievalEvalDataset: (_VIDEO, {}),
    CaptionDataset: (_PAIR, _ID),
    VideoCaptionDataset: ({**_VIDEO, **_ID}, {}),
    ImageTextPairDataset: (_PAIR, {}),
    CaptionEvalDataset: ({"image": text_of, **_ID}, _REFERENCES),
    COCOCapEvalDataset: ({"image": text_of}, _REFERENCES),
    NoCapsEvalDataset: ({"image": text_of, "img_id": id_of}, _REFERENCES),
    COCOVQADataset: ({**_QUESTION, "answer": answers_of}, {}),
    VGVQADataset: ({**_QUESTION, "answer": _one}, {}),
    GQADataset: ({**_QUESTION, "answer": _one}, {}),
    AOKVQADataset: ({**_QUESTION, "direct_answers": answers_of}, {}),
    COCOVQAEvalDataset: (_ASKED, _TRUTH),
    GQAEvalDataset: (_ASKED, _TRUTH),
    AOKVQAEvalDataset: ({**_ASKED, "choices": texts_of}, {"direct_answers": answers_of, **_TRUTH}),
    NLVRDataset: ({"images": _two, "sentence": text_of, "label": None}, {}),
    SNLIVisualEntialmentDataset: ({"image": text_of, "sentence": text_of, "label": None}, {}),
    VideoQADataset: ({"video": text_of, "question": text_of, "answer": _one}, {}),
}
_PAIRS = (RetrievalDataset, CaptionDataset, ImageTextPairDataset, VideoRetrievalDataset)
_INDEXED = (RetrievalEvalDataset, VideoRetrievalEvalDataset)
# Of questions: rows, candidate answers, and VQA's own questions and annotations.
_FILES: dict[type, tuple[int, ...]] = {
    COCOVQAEvalDataset: (2, 4),
    AOKVQAEvalDataset: (2, 4),
    GQAEvalDataset: (1, 2),
}
_READERS = (base_dataset, coco_vqa_datasets, aok_vqa_datasets, gqa_datasets)


def require_answer_files(name: str, builder: Any, annotations: Mapping[str, Any] | None) -> None:
    """Refuse a number of files that LAVIS's evaluation sets of questions cannot read.

    Raises:
        ValueError: naming the split.
    """
    counts = _of_class(_FILES, getattr(builder, "eval_dataset_cls", None) or object)
    for split, info in (annotations or {}).items():
        storage = (info or {}).get("storage") if split in ("val", "test") else None
        given = [storage] if isinstance(storage, str) else list(storage or [])
        if counts and given and len(given) not in counts:
            files = "questions with their images, then the list of candidate answers"
            files += ", then VQA's questions and annotations" if 4 in counts else ""
            key = f"datasets.{name}.build_info.annotations.{split}.storage"
            raise ValueError(
                f"{key} names {len(given)} file(s), expected {' or '.join(map(str, counts))}: "
                f"{files}. Join several files of "
                "questions into one"
            )


@contextmanager
def checked_rows(allowed: float = 0.0) -> Iterator[None]:
    """Check the rows of every data set of LAVIS that is built inside this context.

    Args:
        allowed: share of the rows of a training set of captions or questions that may be unusable.
            They get the key `UNREADABLE_ROW`.
    """
    add_ids = BaseDataset._add_instance_ids
    files: list[tuple[str, Any]] = []  # of the data set that is being built, with their content

    def load(file: Any) -> Any:
        file.close()
        content = read_json(file.name)
        if not isinstance(content, (list, dict)):
            raise ValueError(f"{file.name}: expected a list, got {short(content)}")
        files.append((file.name, content))
        return content

    def check_first(dataset: Any, *args: Any, **kwargs: Any) -> None:
        # LAVIS calls it after the files are read and before their rows are indexed.
        _check(dataset, files, allowed)
        files.clear()
        add_ids(dataset, *args, **kwargs)

    own = [(module, module.json) for module in _READERS]
    try:
        BaseDataset._add_instance_ids = check_first
        for module in _READERS:
            module.json = SimpleNamespace(load=load)
        yield
    finally:
        BaseDataset._add_instance_ids = add_ids
        for module, json in own:
            module.json = json


def _of_class(table: Mapping[type, Any], cls: type) -> Any:
    return next((table[base] for base in cls.__mro__ if base in table), None)


def _check(dataset: Any, files: Sequence[tuple[str, Any]], allowed: float) -> None:
    """Replace the values of a data set's rows by what they mean.

    Raises:
        ValueError: listing the rows that cannot be used.
    """
    forms = _of_class(_FORMS, type(dataset))
    if forms is None:
        return
    read = _Rows(dataset, *forms)
    rows: list[dict[str, Any]] = []
    refused = Refusals()
    used: dict[str, None] = {}
    for (file, number), row in zip(
        _places(dataset.annotation, files), dataset.annotation, strict=True
    ):
        used[file] = None
        try:
            rows += read(row)
        except ValueError as error:
            asked = row.get("question_id") if isinstance(row, Mapping) else None
            which = f" (question {asked!r})" if asked is not None else ""
            problem = f"{file}, row {number}{which}: {error}"
            refused.add(problem)
            own = {
                key: f"{key} of row {number} of {file}" for key in ("image", "video", "image_id")
            }
            rows.append({**own, "caption": "", UNREADABLE_ROW: problem})
    names = names_of(used or [file for file, _ in files])
    if not rows:
        raise ValueError(f"{names or type(dataset).__name__} has no rows; expected at least one")
    if not isinstance(dataset, (*_PAIRS, VQADataset)) or refused.count > allowed * len(rows):
        refused.end(names)
    if refused.count:
        logger.warning(
            "%d of %d rows of %s cannot be used; they count as unreadable samples, the first is %s",
            *(refused.count, len(rows), names, refused.first[0]),
        )
    if read.left_out:
        logger.warning("%d captions of %s are null or blank: left out", read.left_out, names)
    dataset.annotation = _by_image(rows, names) if read.one_row else rows
    if getattr(dataset, "answer_list", None) is not None:
        try:
            dataset.answer_list = _some(_listed(dataset.answer_list))
        except ValueError as error:
            raise ValueError(f"{files[-1][0]} is no list of candidate answers: {error}") from error


def _by_image(rows: list[dict[str, Any]], names: str) -> list[dict[str, Any]]:
    """Return one row for every image, with all its captions; log how many rows are joined.

    LAVIS would rank an image of several rows against itself.
    """
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        own = first.setdefault(os.path.normpath(row.get("image") or row["video"]), row)
        if own is not row:
            own["caption"] += row["caption"]
    if len(first) < len(rows):
        logger.warning(
            "%d rows of %s are of images of earlier rows: read as further captions of these",
            *(len(rows) - len(first), names),
        )
    return list(first.values())


def _places(
    annotation: Sequence[Any], files: Sequence[tuple[str, Any]]
) -> Iterator[tuple[str, int]]:
    """Yield the file and the number in it, from 0, of every row.

    Raises:
        ValueError: if a file holds no list.
    """
    done = 0
    for file, content in files:
        if done and done == len(annotation):
            break  # further files hold no rows, such as candidate answers
        if not isinstance(content, list):
            raise ValueError(f"{file}: expected a list of rows, got {short(content)}")
        if content and content[0] is annotation[done]:
            yield from ((file, number) for number in range(len(content)))
            done += len(content)
    # Rows of a user's data set, which reads them elsewhere.
    yield from (("the annotation", number) for number in range(done, len(annotation)))


def _reads_rows_itself(cls: type) -> bool:
    """Return whether a data set of a user does not leave the reading of rows to LAVIS."""
    method: Any = getattr(cls, "__getitem__")  # noqa: B009  mypy knows no such attribute of a type
    if method.__module__.partition(".")[0] in ("lavis", "lavis_mafa"):
        return False
    return "super" not in getattr(method, "__code__", _reads_rows_itself.__code__).co_names


class _Rows:
    """Reads the rows of one data set.

    Args:
        needed, optional: readers of the values, by key.

    Attributes:
        left_out: number of captions that were null or blank.
    """

    def __init__(self, dataset: Any, needed: _Form, optional: _Form) -> None:
        labels = dataset._build_class_labels() if "label" in needed else {}
        self.readers = {
            key: reader or partial(_label, labels) for key, reader in {**needed, **optional}.items()
        }
        # A user's data set may read its rows by other keys, and mean other things by their values;
        # only what LAVIS indexes is the same.
        own = _reads_rows_itself(type(dataset))
        if own and not isinstance(dataset, _INDEXED):
            self.readers = {}
        self.needed = () if own else tuple(needed)
        self.one_caption = isinstance(dataset, _PAIRS) and not own
        self.one_row = isinstance(dataset, _INDEXED) and not own
        self.of_coco = type(dataset).__getitem__ is COCOCapEvalDataset.__getitem__
        self.questions, self.images, self.left_out = Ids(), Ids(), 0
        self._count = 0

    def __call__(self, row: Any) -> list[dict[str, Any]]:
        """Return a row with its values as they are meant; a training row for each caption.

        Raises:
            ValueError: if it cannot be used.
        """
        self._count += 1
        if not isinstance(row, dict):
            raise ValueError(f"expected an object, got {short(row)}")
        lost = [key for key in self.needed if row.get(key) is None]
        if lost:
            raise ValueError(f"{lost[0]!r} is missing or null; it has {', '.join(row)}")
        for key, reader in self.readers.items():
            given = row.get(key)
            if given is None:
                continue
            try:
                row[key] = reader(given)
            except ValueError as error:
                raise ValueError(f"{key!r}: {error}") from error
            if reader is references_of:
                self.left_out += len(_listed(given)) - len(row[key])
        self._check_ids(row)
        if not self.one_caption:
            return [row]
        if row.get("image_id") is None and "image" in row:
            row["image_id"] = row["image"]
        captions = row["caption"]
        row["caption"] = captions[0]
        return [row, *({**row, "caption": one} for one in captions[1:])]

    def _check_ids(self, row: Mapping[str, Any]) -> None:
        wrong = None
        if "question_id" in self.readers and row.get("question_id") is not None:
            wrong = self.questions.add(row["question_id"], f"question {self._count - 1}")
        elif "img_id" in self.readers or (references_of in self.readers.values()):
            key = "img_id" if "img_id" in self.readers else "image_id"
            given = row.get(key)
            if self.of_coco:  # LAVIS takes the id from the file's name
                given = row["image"].split("/")[-1].strip(".jpg").split("_")[-1]
            if given is not None:
                wrong = self.images.add(given, row.get("image"))
        if wrong:
            raise ValueError(wrong)
