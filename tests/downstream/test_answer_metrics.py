"""The accuracy of answers: against VQA's own tool, and from files of annotations."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lavis.common.vqa_tools.vqa import VQA
from lavis.common.vqa_tools.vqa_eval import VQAEval

from lavis_mafa.downstream.answer_metrics import Annotation, accuracy, read_questions

words = st.sampled_from(["red", "a red", "2", "two", "blue sky", "it's", "no.", "none", "Red, 2"])


@given(words, st.lists(words, min_size=4, max_size=12))
def test_accuracy_equals_the_official_vqa_tool(answer, truths):
    ours = accuracy({1: answer}, {1: Annotation(truths)})
    assert ours["acc"] == pytest.approx(official_accuracy(answer, truths), abs=5e-3)


def official_accuracy(answer, truths):
    truth, result = VQA(), VQA()
    of_each = [{"answer_id": i, "answer": t} for i, t in enumerate(truths)]
    truth.qa = {1: {"answers": of_each, "question_type": "", "answer_type": "other"}}
    result.qa = {1: {"answer": answer}}
    tool = VQAEval(n=6)
    tool.vqa, tool.vqaRes = truth, result
    with contextlib.redirect_stdout(io.StringIO()):
        tool.evaluate([1])
    return tool.accuracy["overall"]


RIGHT = {21: "red car", 22: "no", 23: "2"}


def annotation_file(path, answers_of, id_of=int):
    rows = [{"question_id": id_of(q), "answers": answers_of(a)} for q, a in RIGHT.items()]
    path.write_text(json.dumps({"annotations": rows}))
    asked = path.with_name("questions.json")
    asked.write_text(json.dumps({"questions": [{"question_id": id_of(q)} for q in RIGHT]}))
    return str(asked), str(path)


@pytest.mark.parametrize(
    "answers_of",
    [
        lambda answer: [{"answer": answer, "answer_id": k} for k in range(10)],
        lambda answer: [{"answer": answer, "answer_confidence": "yes"} for k in range(10)],
        lambda answer: [{"answer": answer}] * 4,
        lambda answer: [{"answer": answer, "answer_id": k} for k in range(3)],
        lambda answer: [{"answer": answer}],
        lambda answer: [answer] * 10,
        lambda answer: answer,
        lambda answer: [None, answer],
        lambda answer: [2 if answer == "2" else answer] * 2,
    ],
)
@pytest.mark.parametrize("id_of", [int, str, float])
def test_the_answer_of_all_annotators_is_right(tmp_path, answers_of, id_of):
    truth = read_questions(*annotation_file(tmp_path / "a.json", answers_of, id_of))
    scores = accuracy(RIGHT, truth)
    assert scores == {"acc": 100.0, "other": 100.0}
    wrong = accuracy({**RIGHT, 21: "blue"}, truth)
    assert wrong["acc"] == pytest.approx(66.67)


@pytest.mark.parametrize("answers", [[], None, "", [{"answer": None}], [{}], [["red"]], True])
def test_annotation_without_answers_is_refused(tmp_path, answers):
    files = annotation_file(tmp_path / "a.json", lambda a: answers if a == "no" else [a])
    with pytest.raises(ValueError, match=r"a\.json cannot be used:\s+row 1: .*22"):
        read_questions(*files)


def test_question_ids_of_annotations_are_distinct(tmp_path):
    names = {21: "07", 22: "7", 23: 8}
    files = annotation_file(tmp_path / "a.json", lambda a: [a], names.get)
    with pytest.raises(ValueError, match="'7' and '07', which occurs before, are the same number"):
        read_questions(*files)
    files = annotation_file(tmp_path / "a.json", lambda a: [a], {21: 1, 22: 1, 23: 2}.get)
    with pytest.raises(ValueError, match="row 1: 1 is the id of 'row 0' as well"):
        read_questions(*files)


def test_different_ids_that_are_one_number_are_refused():
    with pytest.raises(ValueError, match="id '07' and '7', which occurs before, are the same"):
        accuracy({"7": "red", "07": "red"}, {7: Annotation(["red"])})
