"""Accuracy of answers to questions, with LAVIS's copy of the VQA tools."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from lavis.common.vqa_tools.vqa_eval import VQAEval

from lavis_mafa.downstream.row_values import (
    Id,
    Ids,
    answers_of,
    as_id,
    by_id,
    id_of,
    read_rows,
    text_of,
)
from lavis_mafa.io.files import read_json

logger = logging.getLogger(__name__)

_TOOL = VQAEval()
_LEAST_LEFT_OUT = 4  # annotators; with fewer, leaving one out would make a score of 1 impossible
_ANSWER_KEYS = ("answers", "answer", "direct_answers")


def _normalise(answer: str) -> str:
    """Normalise an answer as VQA's evaluation: punctuation, articles and number words."""
    plain = answer.replace("\n", " ").replace("\t", " ").strip()
    return str(_TOOL.processDigitArticle(_TOOL.processPunctuation(plain)))


@dataclass(frozen=True)
class Annotation:
    """The answers of all annotators to a question, or the only one; and its type, if known."""

    answers: list[str]
    answer_type: str | None = None


def read_questions(questions_file: str, annotations_file: str) -> dict[Id, Annotation]:
    """Return the annotations of files in VQA's format (VQAv2, OK-VQA) by question id.

    Answers may be VQA's list of ``{"answer": ...}``, a list of texts, or a single one.

    Raises:
        ValueError: if the files have another format or no annotations; listing annotations that
            cannot be scored.
    """
    ids, numbers = Ids(), count()

    def read(row: Any) -> tuple[Id, Annotation]:
        place = f"row {next(numbers)}"
        if wrong := ids.add(id_of(row["question_id"]), place):
            raise ValueError(wrong)
        answers, kind = annotated(row), text_of(row.get("answer_type") or "other")
        if answers is None:
            raise ValueError("it has no answer")
        return as_id(row["question_id"]), Annotation(answers, kind)

    try:
        asked = {as_id(row["question_id"]) for row in read_json(questions_file)["questions"]}
        rows = read_json(annotations_file)["annotations"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{questions_file} and {annotations_file} are not in the format of VQA "
            f"({type(error).__name__}: {error})"
        ) from error
    truth = dict(read_rows(annotations_file, rows, read))
    if not truth:
        raise ValueError(f"{annotations_file} has no answers: its list of annotations is empty")
    if not asked & truth.keys():
        raise ValueError(f"{annotations_file} has no annotation of a question of {questions_file}")
    return truth


def accuracy(answers: Mapping[Any, str], truth: Mapping[Id, Annotation]) -> dict[str, float]:
    """Return VQA accuracy in percent, ``acc`` and one per answer type, with two digits.

    The accuracy of an answer is min(annotators who gave it / 3, 1) (Antol et al., "VQA", section
    3), averaged over all subsets that leave out one annotator. This equals LAVIS's `VQAEval` if the
    annotators' answers carry different ``answer_id``; if not, it leaves out every annotator that is
    equal to one. With fewer than four annotators the accuracy is the share of those who gave the
    answer, so that an answer on which all agree scores 1.

    Only questions with an answer and an annotation are scored; a warning says how many are not.

    Args:
        answers: by question id.
        truth: see `read_questions`.

    Raises:
        ValueError: if there is no such question, or different ids of questions are one number.
    """
    given = by_id(answers.items())
    earned: dict[str, list[float]] = defaultdict(list)
    for one in _shared(given, truth):
        score = _accuracy_of(_normalise(given[one]), truth[one].answers)
        earned["acc"].append(score)
        if truth[one].answer_type is not None:
            earned[str(truth[one].answer_type)].append(score)
    return {name: round(100 * sum(of) / len(of), 2) for name, of in earned.items()}


def _accuracy_of(given: str, truths: Sequence[str]) -> float:
    """Return the accuracy, 0 to 1, of a normalised answer.

    Unlike the answer, four or more annotators' answers are not normalised, but for their
    punctuation where they differ, as by `VQAEval`: "none" is not a right answer to ten times
    "none".
    """
    total = len(truths)
    if total < _LEAST_LEFT_OUT:
        return [_normalise(one) for one in truths].count(given) / total
    if len(set(truths)) > 1:
        truths = [_TOOL.processPunctuation(one) for one in truths]
    same = truths.count(given)
    return (same * min((same - 1) / 3, 1.0) + (total - same) * min(same / 3, 1.0)) / total


def exact_match(
    answers: Mapping[Any, str], truths: Mapping[Any, str], generated: bool
) -> dict[str, float]:
    """Return GQA's accuracy ``acc`` in percent; as in LAVIS only generated answers are normalised.

    Raises:
        ValueError: if no question has a truth.
    """
    shared = _shared(answers, truths)
    right = sum(
        (_normalise(answers[question]) if generated else answers[question]) == truths[question]
        for question in shared
    )
    return {"acc": 100.0 * right / len(shared)}


def annotated(row: Mapping[str, Any]) -> list[str] | None:
    """Return the correct answers of a sample or an annotation; None if it has none.

    Reads the first of ``answers``, ``answer`` and ``direct_answers`` that has one, see
    `answers_of`.

    Raises:
        ValueError: if it is neither an answer nor a list of answers.
    """
    return next(filter(None, (answers_of(row.get(name)) for name in _ANSWER_KEYS)), None)


def local_files(dataset: Any) -> tuple[str, str] | None:
    """Return the VQA questions and annotations that a LAVIS data set names, if they exist."""
    files = [getattr(dataset, f"coco_fmt_{kind}_file", None) for kind in ("qust", "anno")]
    if None in files:
        return None
    lost = [str(file) for file in files if not os.path.isfile(str(file))]
    if lost:
        logger.warning("no VQA accuracy by annotators: %s does not exist", " and ".join(lost))
        return None
    return str(files[0]), str(files[1])


def _shared(answers: Mapping[Any, str], known: Mapping[Any, Any]) -> list[Any]:
    """Return the questions that are answered and annotated; warn if there are others."""
    shared = [question for question in answers if question in known]
    if not shared:
        raise ValueError(
            f"none of the {len(answers)} answered questions is among the {len(known)} annotated "
            "ones; give the annotations of the split that is evaluated"
        )
    number = len(shared)
    if number < max(len(answers), len(known)):
        logger.warning(
            "scored on %d questions: %d answers have no annotation, %d annotations no answer; "
            "metrics are of this subset",
            number,
            len(answers) - number,
            len(known) - number,
        )
    return shared
