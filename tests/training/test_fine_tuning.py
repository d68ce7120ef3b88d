"""Fine-tuning for retrieval by the real commands, on the toy world and photographs."""

from __future__ import annotations

from fine_tuning import (
    assert_trains_and_evaluates,
    checkpoint,  # noqa: F401
)


def test_train_then_evaluate(checkpoint, tmp_path):  # noqa: F811
    assert_trains_and_evaluates("retrieval_ft_toy", "toy_scenes", "txt_map_r", checkpoint, tmp_path)
