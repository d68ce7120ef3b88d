"""The task for NLVR2 and SNLI-VE: figures, files, training accuracy."""

from __future__ import annotations

import json

import pytest
import torch
from lavis.common.registry import registry
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lavis_mafa.tasks import MafaClassificationTask, MafaTextAssignmentTask
from lavis_mafa.tasks.tally import Tally

# Right class, predicted class and kind of ten samples.
ROWS = [
    *[(1, 1, "both")] * 3,
    *[(0, 1, "both"), (2, 2, "one"), (0, 2, "one"), (1, 0, "one"), (2, 2, "one")],
    *[(1, 1, "same"), (0, 0, "same")],
]


class Samples(Dataset):
    def __init__(self, kinds=True):
        self.kinds = kinds

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, i):
        label, _, kind = ROWS[i]
        kinds = {"statement_type": kind} if self.kinds else {}
        return {"label": label, "instance_id": str(i), "index": i, **kinds}


class Classifier(nn.Module):
    """Predicts what `ROWS` says."""

    def predict(self, samples):
        told = torch.tensor([ROWS[i][1] for i in samples["index"].tolist()])
        return {"predictions": nn.functional.one_hot(told, 3) * 2.5, "targets": samples["label"]}


@pytest.fixture
def folder(tmp_path):
    before = dict(registry.mapping["paths"])
    registry.mapping["paths"].update(result_dir=str(tmp_path), output_dir=str(tmp_path))
    yield tmp_path
    registry.mapping["paths"].clear()
    registry.mapping["paths"].update(before)


def evaluate(dataset):
    task = MafaClassificationTask.setup_task(cfg=None)
    found = task.evaluation(Classifier(), DataLoader(dataset, batch_size=4), cuda_enabled=False)
    return task, found


def test_figures_are_percentages(folder):
    task, found = evaluate(Samples())
    figures = task.after_evaluation(found, "val", 3)
    assert figures == {
        "agg_metrics": 70.0,
        "acc": 70.0,
        "acc_both": 75.0,
        "acc_one": 50.0,
        "acc_same": 100.0,
    }
    written = json.loads((folder / "val_epoch3.json").read_text())
    assert written == [
        {"instance_id": str(i), "prediction": told, "target": label}
        for i, (label, told, _) in enumerate(ROWS)
    ]


def test_duplicates_of_a_sampler_count_once(folder):
    """The shares of ranks are padded with samples that were there."""
    task, found = evaluate(Samples(kinds=False))
    figures = task.after_evaluation([*found, found[0], found[1]], "test", "best")
    assert figures == {"agg_metrics": 70.0, "acc": 70.0}
    assert len(json.loads((folder / "test_epochbest.json").read_text())) == len(ROWS)


def test_lavis_s_task_counts_the_same(folder):
    """It tells shares of one where ours tells percentages."""
    task, found = evaluate(Samples())
    theirs = registry.get_task_class("multimodal_classification").setup_task(cfg=None)
    batches = DataLoader(Samples(), batch_size=4)
    told = [one for batch in batches for one in theirs.valid_step(Classifier(), batch)]
    share = theirs.after_evaluation(told, "val", 0)["acc"]
    assert 100 * float(share) == pytest.approx(task.after_evaluation(found, "val", 1)["acc"])


def test_samples_without_a_name():
    task = MafaClassificationTask.setup_task(cfg=None)
    with pytest.raises(ValueError, match="evaluation needs instance_id in a sample; it has index"):
        task.valid_step(Classifier(), {"index": torch.tensor([1]), "label": torch.tensor([1])})


@pytest.mark.parametrize("cls", [MafaClassificationTask, MafaTextAssignmentTask])
def test_accuracy_in_training(cls):
    task, tally = cls.setup_task(cfg=None), Tally()
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    for labels in ([1, 0], [1, 2], [0, 2]):
        figures = task.step_figures({"logits": logits, "labels": torch.tensor(labels)}, {})
        tally.add(figures)
    assert figures == {"correct": 0.0, "judged": 2.0}
    assert task.epoch_figures(tally) == {"accuracy": 50.0}
    # LAVIS's models do not tell.
    assert task.step_figures({"loss": torch.tensor(1.0)}, {}) == {}
    assert task.epoch_figures(Tally()) == {}
