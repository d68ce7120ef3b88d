"""The task for NLVR2 and SNLI-VE: scores, files, training accuracy."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from lavis.common.registry import registry
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lavis_mafa.downstream import MafaClassificationTask, MafaTextAssignmentTask
from lavis_mafa.tasks.tally import Tally
from lavis_mafa.training.figures import Figures

# True class, predicted class and kind of ten samples.
ROWS = [
    *[(1, 1, "both")] * 3,
    (0, 1, "both"),
    (2, 2, "one"),
    (0, 2, "one"),
    (1, 0, "one"),
    (2, 2, "one"),
    (1, 1, "same"),
    (0, 0, "same"),
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
    """Predicts the classes of `ROWS`."""

    def predict(self, samples):
        predicted = torch.tensor([ROWS[i][1] for i in samples["index"].tolist()])
        return {
            "predictions": nn.functional.one_hot(predicted, 3) * 2.5,
            "targets": samples["label"],
        }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("result_dir", "output_dir"):
        monkeypatch.setitem(registry.mapping["paths"], name, str(tmp_path))
    return tmp_path


def evaluate(dataset):
    task = MafaClassificationTask.setup_task(cfg=None)
    records = task.evaluation(Classifier(), DataLoader(dataset, batch_size=4), cuda_enabled=False)
    return task, records


def test_scores_are_percentages(folder):
    task, records = evaluate(Samples())
    scores = task.after_evaluation(records, "val", 3)
    of_types = {"acc_both": 75.0, "acc_one": 50.0, "acc_same": 100.0}
    assert scores == {"agg_metrics": 70.0, "acc": 70.0, **of_types}
    rows = json.loads((folder / "val_epoch3.json").read_text())
    assert rows == [
        {"instance_id": str(i), "prediction": predicted, "target": label}
        for i, (label, predicted, _) in enumerate(ROWS)
    ]


def test_duplicates_of_a_sampler_count_once(folder):
    """The shares of ranks are padded with repeated samples."""
    task, records = evaluate(Samples(kinds=False))
    scores = task.after_evaluation([*records, records[0], records[1]], "test", "best")
    assert scores == {"agg_metrics": 70.0, "acc": 70.0}
    assert len(json.loads((folder / "test_epochbest.json").read_text())) == len(ROWS)


@pytest.mark.parametrize("cls", [MafaClassificationTask, MafaTextAssignmentTask])
def test_training_accuracy(cls):
    task, tally = cls.setup_task(cfg=None), Tally()
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    for labels in ([1, 0], [1, 2], [0, 2]):
        figures = task.step_figures({"logits": logits, "labels": torch.tensor(labels)}, {})
        tally.add(figures)
    assert figures == {"correct": 0.0, "judged": 2.0}
    assert task.epoch_figures(tally) == {"accuracy": 50.0}
    step_log = mock.Mock()
    samples = {"epoch": 0, "iters": 0, "num_iters_per_epoch": 1}
    Figures(task, step_log, 50).record_step(
        {"logits": logits, "labels": torch.tensor([1, 0])}, samples, {"loss": 0.5}, 1e-3, 1
    )
    assert step_log.write.call_args.kwargs["correct"] == 2.0 and not step_log.append.called
    # LAVIS's models do not return logits.
    assert task.step_figures({"loss": torch.tensor(1.0)}, {}) == {}
    assert task.epoch_figures(Tally()) == {}


def test_nan_stops_a_classification():
    class Model:
        def predict(self, samples):
            logits = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])
            return {"predictions": logits, "targets": torch.tensor([1, 0])}

    task = MafaClassificationTask()
    task.inst_id_key = "instance_id"
    with pytest.raises(ValueError, match="1 of 4 predictions of classes are NaN"):
        task.valid_step(Model(), {"instance_id": ["a", "b"]})
