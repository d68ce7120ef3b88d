"""Numbers of rows, by which judges and grouping find them in a data set."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sentence_transformers", minversion="6")
pytest.importorskip("datasets")

from datasets import Dataset, DatasetDict, concatenate_datasets  # noqa: E402
from tiny_sentences import pairs  # noqa: E402

from lavis_mafa.integrations.rows import Rows, numbered  # noqa: E402

CHANGES = {
    "shuffled": lambda data: data.shuffle(seed=0),
    "sorted": lambda data: data.sort("anchor"),
    "filtered": lambda data: data.filter(lambda row: row["anchor"] > "g"),
    "split": lambda data: data.train_test_split(0.25, seed=0)["train"],
    "joined": lambda data: concatenate_datasets([pairs(20, seed=2), data]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_are_found_after_a_data_set_was_changed(change):
    data = pairs()
    other = CHANGES[change](data)
    rows = Rows(data)
    numbers = torch.tensor(other["label"])
    for number, row in zip(rows.places(numbers).tolist(), other, strict=True):
        known = row["anchor"] in data["anchor"]
        assert (number >= 0) == known and (not known or data[number] == row)
    assert rows.known(numbers) == (change != "joined")


def test_equal_rows_have_different_numbers():
    data = numbered(Dataset.from_dict({"a": ["x", "x", "y"], "b": ["z", "z", "z"]}))
    assert len(set(data["label"])) == 3 and not Rows(data).repeated


@pytest.mark.parametrize(
    "given, why",
    [
        (lambda: DatasetDict(train=unnumbered()), "got DatasetDict, expected one datasets.Dataset"),
        (lambda: unnumbered().to_iterable_dataset(), "got IterableDataset|streamed"),
        (lambda: [{"anchor": "a", "positive": "b"}], "got list, expected one"),
        (lambda: unnumbered().select([]), "got 0 rows"),
        (lambda: unnumbered().select_columns(["anchor"]), r"columns \['anchor'\], expected"),
        (lambda: pairs(), "has a column 'label' already"),
    ],
)
def test_what_cannot_be_numbered_is_refused(given, why):
    with pytest.raises(ValueError, match=why):
        numbered(given())


def test_rows_that_were_not_numbered_before_they_were_joined_are_refused():
    joined = concatenate_datasets([pairs(), unnumbered()])
    with pytest.raises(ValueError, match=f"{len(unnumbered())} rows have no number"):
        Rows(joined)


def unnumbered():
    return pairs().remove_columns("label")
