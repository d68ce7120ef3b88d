"""Questions and captions about the pictures of `toy_scenes`, in the form of LAVIS's VQA and
captioning data sets. Pictures, seeds, splits and cache are those of `toy_scenes`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lavis.common.registry import registry
from PIL import Image
from torch.utils.data import default_collate

from lavis_mafa.toyworld.builder import (
    SPLITS,
    Arrays,
    Processor,
    ToyPictures,
    ToyScenesBuilder,
    ToyScenesTrain,
    _ToyScenes,
)
from lavis_mafa.toyworld.questions import (
    MAX_QUESTIONS,
    Question,
    make_questions,
    possible_answers,
)
from lavis_mafa.toyworld.world import WorldConfig

_CONFIG_DIR = Path(__file__).resolve().parents[1] / "configs" / "datasets"
_QUESTION_STREAM = 3  # 0 to 2 are those of `make_world`
_DEFAULT_QUESTIONS = 4


class ToyVqa(ToyPictures):
    """Questions about pictures; the same form for training and evaluation.

    Items: `image`, `text_input` (the question), `text_output` (the answer), `answers` (a list of
    that one), `weights` (the list [1.0]), `question_id` (int), `instance_id` (str), `question_type`
    and `answer_type`.

    `annotation` lists every question as a dictionary with `question_id`, `image` (its name),
    `question`, `answer`, `answers`, `question_type`, `answer_type` and `instance_id`; `answer_list`
    holds all possible answers; `image_ids` (N,) tells which picture a question is about.
    """

    def __init__(
        self,
        arrays: Arrays,
        world: WorldConfig,
        questions: list[list[Question]],
        vis_processor: Processor | None = None,
        text_processor: Processor | None = None,
        name: str = "test",
    ) -> None:
        super().__init__(arrays, world, vis_processor, text_processor, name)
        self.image_ids: npt.NDArray[np.int64] = np.repeat(
            np.arange(len(questions)), [len(asked) for asked in questions]
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
                (image, question) for image, asked in enumerate(questions) for question in asked
            )
        ]
        self.answer_list = possible_answers()
        self._add_instance_ids()

    def __getitem__(self, index: int) -> dict[str, Any]:
        asked = self.annotation[index]
        return {
            "image": self._image(int(self.image_ids[index])),
            "text_input": self._processed(asked["question"]),
            "text_output": asked["answer"],
            "answers": asked["answers"],
            "weights": [1.0],
            "question_id": asked["question_id"],
            "instance_id": asked["instance_id"],
            "question_type": asked["question_type"],
            "answer_type": asked["answer_type"],
        }

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """A mini-batch of B questions: texts stay lists of strings, `answers` a list of lists.

        `image` is stacked, `question_id` (B,) int64. As LAVIS's VQA models want them in training:
        `answer`, all answers in a row, `weight`, theirs, float32, and `n_answers` (B,) int64, how
        many belong to each question.
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
        """The raw picture and the question with its answer, for reports."""
        asked = self.annotation[index]
        return self.picture(int(self.image_ids[index])), f"{asked['question']} {asked['answer']}"


class ToyCaptionEval(_ToyScenes):
    """Pictures to be described, as LAVIS's `COCOCapEvalDataset`.

    Items: `image`, `image_id` (int) and `instance_id` (str), one for each picture. `annotation`
    lists `image` (its name), `image_id` and `instance_id`.
    """

    def __init__(
        self,
        arrays: Arrays,
        world: WorldConfig,
        vis_processor: Processor | None = None,
        text_processor: Processor | None = None,
        name: str = "test",
    ) -> None:
        super().__init__(arrays, world, vis_processor, text_processor, name)
        self.annotation = [
            {"image": image, "image_id": number} for number, image in enumerate(self.image_names)
        ]
        self._add_instance_ids()

    def __getitem__(self, index: int) -> dict[str, Any]:
        told = self.annotation[index]
        return {
            "image": self._image(index),
            "image_id": told["image_id"],
            "instance_id": told["instance_id"],
        }

    def references(self) -> dict[int, list[str]]:
        """All captions of every picture, as they are in the data, by `image_id`."""
        found: dict[int, list[str]] = {image: [] for image in range(len(self.images))}
        for image, text in zip(self.image_ids.tolist(), self.texts, strict=True):
            found[image].append(text)
        return found


@registry.register_builder("toy_vqa")
class ToyVqaBuilder(ToyScenesBuilder):
    """Builds `train`, `val` and `test` (ToyVqa), `questions_per_image` about every picture."""

    train_dataset_cls = ToyVqa
    eval_dataset_cls = ToyVqa
    DATASET_CONFIG_DICT = {"default": str(_CONFIG_DIR / "toy_vqa" / "default.yaml")}

    def take_own(self, info: dict[str, Any]) -> dict[str, Any]:
        number = info.pop("questions_per_image", None)
        number = _DEFAULT_QUESTIONS if number is None else number
        whole = isinstance(number, int) and not isinstance(number, bool)
        if not whole or not 1 <= number <= MAX_QUESTIONS:
            raise ValueError(
                f"toy_vqa build_info: questions_per_image is {number!r}, expected a whole number "
                f"from 1 to {MAX_QUESTIONS}"
            )
        return {"questions_per_image": number}

    def make_dataset(
        self, name: str, arrays: Arrays, world: WorldConfig, data: Mapping[str, int]
    ) -> ToyVqa:
        stream = np.random.default_rng([data["seed"], SPLITS.index(name), _QUESTION_STREAM])
        questions = make_questions(arrays["scenes"], data["questions_per_image"], stream)
        processors = self._processors("train" if name == "train" else "eval")
        return ToyVqa(arrays, world, questions, **processors, name=name)


@registry.register_builder("toy_caption")
class ToyCaptionBuilder(ToyScenesBuilder):
    """Builds `train` (ToyScenesTrain), `val` and `test` (ToyCaptionEval)."""

    train_dataset_cls = ToyScenesTrain
    eval_dataset_cls = ToyCaptionEval
    DATASET_CONFIG_DICT = {"default": str(_CONFIG_DIR / "toy_caption" / "default.yaml")}

    def make_dataset(
        self, name: str, arrays: Arrays, world: WorldConfig, data: Mapping[str, int]
    ) -> ToyScenesTrain | ToyCaptionEval:
        if name == "train":
            return ToyScenesTrain(arrays, world, **self._processors("train"), name=name)
        return ToyCaptionEval(arrays, world, **self._processors("eval"), name=name)
