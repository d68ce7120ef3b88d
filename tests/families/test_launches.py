"""The kernels that a training step dispatches do not grow."""

from __future__ import annotations

import pytest

from lavis_mafa.families import AlbefMafa, Blip2Mafa, BlipMafa
from research.benchmarks.launches import deep_config, our_launches
from research.benchmarks.steps import BLIP2_MAFA, GRIT_VLP, MAFA


@pytest.mark.parametrize(
    ("family", "bert", "depth", "settings", "bound"),
    [
        (AlbefMafa, "med_config_tiny.json", 12, MAFA, 2000),
        (AlbefMafa, "med_config_tiny.json", 12, GRIT_VLP, 1625),
        (BlipMafa, "bert_config_tiny.json", 12, MAFA, 2725),
        (Blip2Mafa, "bert_config_tiny.json", 39, BLIP2_MAFA, 3090),
    ],
)
def test_step_dispatches_few_kernels(family, bert, depth, settings, bound, tmp_path):
    count = our_launches(family, deep_config(family, tmp_path, bert, depth), settings)
    assert count.total() <= bound, count.most_common(12)
