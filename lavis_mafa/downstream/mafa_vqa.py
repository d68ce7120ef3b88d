"""LAVIS's VQA and GQA tasks, scored locally, on one or several ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from lavis.common.dist_utils import is_main_process
from lavis.common.registry import registry
from lavis.tasks.vqa import GQATask, VQATask

from lavis_mafa.downstream import task_records as results
from lavis_mafa.downstream.answer_metrics import (
    Annotation,
    Truth,
    accuracy,
    accuracy_by_annotators,
    annotated,
    exact_match,
    local_files,
    read_questions,
)
from lavis_mafa.downstream.language_model import problem_of_prompt
from lavis_mafa.downstream.row_values import Id
from lavis_mafa.io.processes import on_main_process
from lavis_mafa.models.traits import traits_of
from lavis_mafa.problems import ConfigView, Problem

logger = logging.getLogger(__name__)

_ID_KEYS = ("question_id", "instance_id")  # of a sample, in this order


@registry.register_task("mafa_vqa")
class MafaVQATask(results.InBatches, VQATask):
    """Answers questions with any LAVIS model that has ``predict_answers`` and scores the answers.

    Truth comes from the data set's files in VQA's format (VQAv2, OK-VQA), else from ``answers`` or
    ``answer`` of its samples or annotation; without either, answers are written but not scored.
    Figures in percent: ``acc``, one per answer type, and ``agg_metrics``, which is ``acc``.

    Args:
        length_penalty: passed to ``predict_answers``; None: the model's default.
        Others: as LAVIS's `VQATask`.
    """

    doing = "answering"
    asks_of_model = "predict_answers"
    needs = "questions"

    @classmethod
    def problems_of(cls, cfg: ConfigView) -> Iterator[Problem]:
        """Yield contradictions in a config; see `lavis_mafa.problems`."""
        prompt, arch = cfg["run.prompt"], cfg["model.arch"]
        model = registry.get_model_class(arch or "")
        problem = problem_of_prompt(prompt) if prompt and model else None
        if problem:
            yield Problem("run.prompt", problem)
        if model is None or not (cfg["run.valid_splits"] or cfg["run.test_splits"]):
            return
        method = cfg["run.inference_method"] or "rank"  # LAVIS's default
        wanted = "rank" if traits_of(model).llm_key is None else "generate"
        ours, key = traits_of(model).loads_with_our_loader, "run.inference_method"
        if ours and method != wanted and key not in cfg.wrong:
            how = "generates its answers" if wanted == "generate" else "ranks a list of answers"
            yield Problem(key, f"is {method}, but {arch} {how}; use {wanted}")
        answers = getattr(model, "predict_answers", None)
        given = cfg["run.length_penalty"] is not None
        if given and answers and not results.takes(answers, "length_penalty"):
            why = f"{arch}.predict_answers() has no argument length_penalty"
            yield Problem("run.length_penalty", f"{why}; remove run.length_penalty")

    def __init__(self, *args: Any, length_penalty: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.length_penalty = length_penalty
        self._questions: Mapping[Id, Annotation] | None = None
        self._read: dict[tuple[str, str], Mapping[Id, Annotation]] = {}
        self._annotation: Any = ()

    @classmethod
    def setup_task(cls, cfg: Any) -> MafaVQATask:
        task: MafaVQATask = super().setup_task(cfg)
        task.length_penalty = cfg.run_cfg.get("length_penalty")
        return task

    def build_datasets(self, cfg: Any) -> Any:
        """Build the data sets and read the right answers, before there is a model."""
        datasets = super().build_datasets(cfg)
        for splits in datasets.values():
            for built in (one for split, one in splits.items() if split != "train"):
                on_main_process(partial(self._annotations_of, built))
        return datasets

    def before_evaluation(self, model: Any, dataset: Any, **kwargs: Any) -> None:
        """Read the right answers and the candidates before any question is answered.

        Raises:
            ValueError: if the model takes no length penalty, or there are no candidates to rank.
        """
        super().before_evaluation(model=model, dataset=dataset, **kwargs)
        if self.length_penalty is not None:
            results.require_argument(model, "predict_answers", "length_penalty", "length_penalty")
        if self.prompt and not results.takes(model.predict_answers, "prompt") and is_main_process():
            logger.warning(
                "run.prompt is set, but %s.predict_answers() has no argument prompt: it is ignored",
                type(model).__name__,
            )
        self.answer_list = getattr(dataset, "answer_list", None)
        if self.inference_method == "rank" and not self.answer_list:
            raise ValueError(
                f"run.inference_method is rank, but {type(dataset).__name__} has no list of "
                "answers to rank; use run.inference_method: generate"
            )
        self._annotation = getattr(dataset, "annotation", ())
        self._questions = on_main_process(lambda: self._annotations_of(dataset))

    def _annotations_of(self, dataset: Any) -> Mapping[Id, Annotation] | None:
        files = local_files(dataset)
        if files is None:
            return None
        if files not in self._read:
            self._read[files] = read_questions(*files)
            results.check_known(dataset, _ID_KEYS, self._read[files], files[1])
        return self._read[files]

    def valid_step(self, model: Any, samples: Any) -> list[results.Record]:
        """Answer a mini-batch.

        Raises:
            ValueError: if samples have neither ``question_id`` nor ``instance_id``.
        """
        ids = results.required_column(samples, *_ID_KEYS)
        truths = _column_of_truths(samples, len(ids))
        types = results.column(samples, "answer_type") or [None] * len(ids)
        places = results.column(samples, "instance_id", "index") or [None] * len(ids)
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
        results.check_length(answers, len(ids), f"{type(model).__name__}.predict_answers()")
        names = ("question_id", "answer", "truth", "answer_type", "place")
        rows = zip(ids, answers, truths, types, places, strict=True)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def after_evaluation(
        self, val_result: list[results.Record], split_name: str, **kwargs: Any
    ) -> dict[str, float]:
        """Write ``<split>_vqa_result.json`` and score it, on the main process.

        Returns:
            The figures; empty if no right answers are known.
        """
        for record in val_result:
            self._take_from_annotation(record)
        asked = {(record["question_id"], record["place"]) for record in val_result}
        lost = len(asked) - len({question for question, _ in asked})
        if lost:
            logger.warning(
                "%d questions have the id of another one: only the first of each id is written and "
                "scored",
                lost,
            )
        records, path = results.write_result(
            val_result, "question_id", f"{split_name}_vqa_result", self._to_write
        )
        figures = self._score(records)
        if figures is None:
            logger.warning(
                "no right answers are known for %s: nothing is scored; the answers are in %s",
                *(split_name, path),
            )
            return {}
        return {"agg_metrics": figures["acc"], **figures}

    def _take_from_annotation(self, record: results.Record) -> None:
        """Complete a record's truth and answer type from its row of the annotation."""
        if record["place"] is None or not str(record["place"]).isdigit():
            return
        place = int(record["place"])
        row = self._annotation[place] if place < len(self._annotation) else {}
        if record["truth"] is None:
            record["truth"] = annotated(row)
        if record["answer_type"] is None:
            record["answer_type"] = row.get("answer_type")

    def _to_write(self, record: results.Record) -> results.Record:
        return {"question_id": record["question_id"], "answer": record["answer"]}

    def _score(self, records: list[results.Record]) -> dict[str, float] | None:
        answers = {record["question_id"]: record["answer"] for record in records}
        if self._questions is not None:
            return accuracy_by_annotators(answers, self._questions)
        truths = _known(records, "truth")
        return accuracy(answers, truths, _known(records, "answer_type")) if truths else None


@registry.register_task("mafa_gqa")
class MafaGQATask(MafaVQATask, GQATask):
    """GQA: the share of right answers, after LAVIS's normalisation."""

    def _to_write(self, record: results.Record) -> results.Record:
        return {
            "question_id": record["question_id"],
            "pred_ans": record["answer"],
            "gt_ans": record["truth"],
        }

    def _score(self, records: list[results.Record]) -> dict[str, float] | None:
        answers = {record["question_id"]: record["answer"] for record in records}
        truths = _known(records, "truth")
        several = next((t for t in truths.values() if not isinstance(t, str)), None)
        if several is not None:
            raise ValueError(f"GQA has one answer a question, got {several}; use task mafa_vqa")
        generated = self.inference_method == "generate"
        return exact_match(answers, truths, generated) if truths else None


def _known(records: list[results.Record], name: str) -> dict[Any, Any]:
    return {r["question_id"]: r[name] for r in records if r[name] is not None}


def _column_of_truths(samples: Any, size: int) -> list[Truth | None]:
    """Return the right answers of every sample of a mini-batch, None where there are none."""
    for name in ("answers", "answer", "direct_answers"):
        values = results.column(samples, name)
        if values is None:
            continue
        # Torch's default collation transposes lists of strings into tuples.
        if values and all(isinstance(value, tuple) and len(value) == size for value in values):
            values = [list(value) for value in zip(*values, strict=True)]
        if len(values) == size:
            return [annotated({name: value}) for value in values]
    return [None] * size
