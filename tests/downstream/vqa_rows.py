"""Rows of LAVIS's VQA on coloured pictures, and VQA's own questions and annotations."""

from __future__ import annotations

from generation_run import COLOURS

QUESTIONS = [
    (21, "red", "other"),
    (22, "no", "yes/no"),
    (23, "blue", "other"),
    (24, "white", "other"),
]


def ten_annotators(right, count):
    return [{"answer_id": i, "answer": right if i < count else f"no {i}"} for i in range(10)]


def vqa_files(pictures, counts=(10, 10, 3, 1)):
    """Return LAVIS's rows, candidate answers, and VQA's own questions and annotations."""
    rows = [
        {"image": p, "question": "what colour is it?", "question_id": q, "dataset": "vqa"}
        for p, (q, _, _) in zip(pictures, QUESTIONS, strict=True)
    ]
    questions = {"questions": [{"question_id": q, "image_id": 1} for q, _, _ in QUESTIONS]}
    annotations = [
        {
            "question_id": q,
            "image_id": 1,
            "answer_type": kind,
            "answers": ten_annotators(right, count),
        }
        for (q, right, kind), count in zip(QUESTIONS, counts, strict=True)
    ]
    return rows, list(COLOURS), questions, {"annotations": annotations}
