"""Grouping parallel to training on a GPU; run by `bash run_scripts/gpu_checks.sh`."""

import numpy as np
import pytest
import torch
from simulated_gpu import CUDA, simulated_gpu

from lavis_mafa.algorithm.grit import GritCollector, GritSettings


def test_a_restored_queue_goes_where_the_next_features_are():
    """The state is on the CPU; whoever restores it names no device."""
    features = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    parts = [
        (torch.arange(40)[at], features[at], features[at]) for at in (slice(24), slice(24, 40))
    ]
    orders = []
    with simulated_gpu():
        for restored in (False, True):
            collector = GritCollector(
                GritSettings(queue_size=30, search_space=10, regions=True), 4, seed=1
            )
            collector.collect(*(one.to(CUDA) for one in parts[0]))
            if restored:
                state = collector.state_dict()
                collector = GritCollector(
                    GritSettings(queue_size=30, search_space=10, regions=True), 4, seed=1
                )
                collector.load_state_dict(state)
            collector.collect(*(one.to(CUDA) for one in parts[1]))
            orders.append(collector.finish().tolist())
    assert orders[0] == orders[1] and sorted(orders[0]) == list(range(40))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_grouping_waits_for_its_features_but_not_for_later_work():
    rng = np.random.default_rng(0)
    # Integer features: their products are the same on every device.
    images, texts = (torch.from_numpy(rng.integers(-2, 3, (600, 8))).float() for _ in range(2))
    index = torch.arange(600)
    orders = {}
    for device in ("cpu", "cuda"):
        collector = GritCollector(
            GritSettings(queue_size=200, search_space=60), 8, seed=1, image_ids=np.arange(600) // 5
        )
        parts = [part.to(device) for part in (index, images, texts)]
        collector.collect(*(part[:200] for part in parts))
        collector._pending[-1].result()
        if device == "cuda":
            torch.cuda._sleep(10**9)  # features that are still being computed
            late = [part + 0 for part in parts]
            collector.collect(*(part[200:400] for part in late))
            torch.cuda._sleep(5 * 10**9)  # training continues
            training_step = torch.cuda.current_stream().record_event()
            collector._pending[-1].result()
            assert not training_step.query()
            collector.collect(*(part[400:] for part in parts))
        else:
            collector.collect(*(part[200:] for part in parts))
        orders[device] = collector.finish().tolist()
    assert orders["cuda"] == orders["cpu"]
