"""Accuracy of answers to questions, with LAVIS's copy of the VQA tools."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lavis.common.vqa_tools.vqa import VQA
from lavis.common.vqa_tools.vqa_eval import VQAEval

from lavis_mafa.downstream.caption_metrics import as_id
from lavis_mafa.io.files import read_json

logger = logging.getLogger(__name__)

# The correct answer, or the answers of all annotators.
Truth = str | Sequence[str]


def normalise(answer: str) -> str:
    """Normalise an answer as VQA's evaluation: punctuation, articles and number words."""
    tool = VQAEval()
    plain = answer.replace("\n", " ").replace("\t", " ").strip()
    return str(tool.processDigitArticle(tool.processPunctuation(plain)))


def read_questions(questions_file: str, annotations_file: str) -> VQA:
    """Read questions and annotations in the format of VQA (VQAv2, OK-VQA).

    Raises:
        ValueError: if the files have another format, or no annotations.
    """
    truth = VQA()
    try:
        truth.questions = read_json(questions_file)
        truth.dataset = read_json(annotations_file)
        for annotation in truth.dataset["annotations"]:
            annotation.setdefault("question_type", "")
            annotation.setdefault("answer_type", "other")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does
            truth.createIndex()
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{questions_file} and {annotations_file} are not in the format of VQA "
            f"({type(error).__name__}: {error}); expected questions and annotations with "
            "question_id, and answers of the annotations"
        ) from error
    if not truth.qa:
        raise ValueError(f"{annotations_file} has no answers: its list of annotations is empty")
    return truth


def accuracy_by_annotators(answers: Mapping[Any, str], truth: VQA) -> dict[str, float]:
    """Return VQA accuracy in percent by LAVIS's `VQAEval`: ``acc`` and one per answer type.

    Only questions with an answer and an annotation are scored; a warning says how many are not.

    Args:
        answers: by question id.
        truth: see `read_questions`; cannot be used again, because `VQAEval` changes it.

    Raises:
        ValueError: if there is no such question.
    """
    known = {as_id(question): question for question in truth.qa}
    given = {as_id(question): answer for question, answer in answers.items()}
    shared = _shared(given, known)
    mine = VQA()
    mine.qa = {known[question]: {"answer": given[question]} for question in shared}
    # As LAVIS's task does: percentages rounded to two digits.
    tool = VQAEval(truth, mine, n=2)
    with contextlib.redirect_stdout(io.StringIO()):
        tool.evaluate(list(mine.qa))
    return {"acc": tool.accuracy["overall"], **tool.accuracy["perAnswerType"]}


def accuracy(
    answers: Mapping[Any, str], truths: Mapping[Any, Truth], answer_types: Mapping[Any, str]
) -> dict[str, float]:
    """Return accuracy in percent for any data set: ``acc`` and one per answer type.

    Answers and truths are normalised. For the score of a single answer see `one_accuracy`.

    Args:
        answers, truths, answer_types: by question id; types may be missing.

    Raises:
        ValueError: if no question has a truth.
    """
    shared = _shared(answers, truths)
    earned: dict[str, list[float]] = defaultdict(list)
    for question in shared:
        score = one_accuracy(answers[question], truths[question])
        earned["acc"].append(score)
        if question in answer_types:
            earned[answer_types[question]].append(score)
    return {name: 100.0 * sum(scores) / len(scores) for name, scores in earned.items()}


def one_accuracy(answer: str, truth: Truth) -> float:
    """Return the accuracy of an answer, 0 to 1.

    With a single correct answer: 1 if it is the same. With answers of several annotators:
    min(annotators who gave it / 3, 1) (Antol et al., "VQA", section 3). With four or more
    annotators, this is averaged over all subsets that leave out one annotator, as in VQA's
    evaluation; with fewer, leaving one out would make an accuracy of 1 impossible.
    """
    given = normalise(answer)
    right = [truth] if isinstance(truth, str) else truth
    total, same = len(right), sum(normalise(one) == given for one in right)
    if total == 1:
        return float(same)
    if total < 4:
        return min(same / 3, 1.0)
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

    Reads ``answers`` or ``answer``: a string, a list of them, or VQA's list of ``{"answer": ...}``.
    """
    for name in ("answers", "answer"):
        value = row.get(name)
        if isinstance(value, (str, int, float)) and value != "":
            return str(value)
        if value:
            found = [one["answer"] if isinstance(one, Mapping) else str(one) for one in value]
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
            "ones; the annotations must be of the split that is evaluated, with the same question "
            "ids"
        )
    number = len(shared)
    if number < max(len(answers), len(known)):
        logger.warning(
            "scored on %d questions: %d answers have no annotation, %d annotations no answer; "
            "metrics are of this subset",
            *(number, len(answers) - number, len(known) - number),
        )
    return shared
