"""The toy world as data sets of downstream tasks, with the pictures and splits of `toy_scenes`.

| builder | samples |
|---|---|
| `toy_caption` | pictures to caption, as in LAVIS's `COCOCapEvalDataset` |
| `toy_vqa` | questions, as in LAVIS's data sets for VQA |
| `toy_ve` | a colour and a shape: an object has both, only the shape, or none has it |
| `toy_nlvr` | statements about the backgrounds of two pictures, as in LAVIS's `NLVRDataset` |
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

from lavis_mafa.toyworld import BACKGROUNDS, COLOURS, SHAPES
from lavis_mafa.toyworld.builder import ToyScenesBuilder, _ToyScenesTrain
from lavis_mafa.toyworld.world import MAX_OBJECTS, PLURALS

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


@register("toy_caption")
class ToyCaptionBuilder(ToyTaskBuilder):
    def rows_of(self, pictures, rng):
        if isinstance(pictures, _ToyScenesTrain):
            return pictures
        rows = [{"picture": number, "image_id": number} for number in range(len(pictures.images))]
        found = ToyTask(pictures, rows)
        found.text = list(pictures.texts)
        found.img2txt = {image: [] for image in range(len(rows))}
        for text, image in enumerate(pictures.image_ids):
            found.img2txt[int(image)].append(text)
        return found


class ToyQuestions(ToyTask):
    answer_list = ["yes", "no", *map(str, range(MAX_OBJECTS + 1)), *COLOURS, *BACKGROUNDS]

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
    own = {"questions_per_image": 4}
    stream = 3

    def rows_of(self, pictures, rng, questions_per_image):
        rows = []
        for image, scene in enumerate(pictures.scenes):
            known = questions_about(scene)
            for place in rng.choice(len(known), questions_per_image, replace=False):
                text, answer, kind = known[place]
                row = {"picture": image, "text": text, "text_output": answer, "answers": [answer]}
                rows.append({**row, "answer_type": kind, "question_id": len(rows)})
        return ToyQuestions(pictures, rows)


def questions_about(scene):
    """Return questions about a scene with their answers and types of VQA v2, at least nine."""
    shown = [
        (SHAPES[scene["shape"][cell] - 1], COLOURS[scene["colour"][cell] - 1])
        for cell in np.flatnonzero(scene["shape"])
    ]
    found = [("what colour is the background?", BACKGROUNDS[scene["background"] - 1], "other")]
    for shape in SHAPES:
        colours = [colour for one, colour in shown if one == shape]
        found.append((f"is there a {shape}?", "yes" if colours else "no", "yes/no"))
        found.append((f"how many {PLURALS[shape]} are there?", str(len(colours)), "number"))
        if len(colours) == 1:
            found.append((f"what colour is the {shape}?", colours[0], "other"))
    return found


@register("toy_ve")
class ToyEntailmentBuilder(ToyTaskBuilder):
    holds, num_classes = "labels", 3

    def rows_of(self, pictures, rng):
        """Make a sentence of each of SNLI-VE's labels, contradiction, neutral and entailment."""
        every, rows = [(colour, shape) for colour in COLOURS for shape in SHAPES], []
        for image, scene in enumerate(pictures.scenes):
            cells = np.flatnonzero(scene["shape"])
            shown = [
                every[(scene["colour"][c] - 1) * len(SHAPES) + scene["shape"][c] - 1] for c in cells
            ]
            shapes = {shape for _, shape in shown}
            absent = [one for one in every if one[1] not in shapes]
            others = [one for one in every if one[1] in shapes and one not in shown]
            for label, choices in enumerate((absent, others, shown)):
                colour, shape = choices[int(rng.integers(len(choices)))]
                text = f"a {colour} {shape}"
                rows.append({"picture": image, "text": text, "label": label, "image_id": image})
        return ToyTask(pictures, rows)


class ToyStatements(ToyTask):
    class_labels = {"False": 0, "True": 1}

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        left, right = sample.pop("pair")
        images = {"image0": left, "image1": right}
        return {**sample, **{k: self.pictures.image_input(one) for k, one in images.items()}}


@register("toy_nlvr")
class ToyNlvrBuilder(ToyTaskBuilder):
    holds, num_classes = "labels", 2
    own = {"statements_per_image": 2, "statement_types": ("both", "side", "same")}

    def rows_of(self, pictures, rng, statements_per_image, statement_types):
        """Make as many true statements of each kind as false ones."""
        rows, grounds = [], [BACKGROUNDS[one - 1] for one in pictures.scenes["background"]]
        while len(rows) < statements_per_image * len(grounds):
            kind = statement_types[len(rows) % len(statement_types)]
            label = len(rows) // len(statement_types) % 2
            pair = left, right = rng.choice(len(grounds), 2, replace=False).tolist()
            ground = grounds[pair[int(rng.integers(2))]]
            text, true = {
                "both": (f"both are on {ground}", grounds[left] == grounds[right]),
                "side": (f"the left is on {ground}", grounds[left] == ground),
                "same": ("both have the same background", grounds[left] == grounds[right]),
            }[kind]
            if true == label:
                rows.append({"pair": pair, "text": text, "label": label, "statement_type": kind})
        return ToyStatements(pictures, rows)


class ToyExpressions(_ToyScenesTrain):
    """Pictures and expressions as image-text pairs, without boxes."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "instance_id": str(index)}


@register("toy_grounding")
class ToyGroundingBuilder(ToyTaskBuilder):
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
