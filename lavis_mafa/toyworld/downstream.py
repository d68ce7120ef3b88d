"""Questions and captions about the pictures of `toy_scenes`, in the form of LAVIS's VQA and
captioning data sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lavis.common.registry import registry
from PIL import Image
from torch.utils.data import default_collate

from lavis_mafa.toyworld.builder import (
    Arrays,
    CaptionedPictures,
    ToyBuilder,
    ToyPictures,
    ToyScenesTrain,
    default_config,
    take_number,
)
from lavis_mafa.toyworld.questions import MAX_QUESTIONS, Question, make_questions, possible_answers
from lavis_mafa.toyworld.world import Structured, WorldConfig

_DEFAULT_QUESTIONS = 4


class ToyVqa(ToyPictures):
    """Questions about pictures, in the same form for training and evaluation.

    Items: `image`, `text_input` (the question), `text_output` (the answer), `answers` (a list with
    only that answer), `weights` (the list [1.0]), `question_id` (int), `instance_id` (str),
    `question_type` and `answer_type`.

    `annotation` lists every question as a dictionary with `question_id`, `image` (its name),
    `question`, `answer`, `answers`, `question_type`, `answer_type` and `instance_id`; `answer_list`
    holds all possible answers; `image_ids` (N,) is the picture of each question.
    """

    def __init__(
        self,
        arrays: Arrays,
        world: WorldConfig,
        questions: list[list[Question]],
        **options: Any,
    ) -> None:
        super().__init__(arrays, world, **options)
        self.image_ids: npt.NDArray[np.int64] = np.repeat(
            np.arange(len(questions)), [len(of_image) for of_image in questions]
        )
        self.annotation: list[dict[str, Any]] = [
            {
                "question_id": number,
                "image": self.image_names[image],
                "question": question.text,
                "answer": question.answer,
                "answers": [question.answer],
                "question_type": question.question_type,
                "answer_type": question.answer_type,
            }
            for number, (image, question) in enumerate(
                (image, question)
                for image, of_image in enumerate(questions)
                for question in of_image
            )
        ]
        self.answer_list = possible_answers()
        self._add_instance_ids()

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = self.annotation[index]
        return {
            "image": self._image(int(self.image_ids[index])),
            "text_input": self._processed(entry["question"]),
            "text_output": entry["answer"],
            "answers": entry["answers"],
            "weights": [1.0],
            "question_id": entry["question_id"],
            "instance_id": entry["instance_id"],
            "question_type": entry["question_type"],
            "answer_type": entry["answer_type"],
        }

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate B questions; texts stay lists of strings, `answers` a list of lists.

        `image` is stacked, `question_id` is (B,) int64. LAVIS's VQA models train on `answer` (the
        answers to all questions in one list), `weight` (one for each of these, float32) and
        `n_answers` ((B,) int64, the number of answers to each question).
        """
        batch: dict[str, Any] = {key: [sample[key] for sample in samples] for key in samples[0]}
        batch["image"] = default_collate(batch["image"])
        batch["question_id"] = torch.tensor(batch["question_id"], dtype=torch.int64)
        batch["answer"] = [answer for answers in batch["answers"] for answer in answers]
        weights = [weight for weights in batch.pop("weights") for weight in weights]
        batch["weight"] = torch.tensor(weights, dtype=torch.float32)
        batch["n_answers"] = torch.tensor([len(answers) for answers in batch["answers"]])
        return batch

    def show(self, index: int) -> tuple[Image.Image, str]:
        """Return the unprocessed picture, and the question with its answer, for reports."""
        entry = self.annotation[index]
        return self.picture(int(self.image_ids[index])), f"{entry['question']} {entry['answer']}"


class ToyCaptionEval(CaptionedPictures):
    """Pictures to caption, as LAVIS's `COCOCapEvalDataset`.

    Items: `image`, `image_id` (int) and `instance_id` (str), one for each picture. `annotation`
    lists `image` (its name), `image_id` and `instance_id`.
    """

    def __init__(self, arrays: Arrays, world: WorldConfig, **options: Any) -> None:
        super().__init__(arrays, world, **options)
        self.annotation = [
            {"image": image, "image_id": number} for number, image in enumerate(self.image_names)
        ]
        self._add_instance_ids()

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.annotation[index]
        return {
            "image": self._image(index),
            "image_id": row["image_id"],
            "instance_id": row["instance_id"],
        }

    def references(self) -> dict[int, list[str]]:
        """Return the unprocessed captions of every picture, by `image_id`."""
        found: dict[int, list[str]] = {image: [] for image in range(len(self.images))}
        for image, text in zip(self.image_ids.tolist(), self.texts, strict=True):
            found[image].append(text)
        return found


@registry.register_builder("toy_vqa")
class ToyVqaBuilder(ToyBuilder):
    """Build `train`, `val` and `test` (ToyVqa), `questions_per_image` about every picture."""

    holds = "questions"
    train_dataset_cls = ToyVqa
    eval_dataset_cls = ToyVqa
    DATASET_CONFIG_DICT = default_config("toy_vqa")
    stream = 3

    @classmethod
    def take_own(cls, info: dict[str, Any]) -> dict[str, Any]:
        key = "questions_per_image"
        return {key: take_number("toy_vqa", info, key, _DEFAULT_QUESTIONS, MAX_QUESTIONS)}

    def content(self, scenes: Structured, rng: np.random.Generator) -> tuple[Any, ...]:
        return (make_questions(scenes, self.own["questions_per_image"], rng),)


@registry.register_builder("toy_caption")
class ToyCaptionBuilder(ToyBuilder):
    """Build `train` (ToyScenesTrain), `val` and `test` (ToyCaptionEval)."""

    train_dataset_cls = ToyScenesTrain
    eval_dataset_cls = ToyCaptionEval
    DATASET_CONFIG_DICT = default_config("toy_caption")
