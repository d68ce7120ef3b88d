"""The toy world as data sets of downstream tasks, with the pictures and splits of `toy_scenes`.

| builder | samples |
|---|---|
| `toy_caption` | pictures to caption, as in LAVIS's `COCOCapEvalDataset` |
| `toy_vqa` | questions, as in LAVIS's data sets for VQA |
| `toy_ve` | sentences that a picture with an object of ambiguous colour entails or not |
| `toy_nlvr` | statements about two pictures, as in LAVIS's `NLVRDataset` |
| `toy_grounding` | expressions for an object, with the boxes of all objects |

A data set has the attributes of `_ToyPictures` and `annotation`, a list of rows.
"""

from pathlib import Path

import numpy as np
import torch
from lavis.common.registry import registry
from lavis.datasets.datasets.base_dataset import BaseDataset
from torch.utils.data import default_collate
from toy_expressions import make_expressions
from toy_questions import make_questions, possible_answers
from toy_sentences import CLASS_LABELS, ambiguous_cells, leave_open, make_sentences
from toy_statements import STATEMENT_TYPES, make_statements

from lavis_mafa.toyworld.builder import ToyScenesBuilder, _ToyScenesTrain
from lavis_mafa.toyworld.world import write_captions

CONFIGS = Path(__file__).resolve().parent / "configs"
PLUGIN = str(Path(__file__).resolve().parent / "toys.py")


class ToyTask(BaseDataset):
    """Rows about the pictures of a split of `toy_scenes`."""

    def __init__(self, pictures, rows):
        super().__init__(pictures.vis_processor, pictures.text_processor)
        self.pictures, self.world, self.scenes = pictures, pictures.world, pictures.scenes
        self.deterministic = pictures.deterministic
        self.annotation = [dict(row) for row in rows]
        self._add_instance_ids()
        if all("picture" in row for row in self.annotation):
            self.image_ids = np.array([row["picture"] for row in self.annotation], np.int64)

    def __getitem__(self, index):
        row = self.annotation[index]
        found = {key: value for key, value in row.items() if key not in ("picture", "text")}
        if "picture" in row:
            found["image"] = self.pictures.image_input(row["picture"])
        if "text" in row:
            found["text_input"] = self.pictures.text_input(row["text"])
        return found

    def show(self, index):
        """Return the unprocessed picture and text, for reports."""
        row = self.annotation[index]
        text = " ".join(str(row[key]) for key in ("text", "text_output") if key in row)
        return self.pictures.picture(row["picture"]), text


class ToyTaskBuilder(ToyScenesBuilder):
    """Builds a data set of rows from every split of `toy_scenes`.

    Attributes:
        own: keys of ``build_info`` that `toy_scenes` lacks, with their defaults.
        stream: number of the random stream of the rows; 0 to 3 are those of the pictures.
    """

    own = {}
    stream = 4

    def build_datasets(self):
        info = self.config.build_info
        own = {key: info.pop(key, None) or default for key, default in self.own.items()}
        return {
            split: self.rows_of(
                pictures, np.random.default_rng([info.get("seed") or 0, number, self.stream]), **own
            )
            for number, (split, pictures) in enumerate(super().build_datasets().items())
        }

    def rows_of(self, pictures, rng, **own):
        raise NotImplementedError


def register(name):
    def register_as(cls):
        yaml = str(CONFIGS / "datasets" / f"{name}.yaml")
        cls.DATASET_CONFIG_DICT = {"default": yaml}
        return registry.register_builder(name)(cls)

    return register_as


class ToyCaptions(ToyTask):
    def references(self):
        """Return the unprocessed captions of every picture, by `image_id`."""
        found = {image: [] for image in range(len(self))}
        for image, text in zip(self.pictures.image_ids, self.pictures.texts, strict=True):
            found[int(image)].append(text)
        return found


@register("toy_caption")
class ToyCaptionBuilder(ToyTaskBuilder):
    def rows_of(self, pictures, rng):
        if isinstance(pictures, _ToyScenesTrain):
            return pictures
        rows = [{"picture": number, "image_id": number} for number in range(len(pictures.images))]
        return ToyCaptions(pictures, rows)


class ToyQuestions(ToyTask):
    answer_list = possible_answers()

    def collater(self, samples):
        """Collate B questions as LAVIS's data sets for VQA: `answer` has all answers, `weight` one
        for each, and `n_answers` ``(B,)`` how many a question has."""
        batch = {key: [sample[key] for sample in samples] for key in samples[0]}
        batch["image"] = default_collate(batch["image"])
        batch["question_id"] = torch.tensor(batch["question_id"])
        batch["answer"] = batch["text_output"]
        batch["weight"] = torch.ones(len(samples))
        batch["n_answers"] = torch.ones(len(samples), dtype=torch.int64)
        return batch


@register("toy_vqa")
class ToyVqaBuilder(ToyTaskBuilder):
    holds = "questions"
    own = {"questions_per_image": 4}
    stream = 3

    def rows_of(self, pictures, rng, questions_per_image):
        questions = make_questions(pictures.scenes, questions_per_image, rng)
        rows = [
            {
                "picture": image,
                "text": question.text,
                "text_output": question.answer,
                "answers": [question.answer],
                "question_type": question.question_type,
                "answer_type": question.answer_type,
            }
            for image, of_image in enumerate(questions)
            for question in of_image
        ]
        return ToyQuestions(pictures, [{**row, "question_id": n} for n, row in enumerate(rows)])


@register("toy_ve")
class ToyEntailmentBuilder(ToyTaskBuilder):
    holds, num_classes = "labels", 3

    def rows_of(self, pictures, rng):
        used, cells = ambiguous_cells(pictures.scenes, rng)
        scenes, world = pictures.scenes[used], pictures.world
        pictures.images = pictures.images.copy()
        pictures.images[used] = leave_open(pictures.images[used], world, scenes, cells, rng)
        sentences = make_sentences(world, scenes, cells, rng).ravel()
        texts = write_captions(sentences, world.synonym_rate, rng)
        images = np.repeat(used, len(CLASS_LABELS)).tolist()
        labels = list(CLASS_LABELS.values()) * len(used)
        data = ToyTask(
            pictures,
            [
                {"picture": image, "text": text, "label": label, "image_id": image}
                for image, text, label in zip(images, texts, labels, strict=True)
            ],
        )
        data.sentences, data.open_cells = sentences, dict(zip(used.tolist(), cells, strict=True))
        return data


class ToyStatements(ToyTask):
    class_labels = {"False": 0, "True": 1}

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        left, right = sample.pop("pair")
        images = {"image0": left, "image1": right}
        return {**sample, **{k: self.pictures.image_input(one) for k, one in images.items()}}


@register("toy_nlvr")
class ToyNlvrBuilder(ToyTaskBuilder):
    holds, num_classes, images_per_sample = "labels", 2, 2
    own = {"statements_per_image": 2, "statement_types": STATEMENT_TYPES}

    def rows_of(self, pictures, rng, statements_per_image, statement_types):
        number = statements_per_image * len(pictures.scenes)
        statements = make_statements(pictures.scenes, number, rng, statement_types)
        rows = [
            {
                "pair": (one.left, one.right),
                "text": one.text,
                "label": int(one.label),
                "statement_type": one.statement_type,
            }
            for one in statements
        ]
        return ToyStatements(pictures, rows)


class ToyExpressions(_ToyScenesTrain):
    """Pictures and expressions as image-text pairs, without boxes."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "instance_id": str(index)}


@register("toy_grounding")
class ToyGroundingBuilder(ToyTaskBuilder):
    holds = "boxes"

    def rows_of(self, pictures, rng):
        world = pictures.world
        found = make_expressions(world, pictures.scenes, rng)
        if isinstance(pictures, _ToyScenesTrain):
            arrays = {"images": pictures.images, "scenes": pictures.scenes, **found}
            arrays["texts"] = np.array(found["texts"])
            processors = (pictures.vis_processor, pictures.text_processor)
            return ToyExpressions(arrays, world, *processors, name="train")

        def box(cell):
            row, column = divmod(int(cell), world.grid)
            side = float(world.cell_size)
            return [column * side, row * side, side, side]

        rows = [
            {
                "picture": image,
                "text": text,
                "index": number,
                "size": [world.image_size] * 2,
                "box": box(cell),
                "boxes": [box(one) for one in np.flatnonzero(pictures.scenes[image]["shape"])],
            }
            for number, (image, text, cell) in enumerate(
                zip(found["image_ids"].tolist(), found["texts"], found["cells"], strict=True)
            )
        ]
        return ToyTask(pictures, rows)
