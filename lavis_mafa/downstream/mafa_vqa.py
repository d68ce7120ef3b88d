"""LAVIS's VQA and GQA tasks, scored locally, on one or several ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from lavis.common.registry import registry
from lavis.tasks.vqa import GQATask, VQATask

from lavis_mafa.downstream import task_records as results
from lavis_mafa.downstream.answer_metrics import (
    Annotation,
    accuracy,
    annotated,
    exact_match,
    local_files,
    read_questions,
)
from lavis_mafa.downstream.language_model import check_prompt
from lavis_mafa.downstream.row_values import Id, by_id, read_rows
from lavis_mafa.io.problems import ConfigView, Problem
from lavis_mafa.io.processes import on_main_process

logger = logging.getLogger(__name__)


@registry.register_task("mafa_vqa")
class MafaVQATask(results.InBatches, VQATask):
    """Answers questions with any LAVIS model that has ``predict_answers`` and scores the answers.

    Truth comes from the data set's files in VQA's format (VQAv2, OK-VQA), else from ``answers`` or
    ``answer`` in the rows of its ``annotation``, whose numbers are the samples' ``instance_id`` or
    ``index``; without either, answers are written but not scored.
    Figures in percent: ``acc``, one per answer type, and ``agg_metrics``, which is ``acc``.

    Args:
        length_penalty: passed to ``predict_answers``; None: the model's default.
        Others: as LAVIS's `VQATask`.
    """

    doing = "answering"
    asks_of_model = "predict_answers"

    def __init__(self, *args: Any, length_penalty: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.length_penalty = length_penalty
        self._questions: Mapping[Id, Annotation] | None = None
        self._annotation: Any = ()

    @classmethod
    def problems_of(cls, cfg: ConfigView) -> Iterator[Problem]:
        """Yield why a question cannot be put into the prompt; see `lavis_mafa.io.problems`."""
        try:
            check_prompt(cfg["run.prompt"] or "")
        except ValueError as error:
            yield Problem("run.prompt", str(error))

    @classmethod
    def setup_task(cls, cfg: Any) -> MafaVQATask:
        task: MafaVQATask = super().setup_task(cfg)
        task.length_penalty = cfg.run_cfg.get("length_penalty")
        return task

    def before_evaluation(self, model: Any, dataset: Any, **kwargs: Any) -> None:
        """Read the right answers and the candidates before any question is answered.

        Raises:
            ValueError: if the model takes no length penalty, there are no candidates to rank, or
                rows have answers that are no texts.
        """
        super().before_evaluation(model=model, dataset=dataset, **kwargs)
        if self.length_penalty is not None:
            results.require_argument(model, "predict_answers", "length_penalty", "length_penalty")
        self.answer_list = getattr(dataset, "answer_list", None)
        if self.inference_method == "rank" and not self.answer_list:
            raise ValueError(
                f"run.inference_method is rank, but {type(dataset).__name__} has no list of "
                "answers to rank; use run.inference_method: generate"
            )
        self._annotation = getattr(dataset, "annotation", ())
        read_rows(f"the annotation of {type(dataset).__name__}", self._annotation, annotated)
        self._questions = on_main_process(lambda: self._annotations_of(dataset))

    def _annotations_of(self, dataset: Any) -> Mapping[Id, Annotation] | None:
        files = local_files(dataset)
        if files is None:
            return None
        questions = read_questions(*files)
        results.check_known(dataset, ("question_id", "instance_id"), questions, files[1])
        return questions

    def valid_step(self, model: Any, samples: Any) -> list[results.Record]:
        """Answer a mini-batch.

        Raises:
            ValueError: if samples have neither ``question_id`` nor ``instance_id``.
        """
        ids = results.required_column(samples, "question_id", "instance_id")
        places = results.optional_column(samples, len(ids), "instance_id", "index")
        options = {} if self.length_penalty is None else {"length_penalty": self.length_penalty}
        answers = model.predict_answers(
            samples=samples,
            answer_list=self.answer_list,
            inference_method=self.inference_method,
            num_beams=self.num_beams,
            max_len=self.max_len,
            min_len=self.min_len,
            num_ans_candidates=self.num_ans_candidates,
            prompt=self.prompt,
            **options,
        )
        return [
            {"question_id": question, "answer": answer, "place": place}
            for question, answer, place in zip(ids, answers, places, strict=True)
        ]

    def after_evaluation(
        self, val_result: list[results.Record], split_name: str, **kwargs: Any
    ) -> dict[str, float]:
        """Write ``<split>_vqa_result.json`` and score it, on the main process.

        Returns:
            The figures; empty if no right answers are known.
        """
        for record in val_result:
            row = self._row_of(record)
            record.update(truth=annotated(row), answer_type=row.get("answer_type"))
        records, path = results.write_result(
            val_result, "question_id", f"{split_name}_vqa_result", self._to_write
        )
        figures = self._score(records)
        if figures is None:
            logger.warning(
                "no right answers are known for %s: nothing is scored; the answers are in %s",
                split_name,
                path,
            )
            return {}
        return {"agg_metrics": figures["acc"], **figures}

    def _row_of(self, record: results.Record) -> Mapping[str, Any]:
        """Return a record's row of the annotation; {} if it is not known."""
        place = str(record["place"])
        known = place.isdigit() and int(place) < len(self._annotation)
        return self._annotation[int(place)] if known else {}

    def _to_write(self, record: results.Record) -> results.Record:
        return {"question_id": record["question_id"], "answer": record["answer"]}

    def _score(self, records: list[results.Record]) -> dict[str, float] | None:
        answers = {record["question_id"]: record["answer"] for record in records}
        truth = self._questions
        if truth is None:
            truth = by_id(
                (one["question_id"], Annotation(one["truth"], one["answer_type"]))
                for one in records
                if one["truth"] is not None
            )
        return accuracy(answers, truth) if truth else None


@registry.register_task("mafa_gqa")
class MafaGQATask(MafaVQATask, GQATask):
    """GQA: the share of right answers, after LAVIS's normalisation."""

    def _to_write(self, record: results.Record) -> results.Record:
        return {
            "question_id": record["question_id"],
            "pred_ans": record["answer"],
            "gt_ans": record["truth"] and record["truth"][0],
        }

    def _score(self, records: list[results.Record]) -> dict[str, float] | None:
        answers = {record["question_id"]: record["answer"] for record in records}
        truths: dict[Any, str] = {}
        for record in records:
            own = record["truth"] or []
            if len(own) > 1:
                raise ValueError(f"GQA has one answer a question, got {own}; use task mafa_vqa")
            if own:
                truths[record["question_id"]] = own[0]
        generated = self.inference_method == "generate"
        return exact_match(answers, truths, generated) if truths else None
