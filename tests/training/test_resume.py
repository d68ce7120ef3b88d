"""A resumed run equals an uninterrupted run bit for bit."""

from __future__ import annotations

import pytest
import torch
from runs import run_here, same_weights, weights

from lavis_mafa import load_model
from lavis_mafa.training.checkpoint import trained_state
from lavis_mafa.training.state import BestFigure


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_here(folder)
    return folder


def test_workers_change_no_random_augmentation(tmp_path):
    changes = {
        "run__max_epoch": 2,
        "datasets__toy_scenes__vis_processor__train__name": "blip_image_train",
        "datasets__toy_scenes__vis_processor__train__image_size": 32,
        "datasets__toy_scenes__vis_processor__eval__name": "blip_image_eval",
        "datasets__toy_scenes__vis_processor__eval__image_size": 32,
    }
    for workers in (2, 0):
        run_here(tmp_path / str(workers), run__num_workers=workers, **changes)
    assert same_weights(weights(tmp_path / "2"), weights(tmp_path / "0"))


def test_best_value_is_resumed(tmp_path):
    changes = {"run__valid_splits": '["val"]'}
    run_here(tmp_path, run__max_epoch=1, **changes)
    for name in ("checkpoint_last.pth", "checkpoint_best.pth"):
        path = tmp_path / "job" / name
        content = torch.load(path, weights_only=True)
        assert content["run"]["best"]["epoch"] == 0 and content["run"]["best"]["split"] == "val"
        content["run"]["best"]["value"] = 1000.0
        torch.save(content, path)
    runner = run_here(tmp_path, run__resume_ckpt_path="auto", **changes)
    assert runner.progress.best == BestFigure(1000.0, 0, "val")


def test_settings_of_adamw_come_from_the_config(tmp_path):
    """The checkpoint holds them too, as the optimizer's state."""
    run_here(tmp_path, run__max_steps=2)
    changes = {"run__beta2": 0.9, "run__weight_decay": 0.3, "run__max_steps": 3}
    runner = run_here(tmp_path, **changes, run__resume_ckpt_path="auto")
    groups = runner.optimizer.param_groups
    assert {group["betas"] for group in groups} == {(0.9, 0.9)}
    assert {group["weight_decay"] for group in groups} == {0, 0.3}


def test_resuming_with_other_settings_is_rejected(uninterrupted, tmp_path):
    changes = {"run__batch_size_train": 4, "run__grit__search_space": 8}
    changes |= {"run__grit__hardness": 0.9, "run__accum_grad_iters": 2}
    changes |= {"run__seed": 7, "run__amp": True, "run__amp_dtype": "bf16"}
    path = uninterrupted / "job" / "checkpoint_last.pth"
    with pytest.raises(ValueError) as refused:
        run_here(tmp_path, run__resume_ckpt_path=path, **changes)
    for message in (
        "run.batch_size_train: 8 before, 4 now",
        "run.grit.search_space: 16 before, 8 now",
        "run.grit.hardness: 1.0 before, 0.9 now",
        "run.accum_grad_iters: ",
        "run.seed: 42 before, 7 now",
        "run.amp: False before, True now",
        "run.amp_dtype: fp16 before, bf16 now",
    ):
        assert message in str(refused.value)


def test_resuming_with_another_vocabulary_is_refused(uninterrupted, tmp_path):
    content = torch.load(uninterrupted / "job/checkpoint_last.pth", weights_only=True)
    torch.save({**content, "vocabulary": "other"}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="trained with another vocabulary"):
        run_here(tmp_path, run__resume_ckpt_path=tmp_path / "other.pth")


def test_resumed_run_keeps_its_folder(tmp_path):
    first = run_here(tmp_path, run__job_id=None, run__max_steps=3)
    resumed = run_here(tmp_path, run__job_id=None, run__resume_ckpt_path="auto", run__max_steps=5)
    assert resumed.output_dir == first.output_dir and resumed.progress.global_step == 5
    other = run_here(tmp_path, run__job_id=None, run__max_steps=1)
    assert other.output_dir != first.output_dir


def test_folder_of_another_run_is_rejected(uninterrupted):
    from lavis_mafa.settings import ConfigError

    with pytest.raises(ConfigError, match="holds another run's checkpoint"):
        run_here(uninterrupted)


@pytest.fixture
def validated(monkeypatch):
    """Give validation the figures of a list, and record the weights that are tested."""
    from lavis_mafa.tasks import MafaPretrainTask

    values, tested = [], []

    def evaluation(self, model, data_loader, **_):
        if values:
            return {"agg_metrics": values.pop(0)}
        tested.append({k: v.clone() for k, v in trained_state(model).items()})
        return {"agg_metrics": 0.0}

    monkeypatch.setattr(MafaPretrainTask, "evaluation", evaluation)
    return values, tested


@pytest.mark.parametrize("origin", ["checkpoint_0.pth", "checkpoint_last.pth"])
@pytest.mark.parametrize("job", ["job", "other"])
def test_best_weights_are_of_the_resumed_epochs(tmp_path, validated, caplog, origin, job):
    """Epoch 2 was the best, but the run goes back to an epoch before it, or to another folder."""
    values, tested = validated
    changes = {"run__valid_splits": '["val"]', "run__test_splits": '["test"]'}
    values += [0.5, 0.4, 0.9]
    run_here(tmp_path, **changes, run__keep_every_epochs=1)
    best = weights(tmp_path, "checkpoint_best.pth")
    keeps = (origin, job) == ("checkpoint_last.pth", "job")
    epochs = 4 if origin == "checkpoint_last.pth" else 2
    values += [0.9 if keeps else 0.3]  # no better than the best so far
    path = tmp_path / "job" / origin
    changes |= {"run__init_lr": 1e-3, "run__job_id": job, "run__max_epoch": epochs}
    run_here(tmp_path, **changes, run__resume_ckpt_path=path)
    expected = best if keeps else weights(tmp_path, job=job)
    assert same_weights(tested[-1], expected) and not values
    assert same_weights(weights(tmp_path, "checkpoint_best.pth", job), expected)
    assert ("best figure is forgotten" in caplog.text) == (not keeps)
    aside = list(tmp_path.glob("*/discarded_best.pth"))
    if (origin, job) == ("checkpoint_0.pth", "job"):
        assert same_weights(weights(tmp_path, aside[0].name), best) and len(aside) == 1
    else:
        assert not aside and same_weights(weights(tmp_path, "checkpoint_best.pth"), best)


def test_failing_validation_keeps_the_epoch(tmp_path, monkeypatch):
    from lavis_mafa.tasks import MafaPretrainTask

    monkeypatch.setattr(MafaPretrainTask, "evaluation", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_here(tmp_path, run__valid_splits='["val"]')
    saved = torch.load(tmp_path / "job" / "checkpoint_last.pth", weights_only=True)
    assert saved["run"]["epoch"] == 1


def test_resuming_with_another_judge_is_refused(tmp_path):
    changes = {"model__mafa__con_d__arch": "albef_mafa", "model__mafa__con_d__model_type": "tiny"}
    for seed in (0, 1):
        torch.manual_seed(seed)
        state = load_model("albef_mafa", "tiny").state_dict()
        torch.save({"model": state}, tmp_path / f"{seed}.pth")
    key = "model__mafa__con_d__checkpoint"
    run_here(tmp_path, **changes, **{key: tmp_path / "0.pth"}, run__max_steps=1)
    with pytest.raises(ValueError, match="another Con-D.*weights of model.mafa.con_d"):
        run_here(tmp_path, **changes, **{key: tmp_path / "1.pth"}, run__resume_ckpt_path="auto")
