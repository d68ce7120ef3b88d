"""The histogram of Con-D's probabilities: bins of a step, sums of an epoch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from lavis_mafa.algorithm.mining import ABSENT, Connections, MiningRule
from lavis_mafa.algorithm.output import StepOutput
from lavis_mafa.algorithm.pickers import NONE
from lavis_mafa.tasks import MafaPretrainTask
from lavis_mafa.tasks.mafa_pretrain import HISTOGRAM_BINS
from lavis_mafa.tasks.tally import Tally

NAN = float("nan")


def set_up_task(truth=None):
    told = MafaPretrainTask({})
    told.before_training(SimpleNamespace(con_d=None), SimpleNamespace(truth=truth))
    return told


def connections_with(probability):
    """Return connections in which every anchor except those with None picked the next one."""
    size = len(probability)
    hard = [NONE if p is None else (k + 1) % size for k, p in enumerate(probability)]
    p = torch.tensor([NAN if p is None else p for p in probability])
    state = MiningRule().states(p)
    state[torch.tensor(hard) == NONE] = ABSENT
    return Connections(
        torch.eye(size, dtype=torch.bool), torch.tensor(hard), torch.full((size,), NONE), p, state
    )


def output(i2t, t2i):
    size = len(i2t)
    return StepOutput(
        own=torch.arange(size),
        candidates=10 * torch.arange(size),
        i2t=connections_with(i2t),
        t2i=connections_with(t2i),
    )


def non_zero(counts):
    return {place: n for place, n in enumerate(counts) if n}


def test_bins_exclude_their_lower_and_include_their_upper_end():
    told, tally = set_up_task(), Tally()
    tally.add(told.step_bins(output([0.0, 0.5, 0.8, 1.0], [0.80001, None, 0.01, 0.011])))
    tally.add(told.step_bins(output([0.5, None, None, NAN], [None] * 4)))
    histogram = told.epoch_histogram(tally)
    assert list(histogram) == ["bins", "i2t", "t2i"] and histogram["bins"] == HISTOGRAM_BINS == 100
    assert non_zero(histogram["i2t"]["unknown"]) == {0: 1, 49: 2, 79: 1, 99: 1}
    assert non_zero(histogram["t2i"]["unknown"]) == {80: 1, 0: 1, 1: 1}
    assert set(histogram["i2t"]) == {"unknown"}


def test_histogram_is_split_by_truth_if_known():
    # Valid: image 0 with text 10, and image 20 with text 10, as data set indices.
    valid = {(0, 10), (20, 10)}

    def truth(images, texts):
        return np.array([pair in valid for pair in zip(images.tolist(), texts.tolist())])  # noqa: B905

    told = set_up_task(truth)
    histogram = told.epoch_histogram(
        Tally(told.step_bins(output([0.9, 0.2, 0.3], [0.7, 0.6, 0.1])))
    )
    # i2t: images 0, 10, 20 with texts 10, 20, 0; t2i: texts 0, 10, 20 with images 10, 20, 0.
    assert non_zero(histogram["i2t"]["true"]) == {89: 1}
    assert non_zero(histogram["i2t"]["false"]) == {19: 1, 29: 1}
    assert non_zero(histogram["t2i"]["true"]) == {59: 1}
    assert non_zero(histogram["t2i"]["false"]) == {69: 1, 9: 1}
