"""Convert the answers of annotators into a file of judgements, which names images and captions.

Labels name samples by number, so only the commands that also read the judged file can use them. A
file of judgements can be the truth of training data (`build_info.truth`); for its format see
`lavis_mafa.datasets.judgements`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lavis_mafa.datasets.judgements import Answers, JudgementRule
from lavis_mafa.datasets.training_set import TrainingSet
from lavis_mafa.io.files import write_json
from lavis_mafa.mining.judged_pairs import INVALID, VALID, Judged
from lavis_mafa.mining.model_and_data import data_of_judged
from lavis_mafa.mining.quality.annotator_labels import (
    Labels,
    read_labels,
    require_about,
    rows_of_pairs,
)


def write_judgements(
    paths: Sequence[Path],
    judged_path: Path,
    output: Path,
    cfg_path: str | None = None,
    options: Sequence[str] | None = None,
) -> None:
    """Write the judgements of files of labels, and print how many pairs they decide.

    Args:
        paths: ``labels.json`` of the annotators.
        judged_path: the judged pairs that their pages were drawn from.
        output: JSON file to write.
        cfg_path, options: of the data, instead of those that the judged file records.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if the labels are about other pairs, the data cannot be built or have images
            without a unique name, or no pair was answered yes or no.
    """
    if output.suffix != ".json":
        raise ValueError(f"--output {output}: expected a name that ends with .json")
    files = list(dict.fromkeys(paths))
    judged = Judged.load(judged_path)
    labels = [read_labels(path) for path in files]
    for path, one in zip(files, labels, strict=True):
        try:
            require_about(one, judged)
            rows_of_pairs(one.answers, judged)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    data = data_of_judged(judged, judged_path, cfg_path, options)
    answers = _answers_by_name(labels, data)
    rows = [
        {"image": image, "caption": caption, "yes": one.yes, "no": one.no}
        for (image, caption), one in answers.items()
        if one.yes + one.no
    ]
    if not rows:
        raise ValueError(
            f"{', '.join(map(str, files))}: no pair was answered yes or no, expected at least one"
        )
    write_json(output, rows)
    print(f"written: {output}, {_summary(answers.values())}")
    print("use it as build_info.truth of the data")


def _answers_by_name(labels: Sequence[Labels], data: TrainingSet) -> dict[tuple[str, str], Answers]:
    """Return the votes of all annotators by image name and caption; none if all were unsure.

    Sample numbers of one image and one caption, such as those of an image with several captions,
    are one pair.

    Raises:
        ValueError: if an image has no name, or shares its name with another image.
    """
    given = [(pair, answer) for one in labels for pair, answer in one.answers.items()]
    names = _image_names({image for (image, _), _ in given}, data)
    captions = {text: data.annotated(text)[1] for text in {text for (_, text), _ in given}}
    found: dict[tuple[str, str], Answers] = {}
    for (image, text), answer in given:
        pair = names[image], captions[text]
        vote = Answers(yes=int(answer == "yes"), no=int(answer == "no"))
        found[pair] = found.get(pair, Answers()).pooled(vote)
    return found


def _image_names(numbers: Collection[int], data: TrainingSet) -> Mapping[int, str]:
    """Return the names of the images of some samples, as in the annotation file.

    Raises:
        ValueError: if an image has no name, or shares its name with another image of the data.
    """
    names: dict[int, str] = {}
    for number in numbers:
        name = data.annotated(number)[0]
        if name is None:
            raise ValueError(
                f"the image of sample {number} has no file name, expected one, because a judgement "
                "names the file of its image: pass such labels as they are, to "
                "`lavis-mafa label quality --labels`"
            )
        names[number] = name
    wanted, sample_of = set(names.values()), dict[str, int]()
    for number in range(len(data)):
        name = data.annotated(number)[0]
        if name not in wanted or name is None:
            continue
        first = sample_of.setdefault(name, number)
        if data.image_ids[first] != data.image_ids[number]:
            raise ValueError(
                f"the image name {name!r} is that of samples {first} and {number}, which show "
                "different images; expected a name for each image: rename one of the files, or "
                "give both the same image_id if they are equal"
            )
    return names


def _summary(answers: Iterable[Answers]) -> str:
    """Return the numbers of pairs by verdict of the default rule, in words."""
    rule, votes = JudgementRule(), list(answers)
    decided = np.array([rule.verdict(one) for one in votes if one.yes + one.no])
    unsure = len(votes) - len(decided)
    valid, invalid = int((decided == VALID).sum()), int((decided == INVALID).sum())
    text = f"{len(decided)} pairs: {valid} valid, {invalid} invalid"
    text += f", {len(decided) - valid - invalid} undecided because annotators disagree"
    return f"{text}; left out {unsure} pairs that were only answered unsure"
