"""Accuracy of answers to questions, with the tools of VQA that LAVIS brings."""

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

from lavis_mafa.metrics.captions import as_id, read_json

logger = logging.getLogger(__name__)

# A right answer: the only one, or one of each annotator.
Truth = str | Sequence[str]


def normalise(answer: str) -> str:
    """An answer as VQA's evaluation compares it: punctuation, articles and number words mended."""
    tool = VQAEval()
    plain = answer.replace("\n", " ").replace("\t", " ").strip()
    return tool.processDigitArticle(tool.processPunctuation(plain))


def read_questions(questions_file: str, annotations_file: str) -> VQA:
    """Questions and annotations in the format of VQA (VQAv2, OK-VQA).

    Raises:
        ValueError: if the files are not of this format, or empty.
    """
    truth = VQA()
    try:
        truth.questions = read_json(questions_file)
        truth.dataset = read_json(annotations_file)
        for annotation in truth.dataset["annotations"]:
            annotation.setdefault("question_type", "")
            annotation.setdefault("answer_type", "other")
        with _silence():
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
    """VQA accuracy in percent, computed by LAVIS's `VQAEval`: ``acc`` and one per answer type.

    Answers and annotations may cover each other in part: what both have is scored, and said.

    Args:
        answers: by question id.
        truth: see `read_questions`; used up, because `VQAEval` changes it.

    Raises:
        ValueError: if no question has both.
    """
    known = {as_id(question): question for question in truth.qa}
    given = {as_id(question): answer for question, answer in answers.items()}
    shared = [question for question in given if question in known]
    _check_shared(len(shared), len(given), len(known))
    mine = VQA()
    mine.qa = {known[question]: {"answer": given[question]} for question in shared}
    tool = VQAEval(truth, mine, n=2)
    with _silence():
        tool.evaluate(list(mine.qa))
    return {"acc": tool.accuracy["overall"], **tool.accuracy["perAnswerType"]}


def accuracy(
    answers: Mapping[Any, str], truths: Mapping[Any, Truth], answer_types: Mapping[Any, str]
) -> dict[str, float]:
    """Accuracy in percent against truths of any data set: ``acc`` and one per answer type.

    Both sides are normalised. See `one_accuracy` for what an answer earns.

    Args:
        answers, truths, answer_types: by question id; types may be known in part.

    Raises:
        ValueError: if no question has a truth.
    """
    shared = [question for question in answers if question in truths]
    _check_shared(len(shared), len(answers), len(truths))
    earned: dict[str, list[float]] = defaultdict(list)
    for question in shared:
        score = one_accuracy(answers[question], truths[question])
        earned["acc"].append(score)
        if question in answer_types:
            earned[answer_types[question]].append(score)
    return {name: 100.0 * sum(scores) / len(scores) for name, scores in earned.items()}


def one_accuracy(answer: str, truth: Truth) -> float:
    """0 to 1. One right answer: 1 if it is the same.

    Several: min(annotators who gave it / 3, 1) (Antol et al., "VQA", section 3). From four on it
    is averaged over all sets that leave one annotator out, as VQA's evaluation does, so that ten
    answers earn what they earn there; below four, leaving one out would put 1 out of reach.
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
    """GQA's accuracy in percent, ``acc``, as LAVIS has it: generated answers are normalised first.

    Raises:
        ValueError: if no question has a truth.
    """
    shared = [question for question in answers if question in truths]
    _check_shared(len(shared), len(answers), len(truths))
    right = sum(
        (normalise(answers[question]) if generated else answers[question]) == truths[question]
        for question in shared
    )
    return {"acc": 100.0 * right / len(shared)}


def annotated(row: Mapping[str, Any]) -> Truth | None:
    """The right answer or answers of a sample or an annotation, None if it has none.

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
    """Questions and annotations in VQA's format that a LAVIS data set names, if they are there."""
    files = [getattr(dataset, f"coco_fmt_{kind}_file", None) for kind in ("qust", "anno")]
    if None in files:
        return None
    lost = [str(file) for file in files if not os.path.isfile(str(file))]
    if lost:
        logger.warning("no VQA scoring by annotators: %s is not there", " and ".join(lost))
        return None
    return str(files[0]), str(files[1])


def _check_shared(shared: int, answers: int, known: int) -> None:
    if not shared:
        raise ValueError(
            f"none of the {answers} answered questions is among the {known} annotated ones; the "
            "annotations must be of the split that is evaluated, with the same question ids"
        )
    if shared < max(answers, known):
        logger.warning(
            "scored on %d questions: %d answers have no annotation, %d annotations no answer; "
            "figures are of this subset",
            *(shared, answers - shared, known - shared),
        )


@contextlib.contextmanager
def _silence() -> Any:
    """The tools print what they do."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
