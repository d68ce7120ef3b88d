"""Accuracy of answers to questions, with LAVIS's copy of the VQA tools."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lavis.common.vqa_tools.vqa_eval import VQAEval

from lavis_mafa.data.annotation_rows import Problem, Refusals
from lavis_mafa.downstream.row_values import (
    Id,
    Ids,
    answers_of,
    as_id,
    by_id,
    id_of,
    text_of,
)
from lavis_mafa.io.files import read_json

logger = logging.getLogger(__name__)

# The correct answer, or the answers of all annotators.
Truth = str | list[str]
_TOOL = VQAEval()
_LEAST_LEFT_OUT = 4  # annotators; with fewer, leaving one out would make a score of 1 impossible
_ANSWER_KEYS = ("answers", "answer", "direct_answers")


def normalise(answer: str) -> str:
    """Normalise an answer as VQA's evaluation: punctuation, articles and number words."""
    plain = answer.replace("\n", " ").replace("\t", " ").strip()
    return str(_TOOL.processDigitArticle(_TOOL.processPunctuation(plain)))


@dataclass(frozen=True)
class Annotation:
    """The answers of all annotators to a question, and its type."""

    answers: list[str]
    answer_type: str = "other"


def read_questions(questions_file: str, annotations_file: str) -> dict[Id, Annotation]:
    """Return the annotations of files in VQA's format (VQAv2, OK-VQA) by question id.

    Answers may be VQA's list of ``{"answer": ...}``, a list of texts, or a single one.

    Raises:
        ValueError: if the files have another format or no annotations; listing annotations that
            cannot be scored.
    """
    truth: dict[Id, Annotation] = {}
    refused, ids = Refusals(), Ids()
    try:
        asked = {as_id(row["question_id"]) for row in read_json(questions_file)["questions"]}
        for number, row in enumerate(read_json(annotations_file)["annotations"]):
            question = row["question_id"]
            try:
                wrong = ids.add(id_of(question), f"annotation {number}")
                found = [row[key] for key in _ANSWER_KEYS if row.get(key) is not None]
                answers = answers_of(found[0] if found else None)
                kind = text_of(row.get("answer_type") or "other")
            except ValueError as error:
                wrong = str(error)
            if wrong:
                where = f"annotation {number} (question {question!r})"
                refused.add("", Problem(where, wrong))
                continue
            truth[as_id(question)] = Annotation(answers, kind)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{questions_file} and {annotations_file} are not in the format of VQA "
            f"({type(error).__name__}: {error})"
        ) from error
    refused.end(annotations_file)
    if not truth:
        raise ValueError(f"{annotations_file} has no answers: its list of annotations is empty")
    if not asked & truth.keys():
        raise ValueError(f"{annotations_file} has no annotation of a question of {questions_file}")
    return truth


def accuracy_by_annotators(
    answers: Mapping[Any, str], truth: Mapping[Id, Annotation]
) -> dict[str, float]:
    """Return VQA accuracy in percent, ``acc`` and one per answer type, with two digits.

    Equal to LAVIS's `VQAEval` for questions with four or more annotators whose answers carry
    different ``answer_id``. It leaves out every annotator that is equal to one, and with fewer
    annotators a right answer cannot score 1; see `_one_accuracy` for these.

    Only questions with an answer and an annotation are scored; a warning says how many are not.

    Args:
        answers: by question id.
        truth: see `read_questions`.

    Raises:
        ValueError: if there is no such question, or different ids of questions are one number.
    """
    given = by_id(answers.items())
    found = [
        (_official(normalise(given[one]), truth[one].answers), truth[one].answer_type)
        for one in _shared(given, truth)
    ]
    return {name: round(value, 2) for name, value in _means(found).items()}


def _means(scores: Sequence[tuple[float, str | None]]) -> dict[str, float]:
    """Return the mean in percent of all scores, ``acc``, and of those of each answer type."""
    earned: dict[str, list[float]] = defaultdict(list)
    for score, kind in scores:
        earned["acc"].append(score)
        if kind is not None:
            earned[kind].append(score)
    return {name: 100 * sum(of) / len(of) for name, of in earned.items()}


def _official(given: str, truths: Sequence[str]) -> float:
    """Return the accuracy, 0 to 1, of a normalised answer as `VQAEval` computes it.

    Unlike the answer, annotators' answers are not normalised, but for their punctuation where they
    differ: "none" is not a right answer to ten times "none".
    """
    if len(truths) < _LEAST_LEFT_OUT:
        return _share(given, [normalise(one) for one in truths])
    if len(set(truths)) > 1:
        truths = [_TOOL.processPunctuation(one) for one in truths]
    return _share(given, truths)


def accuracy(
    answers: Mapping[Any, str], truths: Mapping[Any, Truth], answer_types: Mapping[Any, str]
) -> dict[str, float]:
    """Return accuracy in percent for any data set: ``acc`` and one per answer type.

    Answers and truths are normalised. For the score of a single answer see `_one_accuracy`.

    Args:
        answers, truths, answer_types: by question id; types may be missing.

    Raises:
        ValueError: if no question has a truth.
    """
    return _means(
        [
            (_one_accuracy(answers[one], truths[one]), answer_types.get(one))
            for one in _shared(answers, truths)
        ]
    )


def _one_accuracy(answer: str, truth: Truth) -> float:
    """Return the accuracy of an answer, 0 to 1.

    With answers of several annotators: min(annotators who gave it / 3, 1) (Antol et al., "VQA",
    section 3). With four or more annotators, this is averaged over all subsets that leave out one
    annotator, as in VQA's evaluation. With fewer, it is the share of the annotators who gave it, so
    that an answer on which all agree scores 1.
    """
    truths = [truth] if isinstance(truth, str) else truth
    return _share(normalise(answer), [normalise(one) for one in truths])


def _share(given: str, truths: Sequence[str]) -> float:
    total, same = len(truths), truths.count(given)
    if total < _LEAST_LEFT_OUT:
        return same / total
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
        (normalise(answers[question]) if generated else answers[question]) == truths[question]
        for question in shared
    )
    return {"acc": 100.0 * right / len(shared)}


def annotated(row: Mapping[str, Any]) -> Truth | None:
    """Return the correct answer or answers of a sample or an annotation; None if it has none.

    Reads the first of ``answers``, ``answer`` and ``direct_answers`` that is not null, see
    `answers_of`.

    Raises:
        ValueError: if it is neither an answer nor a list of answers.
    """
    for name in _ANSWER_KEYS:
        if row.get(name) is not None:
            found = answers_of(row[name])
            return found[0] if len(found) == 1 else found
    return None


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
